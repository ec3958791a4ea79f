"""Objects that the types accept and reject. tests/operator/cluster runs the same table against the API server."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from minisgl_operator.api.types import InferenceModel, InvalidSpec
from support.cluster.validation_cases import CASES, Case, hub, smallest


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_table(case: Case) -> None:
    if not case.field:
        InferenceModel.parse(case.model)
        return
    with pytest.raises(InvalidSpec) as raised:
        InferenceModel.parse(case.model)
    field, message = raised.value.problems[0]
    assert case.field in field
    assert case.message in message


def test_every_problem_is_named_and_a_long_list_is_cut() -> None:
    wrong = smallest(replicas=-1, engine={"args": ["--tp=2"]}, **{f"unknown{i}": i for i in range(9)})
    with pytest.raises(InvalidSpec) as raised:
        InferenceModel.parse(wrong)
    assert len(raised.value.problems) == 11
    assert raised.value.code == "InvalidSpec"
    assert str(raised.value).endswith("; and 6 more")
    assert "spec.replicas: " in str(raised.value)


@pytest.mark.parametrize("raw", [{}, {"apiVersion": "v1", "kind": "Pod"}, smallest() | {"kind": "Model"}])
def test_another_kind_is_rejected(raw: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match=r"expected serving\.minisgl\.io/v1alpha1 InferenceModel, found ") as raised:
        InferenceModel.parse(raw)
    assert raised.value.problems[0][0] == "kind"


def test_metadata_as_the_api_server_writes_it() -> None:
    raw = smallest()
    raw["metadata"] |= {
        "uid": "1-2",
        "generation": 7,
        "deletionTimestamp": "2026-01-02T03:04:05Z",
        "labels": {"a": "b"},
        "managedFields": [],
    }
    metadata = InferenceModel.parse(raw | {"status": {"phase": "Ready"}}).metadata
    assert (metadata.uid, metadata.generation) == ("1-2", 7)
    assert metadata.deletion_timestamp == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_the_served_name_defaults_to_the_name_of_the_model() -> None:
    assert InferenceModel.parse(smallest("demo")).served_names == ("demo",)
    assert InferenceModel.parse(smallest(model=hub(servedNames=["a", "b"]))).served_names == ("a", "b")


@pytest.mark.parametrize(
    ("parallelism", "pods", "ranks_per_pod"),
    [
        ({}, 1, 1),
        ({"tensor": 4}, 1, 4),
        ({"tensor": 4, "gpusPerPod": 2}, 2, 2),
        ({"tensor": 4, "interconnect": "Network"}, 4, 1),
        ({"tensor": 4, "gpusPerPod": 2, "interconnect": "Network"}, 2, 2),
        ({"tensor": 4, "interconnect": "SharedPod"}, 1, 4),
    ],
)
def test_number_of_pods_of_a_replica(parallelism: dict[str, Any], pods: int, ranks_per_pod: int) -> None:
    parsed = InferenceModel.parse(smallest(parallelism=parallelism)).spec.parallelism
    assert (parsed.pods, parsed.ranks_per_pod) == (pods, ranks_per_pod)


def test_a_hub_model_without_cache_has_the_default_cache() -> None:
    model = InferenceModel.parse(smallest(model=hub())).spec.model
    assert model.cache is None
    assert (model.fetch_cache.size, model.fetch_cache.access_mode) == ("100Gi", "ReadWriteMany")


def test_a_manifest_contains_exactly_the_set_fields() -> None:
    engine = {
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
    }
    peers = [{"podSelector": {}}, {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}]
    spec = InferenceModel.parse(smallest(engine=engine, networkPolicy={"ingressFrom": peers})).spec
    assert spec.engine.manifest() == engine
    assert [peer.manifest() for peer in spec.network_policy.ingress_from] == peers
