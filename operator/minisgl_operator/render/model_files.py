"""Location of the model's files, for all kinds of source."""

from __future__ import annotations

from typing import Any, Final

from minisgl_operator.api.types import InferenceModel
from minisgl_operator.render import names

MODELS_DIRECTORY: Final = "/models"
VOLUME: Final = "models"
_HUB: Final = "https://huggingface.co"


def cache_key(model: InferenceModel) -> str | None:
    """Name of the model's directory on its cache; None for a source that is mounted itself."""
    hub, s3 = model.spec.model.source.hugging_face, model.spec.model.source.s3
    if hub is not None:
        return names.cache_key(hub.repo, hub.revision, hub.endpoint or _HUB)
    return None if s3 is None else names.cache_key(s3.uri.rstrip("/"), "", s3.endpoint or "")


def is_fetched(model: InferenceModel) -> bool:
    """True if a Job of ours fetches the model. A ReadOnlyMany claim was filled beforehand."""
    return cache_key(model) is not None and not _filled_beforehand(model)


def _filled_beforehand(model: InferenceModel) -> bool:
    return model.spec.model.fetch_cache.access_mode == "ReadOnlyMany"


def cache_claim(model: InferenceModel) -> str:
    return model.spec.model.fetch_cache.claim_name or names.cache(model.name)


def directory(model: InferenceModel) -> str:
    """Path of the model's directory in engine pods."""
    source = model.spec.model.source
    if source.is_remote:
        return f"{MODELS_DIRECTORY}/{cache_key(model)}"
    below = source.pvc or source.image
    assert below is not None
    return f"{MODELS_DIRECTORY}/{below.path}".rstrip("/")


def volume(model: InferenceModel) -> dict[str, Any]:
    """Volume with the model; engine pods mount it read-only."""
    source = model.spec.model.source
    if source.is_remote:
        # Read-only in the mount and not in the volume: several storage drivers refuse a volume that is attached
        # read-write for the fetch and read-only for an engine on the same node.
        read_only = {"readOnly": True} if _filled_beforehand(model) else {}
        return {"name": VOLUME, "persistentVolumeClaim": {"claimName": cache_claim(model), **read_only}}
    if source.pvc is not None:
        # Read-only in the volume too, so that the kubelet does not change the owner of the user's files.
        return {"name": VOLUME, "persistentVolumeClaim": {"claimName": source.pvc.claim_name, "readOnly": True}}
    assert source.image is not None
    policy = source.image.pull_policy
    return {
        "name": VOLUME,
        "image": {"reference": source.image.reference, **({"pullPolicy": policy} if policy else {})},
    }
