"""Rendered manifests on a real API server, which accepts every field and pod, and rewrites nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from minisgl_operator.api.defaults import ModelDefaults
from minisgl_operator.render import render
from support.cluster.control_plane import LocalControlPlane
from support.cluster.example_models import EXAMPLES, children_of
from support.cluster.inference_models import DEFAULTS

APPLY = ("apply", "--server-side", "--force-conflicts", "--field-manager=minisgl-operator", "--validate=strict")


NAMESPACE_IDENTITY = replace(DEFAULTS, models=ModelDefaults(pod_identity="Namespace"))


def test_pods_whose_user_the_namespace_chooses_pass_the_restricted_profile(control_plane: LocalControlPlane) -> None:
    """Without user and groups, and with those that OpenShift's restricted-v2 sets."""
    namespace = "rendered-without-users"
    control_plane.kubectl("create", "namespace", namespace)
    control_plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    tried = []
    for chosen in ({}, {"runAsUser": 1000650000, "fsGroup": 1000650000}):
        for manifest in render(EXAMPLES["pod-templates"], NAMESPACE_IDENTITY):
            if template := manifest.get("spec", {}).get("template"):
                spec = {key: value for key, value in template["spec"].items() if key != "serviceAccountName"}
                spec["securityContext"] = spec["securityContext"] | chosen
                metadata = template["metadata"] | {"name": f"tried-{len(tried)}", "namespace": namespace}
                tried.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    control_plane.try_out(tried)


@pytest.mark.parametrize("name", EXAMPLES)
def test_manifests_are_stored_as_they_are_sent(control_plane: LocalControlPlane, name: str) -> None:
    namespace = f"rendered-{name}"
    labels = {"pod-security.kubernetes.io/warn": "restricted", "pod-security.kubernetes.io/enforce": "restricted"}
    metadata = {"name": namespace, "labels": labels}
    control_plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    # Without the owner, which does not exist: they would be garbage-collected.
    sent = [
        manifest | {"metadata": {key: value for key, value in manifest["metadata"].items() if key != "ownerReferences"}}
        for manifest in children_of(name)
        # Another test has a cluster with this kind.
        if manifest["kind"] != "HTTPRoute"
    ]
    for manifest in sent:
        manifest["metadata"]["namespace"] = namespace
    wanted = json.dumps({"apiVersion": "v1", "kind": "List", "items": sent})
    first = control_plane.kubectl(*APPLY, "-o", "json", "-f", "-", stdin=wanted)
    assert "would violate" not in first.stderr
    stored = json.loads(first.stdout)["items"]
    assert len(stored) == len(sent)
    for manifest, live in zip(sent, stored, strict=True):
        assert missing(manifest, live) is None


def missing(wanted: Any, live: Any, path: str = "") -> str | None:
    """The first path where the stored object differs from the sent one. Fields that the server adds are ignored."""
    if isinstance(wanted, Mapping):
        for key, value in wanted.items():
            if not isinstance(live, Mapping) or key not in live:
                return f"{path}.{key} is gone"
            if found := missing(value, live[key], f"{path}.{key}"):
                return found
        return None
    if isinstance(wanted, list):
        if not isinstance(live, list) or len(live) != len(wanted):
            return f"{path} is {live}"
        places = enumerate(zip(wanted, live, strict=True))
        return next((found for i, (a, b) in places if (found := missing(a, b, f"{path}[{i}]"))), None)
    return None if wanted == live else f"{path} is {live!r} and not {wanted!r}"
