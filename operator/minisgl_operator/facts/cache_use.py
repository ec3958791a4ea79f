"""Fetched checkpoints on the cache's claim that are in use, and whether others may be removed."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from minisgl_operator.api.objects import Manifest, controller_uid
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.facts.observed import Observed
from minisgl_operator.facts.pods import component
from minisgl_operator.facts.replicas import Replica
from minisgl_operator.facts.rollout.history import History
from minisgl_operator.render import names


def cache_key_of(labelled: Manifest) -> str | None:
    """The directory of the cache in the annotations of a pod or of a pod template."""
    found = (labelled["metadata"].get("annotations") or {}).get(names.CACHE_KEY_ANNOTATION)
    return None if found is None else str(found)


def directories_in_use(
    model: InferenceModel, observed: Observed, history: History, revisions: Collection[str]
) -> frozenset[str]:
    """Directories that an existing engine pod, a StatefulSet or a recorded template of these `revisions` names, as a
    restart or a rollback reads them again, and those that the specs of other models name."""
    templates = [
        live["spec"]["template"]
        for ref, live in observed.children.items()
        if ref.kind == "StatefulSet" and controller_uid(live) == model.metadata.uid
    ]
    pods = [pod for pod in observed.pods if component(pod) == names.ENGINE]
    recorded = [template.cache_key for revision, template in history.templates.items() if revision in revisions]
    own = frozenset(key for key in (*map(cache_key_of, (*templates, *pods)), *recorded) if key is not None)
    # No fetched directory begins with a dash, which would be taken for a flag.
    return own | {each for each in observed.read_by_others if each and not each.startswith("-")}


def unused_are_obsolete(replicas: Iterable[Replica], observed: Observed) -> bool:
    """True if nothing needs another directory than those in use. A rollback does not: a replica serves, so a rollback
    leads to its revision. While none serves, the last one that did may be one that no template names any more. Other
    models do not, unless one reads the whole claim."""
    return any(replica.ready for replica in replicas) and "" not in observed.read_by_others
