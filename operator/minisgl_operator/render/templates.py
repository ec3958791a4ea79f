"""Pod templates: what the operator sets, merged by key with the additions of models and of the operator's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from minisgl.wire.status import CONTROL_PORT, SCHEDULER_PORT
from minisgl_operator.api.pod_template import PodMetadata, PodResourceClaim, PodTemplate, Volume
from minisgl_operator.render.quantity import canonical

_NO_SIDECARS: Final = {"linkerd.io/inject": "disabled", "sidecar.istio.io/inject": "false"}
_OUTSIDE_MESH: Final = {"istio.io/dataplane-mode": "none"}
"""Labels of pods that Istio leaves alone in its ambient mode, as their annotations say for sidecars."""
_SAFE_TO_EVICT: Final = "cluster-autoscaler.kubernetes.io/safe-to-evict"

ENGINE_ANNOTATIONS: Final = {
    # A proxy slows down the traffic between ranks, which is not HTTP, and a node that is nearly empty may still run the
    # only replica: node autoscalers would move it, which takes minutes. Drains by kubectl are limited by the budget.
    **_NO_SIDECARS,
    _SAFE_TO_EVICT: "false",
    "karpenter.sh/do-not-disrupt": "true",
}
# A Job does not end while a sidecar runs.
FETCH_ANNOTATIONS: Final = _NO_SIDECARS
# Without it, cluster-autoscaler keeps the node of a pod with an emptyDir.
_FRONTEND_ANNOTATIONS: Final = {_SAFE_TO_EVICT: "true"}
# Neither engines nor the operator are in the mesh: what frontends exchange with them must not meet a proxy.
_MESH_ANNOTATIONS: Final = {
    "config.linkerd.io/skip-inbound-ports": f"{CONTROL_PORT}",
    "config.linkerd.io/skip-outbound-ports": f"{SCHEDULER_PORT},{CONTROL_PORT}",
    "traffic.sidecar.istio.io/excludeInboundPorts": f"{CONTROL_PORT}",
    "traffic.sidecar.istio.io/excludeOutboundPorts": f"{SCHEDULER_PORT},{CONTROL_PORT}",
}


def frontend_annotations(*, mesh: bool) -> Mapping[str, str]:
    """`mesh`: the pods may join a service mesh."""
    return {**_FRONTEND_ANNOTATIONS, **(_MESH_ANNOTATIONS if mesh else _NO_SIDECARS)}


def template(
    spec: dict[str, Any],
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    default: PodMetadata,
    added: PodTemplate,
    *,
    mesh: bool = False,
) -> dict[str, Any]:
    """The template of a pod with one container. `labels` cannot be overridden; `annotations` and the label of a pod
    outside of the mesh can, by `default` and then by `added`."""
    metadata = {
        "labels": {**({} if mesh else _OUTSIDE_MESH), **default.labels, **added.labels, **labels},
        "annotations": dict(sorted({**annotations, **default.annotations, **added.annotations}.items())),
    }
    return {"metadata": metadata, "spec": _with_additions(spec, added)}


def _with_additions(spec: dict[str, Any], added: PodTemplate) -> dict[str, Any]:
    [container] = spec["containers"]
    container = {
        **container,
        "volumeMounts": [*container["volumeMounts"], *(mount.manifest() for mount in added.volume_mounts)],
    }
    result = {**spec, "volumes": [*spec["volumes"], *map(_volume, added.volumes)]}
    if added.resource_claims:
        result["resourceClaims"] = [_claim(claim) for claim in added.resource_claims]
        names = [{"name": claim.name} for claim in added.resource_claims]
        container["resources"] = {**container.get("resources", {}), "claims": names}
    if added.scheduler_name is not None:
        result["schedulerName"] = added.scheduler_name
    return {**result, "containers": [container]}


def _claim(claim: PodResourceClaim) -> dict[str, Any]:
    return {name: value for name, value in claim.manifest().items() if name != "gpus"}


def _volume(volume: Volume) -> dict[str, Any]:
    body = volume.manifest()
    if volume.empty_dir is not None and volume.empty_dir.size_limit is not None:
        body["emptyDir"]["sizeLimit"] = canonical(volume.empty_dir.size_limit)
    return body
