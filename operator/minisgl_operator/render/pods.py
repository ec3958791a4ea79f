"""Parts that all pods of a model share, which comply with the `restricted` profile of Pod Security, and their ports as
containers, Services and NetworkPolicies declare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from minisgl.wire.status import CONTROL_PORT, HTTP_PORT, LINK_PORT, SCHEDULER_PORT
from minisgl_operator.api.defaults import Defaults, PlacementDefaults
from minisgl_operator.api.scheduling import PodSettings, Resources
from minisgl_operator.api.types import EnvironmentVariable
from minisgl_operator.render.quantity import canonical_all

# The user of the images.
_USER: Final = 65532

_PORTS: Final[Mapping[str, int]] = {
    "http": HTTP_PORT,
    "control": CONTROL_PORT,
    "scheduler": SCHEDULER_PORT,
    "link": LINK_PORT,
}
_ARCHITECTURE: Final = "kubernetes.io/arch"
RUN_DIRECTORY: Final = "/run/minisgl"
GRACE_BEYOND_DRAIN: Final = 30
"""Seconds after the drain time in which a pod ends the remaining requests with an error and stops."""


def pod_spec(
    service_account: str, container: dict[str, Any], volumes: list[dict[str, Any]], defaults: Defaults
) -> dict[str, Any]:
    """A pod without a token for the API server and without variables for the Services of its namespace."""
    # OpenShift's restricted-v2 rejects users and groups outside of the namespace's range, and fills in those within.
    fixed = defaults.models.pod_identity == "Fixed"
    identity = {"runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER} if fixed else {}
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "serviceAccountName": service_account,
        "securityContext": {
            "runAsNonRoot": True,
            **identity,
            # Without this, every start would walk the files of a large cache.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }


def container_security(*, read_only_root: bool) -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": read_only_root,
    }


def scheduling(
    settings: PodSettings, component: PlacementDefaults, architecture: str | None, defaults: Defaults
) -> dict[str, Any]:
    """Scheduling fields of the spec, which are those of a pod; unset ones are left out. `component` has the defaults of
    the pod's component. `architecture` is that of its default image; nothing is known about another image."""
    secrets = {"imagePullSecrets": [{"name": name} for name in defaults.image_pull_secrets]}
    body = secrets | component.manifest() | settings.manifest()
    if architecture is not None and settings.image is None:
        body["nodeSelector"] = {_ARCHITECTURE: architecture} | body.get("nodeSelector", {})
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


def resources(
    own: Resources, component: Resources, least: Mapping[str, str], extended: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Resources of a model, then those of its component's defaults, then the requests `least`.

    A resource with a request or a limit of its own takes neither from the defaults: a default request above a limit
    would be rejected, and Kubernetes requests as much as the limit where there is no request. `extended` resources such
    as GPUs need equal requests and limits.
    """
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    for layer in (own, component, Resources(requests=dict(least))):
        taken = requests.keys() | limits.keys()
        requests |= {name: value for name, value in layer.requests.items() if name not in taken}
        limits |= {name: value for name, value in layer.limits.items() if name not in taken}
    extended = extended or {}
    bodies = {"requests": canonical_all({**requests, **extended}), "limits": canonical_all({**limits, **extended})}
    return {"resources": {key: value for key, value in bodies.items() if value}}


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


def variable(variable: EnvironmentVariable) -> dict[str, Any]:
    """A variable of the user's."""
    # The API server drops an empty value.
    return {key: value for key, value in variable.manifest().items() if value != ""}


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


def container_ports(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "containerPort": _PORTS[name], "protocol": "TCP"} for name in names]


def service_ports(*names: str) -> list[dict[str, Any]]:
    """Ports of a headless Service, which are those of the pods."""
    return [{"name": name, "port": _PORTS[name], "targetPort": name, "protocol": "TCP"} for name in names]


def policy_ports(*names: str) -> list[dict[str, Any]]:
    return [{"port": _PORTS[name], "protocol": "TCP"} for name in names]
