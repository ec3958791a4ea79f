"""Kinds of other projects, for an API server that has none of them: definitions that accept every field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from support.cluster.chart import Object
from support.cluster.control_plane import LocalControlPlane


def define(plane: LocalControlPlane, kinds: Mapping[str, Sequence[str]]) -> None:
    """Define the kinds of each apiVersion, and wait until they can be used."""
    found = [(version, kind) for version, names in kinds.items() for kind in names]
    plane.apply(*(_definition(version, kind) for version, kind in found))
    for version, kind in found:
        plane.wait_for_definition(f"{_plural(kind)}.{version.split('/')[0]}")


def _plural(kind: str) -> str:
    return f"{kind.lower()}s"


def _definition(api_version: str, kind: str) -> Object:
    group, version = api_version.split("/")
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    versions = [{"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}]
    names = {"kind": kind, "plural": _plural(kind), "singular": kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        # The API server protects groups of Kubernetes itself; the value names a review.
        "metadata": {
            "name": f"{_plural(kind)}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": versions},
    }
