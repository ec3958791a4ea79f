"""The kinds that the operator reads and writes, and where the API server keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Resource:
    """One kind of a namespaced object."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def title(self) -> str:
        """As RBAC and `kubectl` write it: `statefulsets.apps`, `pods`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """The URL's path; without a namespace that of the whole cluster's list."""
        parts = ["/apis", self.group, self.version] if self.group else ["/api", self.version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part is not None]
        return "/".join(parts)


MODEL: Final = Resource("serving.minisgl.io", "v1alpha1", "inferencemodels", "InferenceModel")
POD: Final = Resource("", "v1", "pods", "Pod")
CORE_EVENT: Final = Resource("", "v1", "events", "Event")
EVENT: Final = Resource("events.k8s.io", "v1", "events", "Event")
LEASE: Final = Resource("coordination.k8s.io", "v1", "leases", "Lease")

# What a model's children are. Pods are children of these.
CHILDREN: Final = (
    Resource("apps", "v1", "statefulsets", "StatefulSet"),
    Resource("apps", "v1", "deployments", "Deployment"),
    Resource("", "v1", "services", "Service"),
    Resource("", "v1", "serviceaccounts", "ServiceAccount"),
    Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim"),
    Resource("batch", "v1", "jobs", "Job"),
    Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
)
WATCHED: Final = (MODEL, *CHILDREN, POD)

_BY_KIND: Final = {resource.kind: resource for resource in WATCHED}


def of_kind(kind: str) -> Resource:
    """Raises KeyError for a kind that the operator has nothing to do with."""
    return _BY_KIND[kind]


def of_object(body: dict[str, Any]) -> Resource:
    return of_kind(body["kind"])
