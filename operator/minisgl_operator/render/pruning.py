"""Directories that a fetch pod may remove from the claim if it is too small: arguments and annotation of its Job."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

from minisgl_operator.api.objects import Manifest, copy_of
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.render import names


class Pruning(msgspec.Struct, frozen=True):
    """Directories that may be removed: partial downloads, or also fetched checkpoints that `keep` does not name."""

    prune: Literal["partial", "unused"]
    keep: tuple[str, ...]

    def allows_more_than(self, other: Pruning) -> bool:
        """True if this one allows the removal of a checkpoint that the other one does not."""
        return self.prune == "unused" and (other.prune == "partial" or not set(other.keep) <= set(self.keep))


def pruning(model: InferenceModel, in_use: Collection[str], *, others_obsolete: bool) -> Pruning | None:
    """None for a claim that the user named or retains: nothing is removed from it. `others_obsolete`: fetched
    directories that are not in use may be removed, not only partial downloads."""
    cache = model.spec.model.fetch_cache
    if cache.claim_name is not None or cache.retain:
        return None
    return Pruning("unused" if others_obsolete else "partial", tuple(sorted(in_use)))


def with_pruning(job: Manifest, pruning: Pruning | None) -> Manifest:
    """The Job to create. Its revision does not depend on this, as the directories in use change while it runs: their
    set at its creation is safe until it ends, because engines get another directory only by another Job.

    The annotation repeats the immutable arguments, which the store does not keep.
    """
    if pruning is None:
        return job
    result = copy_of(job)
    kept = ("--keep", *pruning.keep) if pruning.keep else ()
    result["spec"]["template"]["spec"]["containers"][0]["args"] += ["--prune", pruning.prune, *kept]
    result["metadata"]["annotations"] = {names.PRUNING_ANNOTATION: msgspec.json.encode(pruning).decode()}
    return result


def pruning_of(job: Manifest) -> Pruning | None:
    """What the pods of an existing Job may remove; None if that is nothing, or unknown, as for a Job of an operator
    that did not write the annotation."""
    text = (job["metadata"].get("annotations") or {}).get(names.PRUNING_ANNOTATION)
    try:
        return None if text is None else msgspec.json.decode(text, type=Pruning)
    except msgspec.MsgspecError:
        return None
