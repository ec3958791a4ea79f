"""Placement of pods that share a ReadWriteOnce claim, which one node at a time can mount."""

from __future__ import annotations

from typing import Any, Final

from minisgl_operator.api.objects import copy_of
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.render import model_files, names

_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_NODE_NAME_LABEL: Final = "kubernetes.io/hostname"


def claim(model: InferenceModel) -> str | None:
    """Name of the claim that holds the fetch pod and the engines on one node; None if they may be on several."""
    source = model.spec.model.source
    if source.is_remote:
        return model_files.cache_claim(model) if model.spec.model.fetch_cache.access_mode == "ReadWriteOnce" else None
    if source.pvc is not None and source.pvc.access_mode == "ReadWriteOnce":
        return source.pvc.claim_name
    return None


def with_pods_of_claim(model: InferenceModel, affinity: dict[str, Any]) -> dict[str, Any]:
    """`affinity` of an engine pod or of the fetch pod, with a term that holds it on the node of the others.

    The scheduler places the first pod freely: a pod that matches its own terms needs no other one. It counts only pods
    that match all terms, so a second term would keep the first pod from being placed: a required podAffinity of the
    user's takes the place of ours.
    """
    pod_affinity = affinity.get("podAffinity") or {}
    if claim(model) is None or pod_affinity.get(_REQUIRED):
        return affinity
    # Labels that pods of all versions have, so that engines that run at an upgrade are found too.
    selector = {
        "matchLabels": {names.NAME_LABEL: names.APPLICATION, names.INSTANCE_LABEL: model.name},
        "matchExpressions": [
            {"key": names.COMPONENT_LABEL, "operator": "In", "values": [names.ENGINE, names.FETCH]},
        ],
    }
    term = {"labelSelector": selector, "topologyKey": _NODE_NAME_LABEL}
    return copy_of(affinity) | {"podAffinity": pod_affinity | {_REQUIRED: [term]}}
