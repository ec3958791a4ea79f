"""The CustomResourceDefinition on a real API server: rejections, defaults, columns and explanations."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client, config

from minisgl_operator.api.crd import NAME, crd
from minisgl_operator.api.schema import Schema
from minisgl_operator.api.types import GROUP, PLURAL, VERSION
from support.cluster.control_plane import LocalControlPlane
from support.cluster.validation_cases import CASES, EDITS, Case, Edit, smallest

NAMESPACE = "inference-models"
PLACE = {"group": GROUP, "version": VERSION, "namespace": NAMESPACE, "plural": PLURAL}

STATUS: dict[str, Any] = {
    "observedGeneration": 1,
    "phase": "Degraded",
    "conditions": [
        {
            "type": "Ready",
            "status": "True",
            "reason": "Routable",
            "message": "1 of 2 replicas is routable",
            "observedGeneration": 1,
            "lastTransitionTime": "2026-01-02T03:04:05Z",
        }
    ],
    "replicas": 2,
    "readyReplicas": 1,
    "updatedReplicas": 2,
    "ranks": "3/4",
    "selector": "app.kubernetes.io/instance=demo,apps.kubernetes.io/pod-index=0",
    "url": "http://demo.team.svc/v1",
    "model": {"name": "Qwen/Qwen3-0.6B", "commit": "abc", "architecture": "Qwen3ForCausalLM", "maxModelLen": 4096},
    "cache": {"phase": "Done", "percent": 100},
    "revision": "0123456789",
    "replicaStatuses": [
        {
            "name": "demo-r0",
            "phase": "Ready",
            "revision": "0123456789",
            "readyRanks": 2,
            "ranks": 2,
            "nodes": ["n0", "n1"],
            "transport": "gloo",
            "dataTypes": {"weights": "fp8-channel", "kvCache": "fp8_e4m3"},
            "epoch": [1_795_000_000_000, 3],
            "restarts": 1,
            "startupSeconds": 3.25,
            "timings": {"rendezvous": 0.5, "load": 2.75},
            "lastFailure": {
                "rank": 1,
                "pod": "demo-r0-1",
                "reason": "Killed",
                "exitCode": -9,
                "message": "its last words",
                "at": "2026-01-02T03:04:05Z",
            },
        }
    ],
    "frontend": {"replicas": 1, "readyReplicas": 1},
}


@pytest.fixture(scope="module")
def cluster(control_plane: LocalControlPlane) -> LocalControlPlane:
    control_plane.apply(crd())
    control_plane.wait_for_definition(NAME)
    control_plane.kubectl("create", "namespace", NAMESPACE)
    # Established: requests are served. kubectl finds the short name a little later.
    end = time.monotonic() + 90
    while "imodel" not in control_plane.kubectl("api-resources", f"--api-group={GROUP}").stdout:
        assert time.monotonic() < end
    return control_plane


@pytest.fixture(scope="module")
def models(cluster: LocalControlPlane) -> Iterator[client.CustomObjectsApi]:
    with config.new_client_from_config(str(cluster.kubeconfig)) as api:
        yield client.CustomObjectsApi(api)


def _placed(model: dict[str, Any]) -> dict[str, Any]:
    return model | {"metadata": model["metadata"] | {"namespace": NAMESPACE}}


def _refused(case: Case | Edit, error: client.ApiException) -> None:
    message = json.loads(error.body)["message"]
    assert case.field and case.field in message, message
    assert case.message in message, message


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_table(models: client.CustomObjectsApi, case: Case) -> None:
    options = {"dry_run": "All", "field_validation": "Strict"}
    if not case.field:
        models.create_namespaced_custom_object(**PLACE, body=_placed(case.model), **options)
        return
    with pytest.raises(client.ApiException) as raised:
        models.create_namespaced_custom_object(**PLACE, body=_placed(case.model), **options)
    _refused(case, raised.value)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_edits(models: client.CustomObjectsApi, edit: Edit) -> None:
    before = models.create_namespaced_custom_object(**PLACE, body=_placed(edit.before))
    after = _placed(edit.after)
    after["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
    try:
        if not edit.field:
            models.replace_namespaced_custom_object(**PLACE, name="demo", body=after)
            return
        with pytest.raises(client.ApiException) as raised:
            models.replace_namespaced_custom_object(**PLACE, name="demo", body=after)
        _refused(edit, raised.value)
    finally:
        models.delete_namespaced_custom_object(**PLACE, name="demo")


def test_a_status_is_stored_shown_in_columns_and_cannot_change_the_spec(
    cluster: LocalControlPlane, models: client.CustomObjectsApi
) -> None:
    models.create_namespaced_custom_object(**PLACE, body=_placed(smallest("shown", replicas=2)))
    patch = {"status": STATUS, "spec": {"replicas": 7}}
    models.patch_namespaced_custom_object_status(**PLACE, name="shown", body=patch, field_validation="Strict")
    stored = models.get_namespaced_custom_object(**PLACE, name="shown")
    assert stored["status"] == STATUS
    assert stored["spec"]["replicas"] == 2

    heading, line = cluster.kubectl("-n", NAMESPACE, "get", "imodel", "shown").stdout.splitlines()
    assert heading.split() == ["NAME", "READY", "PHASE", "REASON", "REPLICAS", "RANKS", "MODEL", "AGE"]
    assert line.split()[:-1] == ["shown", "True", "Degraded", "Routable", "1", "3/4", "Qwen/Qwen3-0.6B"]
    wide = cluster.kubectl("-n", NAMESPACE, "get", "imodel", "shown", "-o", "wide").stdout.splitlines()
    assert wide[0].split()[-2:] == ["TRANSPORT", "URL"]
    assert wide[1].split()[-2:] == ["gloo", "http://demo.team.svc/v1"]
    cluster.kubectl("-n", NAMESPACE, "wait", "imodel/shown", "--for=condition=Ready", "--timeout=10s")


def test_scale(cluster: LocalControlPlane, models: client.CustomObjectsApi) -> None:
    models.create_namespaced_custom_object(**PLACE, body=_placed(smallest("scaled")))
    models.patch_namespaced_custom_object_status(**PLACE, name="scaled", body={"status": STATUS})
    cluster.kubectl("-n", NAMESPACE, "scale", "imodel/scaled", "--replicas=3")
    scale = models.get_namespaced_custom_object_scale(**PLACE, name="scaled")
    assert scale["spec"] == {"replicas": 3}
    assert scale["status"] == {"replicas": 2, "selector": STATUS["selector"]}


def _objects(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    if "properties" in schema:
        yield path, schema
        for name, field in schema["properties"].items():
            yield from _objects(field.get("items", field), f"{path}.{name}")


def _explained() -> list[tuple[str, Schema]]:
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    return [entry for part in ("spec", "status") for entry in _objects(schema[part], f"imodel.{part}")]


@pytest.mark.parametrize("path", ["imodel.spec", "imodel.status", "imodel.spec.rollout"])
def test_kubectl_explain_describes_every_field(cluster: LocalControlPlane, path: str) -> None:
    printed = " ".join(cluster.kubectl("explain", path).stdout.split())
    assert "<no description>" not in printed
    for name, field in dict(_explained())[path]["properties"].items():
        assert f"{name} <" in printed
        assert " ".join(field["description"].split()) in printed


def test_the_api_server_publishes_every_description(cluster: LocalControlPlane) -> None:
    """`kubectl explain` prints what is published."""
    document = json.loads(cluster.kubectl("get", "--raw", f"/openapi/v3/apis/{GROUP}/{VERSION}").stdout)
    [published] = [each for name, each in document["components"]["schemas"].items() if name.endswith(".InferenceModel")]
    found = {
        path: schema
        for part in ("spec", "status")
        for path, schema in _objects(published["properties"][part], f"imodel.{part}")
    }
    assert found.keys() == dict(_explained()).keys()
    for path, schema in _explained():
        descriptions = {name: field["description"] for name, field in schema["properties"].items()}
        assert {name: field.get("description") for name, field in found[path]["properties"].items()} == descriptions
