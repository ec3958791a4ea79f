"""Parts that all pods of a model share. They comply with the `restricted` profile of Pod Security."""

from __future__ import annotations

from typing import Any, Final

from minisgl_operator.api.scheduling import PodSettings, Resources
from minisgl_operator.render.defaults import Defaults
from minisgl_operator.render.quantity import canonical_all

# The user of the images.
_USER: Final = 65532

RUN_DIRECTORY: Final = "/run/minisgl"
GRACE_BEYOND_DRAIN: Final = 30
"""Seconds after the drain time in which a pod ends the remaining requests with an error and stops."""


def pod_spec(service_account: str, containers: list[dict[str, Any]], volumes: list[dict[str, Any]]) -> dict[str, Any]:
    """A pod without a token for the API server and without variables for the Services of its namespace."""
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "serviceAccountName": service_account,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            # Without this, every start would walk the files of a large cache.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": containers,
        "volumes": volumes,
    }


def container_security(*, read_only_root: bool) -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": read_only_root,
    }


def scheduling(settings: PodSettings, defaults: Defaults) -> dict[str, Any]:
    """Scheduling fields of the spec, which are those of a pod; unset ones are left out."""
    body = {"imagePullSecrets": [{"name": name} for name in defaults.image_pull_secrets]} | settings.manifest()
    fields = (
        "affinity",
        "imagePullSecrets",
        "nodeSelector",
        "priorityClassName",
        "tolerations",
        "topologySpreadConstraints",
    )
    return {field: body[field] for field in fields if body.get(field)}


def image(settings: PodSettings, default: str, defaults: Defaults) -> dict[str, str]:
    policy = settings.image_pull_policy or defaults.image_pull_policy
    return {"image": settings.image or default, **({"imagePullPolicy": policy} if policy else {})}


def resources(requested: Resources, extended: dict[str, str] | None = None) -> dict[str, Any]:
    """`extended` resources such as GPUs need equal requests and limits."""
    requests = canonical_all({**requested.requests, **(extended or {})})
    limits = canonical_all({**requested.limits, **(extended or {})})
    body = {key: value for key, value in (("requests", requests), ("limits", limits)) if value}
    return {"resources": body} if body else {}


def probes(startup_path: str, startup_failures: int) -> dict[str, Any]:
    """Kubelet probes of a launcher, which answers them even while an engine is busy."""
    return {
        "startupProbe": _probe(startup_path, 2, startup_failures),
        "livenessProbe": _probe("/live", 10, 6),
        "readinessProbe": _probe("/ready", 2, 2),
    }


def _probe(path: str, period: int, failures: int) -> dict[str, Any]:
    """The timeout is long, for machines with more pods than cores."""
    return {
        "httpGet": {"path": path, "port": "control"},
        "periodSeconds": period,
        "failureThreshold": failures,
        "timeoutSeconds": 5,
    }


def field(name: str, path: str) -> dict[str, Any]:
    """A variable with the value of a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


IDENTITY: Final = (
    field("MINISGL_POD_NAME", "metadata.name"),
    field("MINISGL_NODE_NAME", "spec.nodeName"),
    {"name": "HOME", "value": RUN_DIRECTORY},
)
"""Variables of every container."""

RUN: Final[dict[str, Any]] = {"name": "run", "emptyDir": {}}
TMP: Final[dict[str, Any]] = {"name": "tmp", "emptyDir": {}}


def mount(volume: dict[str, Any], path: str, *, read_only: bool = False) -> dict[str, Any]:
    return {"name": volume["name"], "mountPath": path, **({"readOnly": True} if read_only else {})}


RUN_MOUNT: Final = mount(RUN, RUN_DIRECTORY)
TMP_MOUNT: Final = mount(TMP, "/tmp")
