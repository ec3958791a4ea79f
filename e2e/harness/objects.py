"""Read and delete objects of the API server through one connection: scenarios ask several times a second, and each
start of kubectl takes a quarter of a second of CPU time."""

from __future__ import annotations

import functools
import ssl
from typing import Any, Final

import httpx

from cluster.control_plane import PLANE
from cluster.layout import API
from cluster.places import CONTROL, CommandFailed
from cluster.relay import expose

_GROUPS: Final = {
    "api/v1": ("persistentvolumeclaims", "pods", "serviceaccounts", "services"),
    "apis/apps/v1": ("deployments", "statefulsets"),
    "apis/batch/v1": ("jobs",),
    "apis/discovery.k8s.io/v1": ("endpointslices",),
    "apis/events.k8s.io/v1": ("events",),
    "apis/networking.k8s.io/v1": ("networkpolicies",),
    "apis/policy/v1": ("poddisruptionbudgets",),
    "apis/serving.minisgl.io/v1alpha1": ("inferencemodels",),
}
_GROUP_OF: Final = {resource: group for group, resources in _GROUPS.items() for resource in resources}


def read(namespace: str, resource: str, name: str) -> dict[str, Any] | None:
    """One object; None if it does not exist. `resource` is a plural, such as pods."""
    return _get(namespace, f"{resource}/{name}", _GROUP_OF[resource])


def read_all(namespace: str, resource: str, selector: str = "") -> list[dict[str, Any]]:
    """All objects that a label selector matches."""
    found = _get(namespace, resource, _GROUP_OF[resource], labelSelector=selector)
    return [] if found is None else [*found["items"]]


def forget(namespace: str, resource: str, name: str) -> None:
    """Delete an object without a grace period, like `kubectl delete --force`, unless it does not exist."""
    path = f"/{_GROUP_OF[resource]}/namespaces/{namespace}/{resource}/{name}"
    response = _client().delete(path, params={"gracePeriodSeconds": 0})
    if response.is_error and response.status_code != httpx.codes.NOT_FOUND:
        raise CommandFailed(f"DELETE {response.url}: status {response.status_code}: {response.text[:500]}")


def _get(namespace: str, path: str, group: str, **query: str) -> dict[str, Any] | None:
    response = _client().get(f"/{group}/namespaces/{namespace}/{path}", params=query)
    if response.status_code == httpx.codes.NOT_FOUND:
        return None
    if response.is_error:
        raise CommandFailed(f"GET {response.url}: status {response.status_code}: {response.text[:500]}")
    found: dict[str, Any] = response.json()
    return found


@functools.cache
def _client() -> httpx.Client:
    """Client as the administrator, through a port of the host."""
    tls = ssl.create_default_context(cafile=PLANE.pki / "ca.crt")
    tls.load_cert_chain(PLANE.pki / "admin.crt", PLANE.pki / "admin.key")
    port = expose(CONTROL, API.removeprefix("https://"))
    transport = httpx.HTTPTransport(verify=tls, retries=3)
    return httpx.Client(base_url=f"https://127.0.0.1:{port}", transport=transport, timeout=60, trust_env=False)
