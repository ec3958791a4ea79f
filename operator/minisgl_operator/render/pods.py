"""What the pods of a model have in common. All of them pass Pod Security's `restricted` profile."""

from __future__ import annotations

from typing import Any, Final

from minisgl_operator.api.scheduling import PodSettings, Resources
from minisgl_operator.render import names
from minisgl_operator.render.defaults import Defaults
from minisgl_operator.render.quantity import canonical_all

# The user that the images name too.
_USER: Final = 65532

RUN_DIRECTORY: Final = "/run/minisgl"
GRACE_BEYOND_DRAIN: Final = 30
"""Seconds that a pod has, after its requests had their time, to end them with an error and to stop."""


def pod_spec(service_account: str, containers: list[dict[str, Any]], volumes: list[dict[str, Any]]) -> dict[str, Any]:
    """A pod without a token for the API server and without the variables that describe its neighbours' Services."""
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "serviceAccountName": service_account,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            # A cache of a hundred gigabytes is not walked at every start.
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


def scheduling(settings: PodSettings, env: Defaults) -> dict[str, Any]:
    """The fields that the user sets as they are in a pod; those left out are left out."""
    body = {"imagePullSecrets": [{"name": name} for name in env.image_pull_secrets]} | settings.manifest()
    fields = (
        "affinity",
        "imagePullSecrets",
        "nodeSelector",
        "priorityClassName",
        "tolerations",
        "topologySpreadConstraints",
    )
    return {field: body[field] for field in fields if body.get(field)}


def image(settings: PodSettings, default: str, env: Defaults) -> dict[str, str]:
    policy = settings.image_pull_policy or env.image_pull_policy
    return {"image": settings.image or default, **({"imagePullPolicy": policy} if policy else {})}


def resources(asked: Resources, also: dict[str, str] | None = None) -> dict[str, Any]:
    """`also` goes into requests and limits alike: the rule for extended resources such as GPUs."""
    requests = canonical_all({**asked.requests, **(also or {})})
    limits = canonical_all({**asked.limits, **(also or {})})
    body = {key: value for key, value in (("requests", requests), ("limits", limits)) if value}
    return {"resources": body} if body else {}


def probe(path: str, period: int, failures: int) -> dict[str, Any]:
    """The launcher answers, never a busy engine. The time limit is long for machines with more pods than cores."""
    return {
        "httpGet": {"path": path, "port": "control"},
        "periodSeconds": period,
        "failureThreshold": failures,
        "timeoutSeconds": 5,
    }


def field(name: str, path: str) -> dict[str, Any]:
    """A variable with a field of the pod itself."""
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


IDENTITY: Final = (
    field("MINISGL_POD_NAME", "metadata.name"),
    field("MINISGL_NODE_NAME", "spec.nodeName"),
)
CONTROL_CONTAINER_PORT: Final = {"name": "control", "containerPort": names.CONTROL_PORT, "protocol": "TCP"}
