"""A service account with the permissions of a gateway, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from minisgl.gateway.cluster_access import ClusterAccess
from minisgl.gateway.models import Address
from minisgl_operator.api.types import GROUP, PLURAL
from support.cluster.control_plane import LocalControlPlane

_RBAC: Final = "rbac.authorization.k8s.io"
_NAME: Final = "test-gateway"
_READ: Final = {"verbs": ["list", "watch"]}
_RULES: Final[dict[str, list[dict[str, Any]]]] = {
    "ClusterRole": [{"apiGroups": [GROUP], "resources": [PLURAL]} | _READ],
    "Role": [
        {"apiGroups": [""], "resources": ["secrets"]} | _READ,
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"]} | _READ,
    ],
}


@contextlib.contextmanager
def service_account(plane: LocalControlPlane, namespace: str, directory: Path) -> Iterator[ClusterAccess]:
    """Create a namespace with the account: it may list and watch InferenceModels of the cluster, and Secrets and
    EndpointSlices here. The files of its credentials are in `directory`."""
    plane.kubectl("create", "namespace", namespace)
    plane.kubectl("create", "serviceaccount", _NAME, "-n", namespace)
    for kind, rules in _RULES.items():
        metadata = {"name": _NAME} | ({"namespace": namespace} if kind == "Role" else {})
        role = {"apiVersion": f"{_RBAC}/v1", "kind": kind, "metadata": metadata, "rules": rules}
        binding = {
            "apiVersion": f"{_RBAC}/v1",
            "kind": f"{kind}Binding",
            "metadata": metadata,
            "roleRef": {"apiGroup": _RBAC, "kind": kind, "name": _NAME},
            "subjects": [{"kind": "ServiceAccount", "name": _NAME, "namespace": namespace}],
        }
        plane.apply(role, binding)
    token = directory / "token"
    token.write_text(plane.kubectl("create", "token", _NAME, "-n", namespace).stdout)
    host, port = plane.url.removeprefix("https://").split(":")
    yield ClusterAccess(Address(host, int(port)), plane.plane.pki / "ca.crt", token, namespace)
    plane.kubectl("delete", "clusterrole,clusterrolebinding", _NAME)
    plane.kubectl("delete", "namespace", namespace, "--wait=false")
