"""The kinds that the operator reads and writes, and their paths at the API server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from minisgl_operator.api.types import GROUP, KIND, PLURAL, VERSION
from minisgl_operator.render.names import (
    COMPONENT_LABEL,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    REVISION,
    SLICE_MANAGER_LABEL,
)


@dataclass(frozen=True)
class Resource:
    """One kind of objects. Objects of nodes have no namespace."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def title(self) -> str:
        """The form of RBAC and `kubectl`: `statefulsets.apps`, `pods`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Path of the URL; without a namespace, of the list of the whole cluster."""
        parts = ["/apis", self.group, self.version] if self.group else ["/api", self.version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part is not None]
        return "/".join(parts)


MODEL: Final = Resource(GROUP, VERSION, PLURAL, KIND)
POD: Final = Resource("", "v1", "pods", "Pod")
CORE_EVENT: Final = Resource("", "v1", "events", "Event")
EVENT: Final = Resource("events.k8s.io", "v1", "events", "Event")
NODE: Final = Resource("", "v1", "nodes", "Node")
LEASE: Final = Resource("coordination.k8s.io", "v1", "leases", "Lease")

SECRET: Final = Resource("", "v1", "secrets", "Secret")

CONTROLLER_REVISION: Final = Resource("apps", "v1", "controllerrevisions", "ControllerRevision")

ENDPOINT_SLICE: Final = Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")

# Kinds of a model's children. Pods are children of these.
CHILDREN: Final = (
    CONTROLLER_REVISION,
    Resource("apps", "v1", "statefulsets", "StatefulSet"),
    Resource("apps", "v1", "deployments", "Deployment"),
    Resource("", "v1", "services", "Service"),
    ENDPOINT_SLICE,
    Resource("", "v1", "serviceaccounts", "ServiceAccount"),
    Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim"),
    Resource("batch", "v1", "jobs", "Job"),
    Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
)
WATCHED: Final = (MODEL, *CHILDREN, POD)

CHILD_SELECTOR: Final = f"{MANAGED_BY_LABEL}={MANAGED_BY}"

HTTP_ROUTE: Final = Resource("gateway.networking.k8s.io", "v1", "httproutes", "HTTPRoute")
"""Children that are listed instead, as not every cluster has the kind."""

_BY_KIND: Final = {resource.kind: resource for resource in (*WATCHED, HTTP_ROUTE)}


def selector(resource: Resource) -> str:
    """Label selector of the watched objects of a kind; empty: all."""
    if resource == MODEL:
        return ""
    # Controllers of Kubernetes keep objects of these kinds, with the labels of our pods and Services.
    if resource == CONTROLLER_REVISION:
        return f"{CHILD_SELECTOR},{COMPONENT_LABEL}={REVISION}"
    return f"{CHILD_SELECTOR},{SLICE_MANAGER_LABEL}={MANAGED_BY}" if resource == ENDPOINT_SLICE else CHILD_SELECTOR


def of_kind(kind: str) -> Resource:
    """Raises KeyError for a kind that the operator does not use."""
    return _BY_KIND[kind]
