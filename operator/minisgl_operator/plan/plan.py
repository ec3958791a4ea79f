"""The next steps towards what a model asks for, computed from what is observed and from nothing else.

There is no state of a rollout anywhere: whose turn it is follows from which StatefulSets hold an old template and
which replicas serve. An edit in the middle, a crash between two steps or a lost event need no thought of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from minisgl_operator.api.types import InferenceModel
from minisgl_operator.facts.lost_nodes import overdue
from minisgl_operator.facts.observed import Manifest, Observed, Ref, controller_uid, ref_of, utc
from minisgl_operator.facts.replicas import Replica, condition, deleting, holds, replicas_of, revision_of
from minisgl_operator.render import model_files, names, render, revision, storage, wanted_replicas
from minisgl_operator.render.availability import engine_budget
from minisgl_operator.render.defaults import Defaults

RETRY_FETCH_AFTER: Final = timedelta(minutes=10)
"""A fetch that failed for good is tried again after this: a token may have been put right in its Secret, which the
operator does not read."""

_USED_BY_PODS: Final = frozenset({"PersistentVolumeClaim", "ServiceAccount"})
_MAKE_PODS: Final = frozenset({"Deployment", "Job", "StatefulSet"})


@dataclass(frozen=True)
class Apply:
    """Server-side apply of one child, whole. One that changes nothing is left out by whoever sends it."""

    manifest: Manifest


@dataclass(frozen=True)
class Delete:
    """Deletes one child or pod, under the precondition that it is still the one with this uid. `force`: without the
    kubelet's word that it has ended."""

    ref: Ref
    uid: str
    propagation: Literal["Background", "Foreground"] = "Background"
    force: bool = False


Step = Apply | Delete


def plan(model: InferenceModel, observed: Observed, env: Defaults, now: datetime) -> tuple[Step, ...]:
    """Steps to send now, in this order: first what goes, then what is made. Later steps follow once the effect of
    these is observed."""
    if model.metadata.deletion_timestamp is not None:
        return ()
    desired = {ref_of(manifest): manifest for manifest in render(model, env)}
    taken = conflicts(model, observed, env)
    # Pods would read and write someone else's claim, or run under someone else's account.
    withheld = _MAKE_PODS if any(ref.kind in _USED_BY_PODS for ref in taken) else frozenset()
    applied = _adjusted(model, observed, env, desired)
    return (
        *(
            Delete(Ref("Pod", pod["metadata"]["name"]), pod["metadata"]["uid"], force=True)
            for pod in overdue(observed.pods, now)
        ),
        *_deletes(model, observed, desired, now),
        *(
            Apply(manifest)
            for ref, manifest in applied.items()
            if ref not in taken
            and ref.kind not in withheld
            and not (ref in observed.children and deleting(observed.children[ref]))
        ),
    )


def conflicts(model: InferenceModel, observed: Observed, env: Defaults) -> dict[Ref, str]:
    """Names of wanted children that someone else's objects hold, with whose they are. They are left as they are."""
    found = dict(observed.foreign)
    for ref, live in observed.children.items():
        if controller_uid(live) not in (None, model.metadata.uid):
            owner = next(owner for owner in live["metadata"]["ownerReferences"] if owner.get("controller"))
            found[ref] = f"{owner['kind']} {owner['name']}"
    wanted = {ref_of(manifest) for manifest in render(model, env)} if found else set()
    return {ref: owner for ref, owner in found.items() if ref in wanted}


def cached(model: InferenceModel, observed: Observed) -> bool:
    """Whether the model's files are where engines look for them: a fetch has completed, or a replica was made from
    them. Neither counts when it is older than the claim, which was then made anew, and is empty."""
    key = model_files.cache_key(model)
    if key is None:
        return True
    job = observed.child("Job", names.fetch(model.name, key))
    if job is not None and holds(job, "Complete") and not _emptied(model, observed, job["status"]["completionTime"]):
        return True
    return any(
        (live["spec"]["template"]["metadata"].get("annotations") or {}).get(names.CACHE_KEY_ANNOTATION) == key
        and not _emptied(model, observed, live["metadata"]["creationTimestamp"])
        for ref, live in observed.children.items()
        if ref.kind == "StatefulSet" and controller_uid(live) == model.metadata.uid
    )


def replaceable(replicas: tuple[Replica, ...], current: str) -> tuple[Replica, ...]:
    """Replicas with an old template whose turn has come to get the current one.

    A replica that serves, or that served a moment ago and is on its way back, is replaced only when all others have
    come up: so at most one is away, and a revision that does not come up stops at the first. One that has never served
    is replaced at once, as there is nothing to lose, unless a replica of the current revision still has to show that
    it comes up: with a revision that does not, the old one is the better one to keep.
    """
    old = [replica for replica in replicas if replica.stateful_set is not None and replica.revision != current]
    unproven = any(replica.revision == current and not replica.came_up for replica in replicas)
    if not unproven and (idle := [replica for replica in old if replica.without_service]):
        return tuple(idle)
    awaited = awaited_by_rollout(replicas, current)
    for replica in sorted(old, key=lambda replica: (replica.serving, replica.index)):
        if all(other is replica for other in awaited):
            return (replica,)
    return ()


def awaited_by_rollout(replicas: tuple[Replica, ...], current: str) -> tuple[Replica, ...]:
    """Replicas that have to come up before another one is replaced. An old one that is up and gets no requests, be it
    that other tokenizer files are in use or that its own cannot be, is not awaited: only its turn would change that."""
    return tuple(
        replica
        for replica in replicas
        if not replica.came_up and not (replica.revision != current and replica.left_alone)
    )


def _adjusted(
    model: InferenceModel, observed: Observed, env: Defaults, desired: Mapping[Ref, Manifest]
) -> dict[Ref, Manifest]:
    """What of the desired is applied now, and how: what depends on observation is the engines, their disruption
    budget, a fetch that was already made, and the size of a claim that is there."""
    replicas = replicas_of(model.name, observed, range(wanted_replicas(model)))
    result = dict(desired)
    if replicas:
        budget = engine_budget(model, {replica.name: replica.size if replica.ready else 0 for replica in replicas})
        result[ref_of(budget)] = budget
    counts = _pod_counts(model, observed, replicas, revision(model, env))
    for ref, manifest in desired.items():
        if ref.kind == "StatefulSet":
            if ref.name in counts:
                result[ref] = {**manifest, "spec": {**manifest["spec"], "replicas": counts[ref.name]}}
            else:
                del result[ref]
        elif ref.kind == "PersistentVolumeClaim" and ref in observed.children:
            result[ref] = storage.not_smaller(manifest, observed.children[ref])
        elif ref.kind == "Job" and revision_of(observed.children.get(ref, manifest)) != revision_of(manifest):
            # The template of a Job cannot change: it is deleted where that matters, and left alone where it is done.
            del result[ref]
    return result


def _pod_counts(
    model: InferenceModel, observed: Observed, replicas: tuple[Replica, ...], current: str
) -> dict[str, int]:
    """Pods that each StatefulSet with the current template shall have; one that is not in here is not touched.

    A new template comes together with a count of 0, in one apply, and the pods come back when none of another
    revision is left: so never do two revisions meet in one replica, whatever crashes when.
    """
    if not cached(model, observed):
        return {}
    turn = replaceable(replicas, current)
    counts: dict[str, int] = {}
    for replica in replicas:
        live = replica.stateful_set
        others = any(revision_of(pod) != current for pod in replica.pods)
        if live is None or replica.revision == current:
            emptying = live is not None and live["spec"]["replicas"] == 0 and not _empty(live)
            counts[replica.name] = 0 if others or emptying else model.spec.parallelism.pods
        elif replica in turn:
            counts[replica.name] = 0
    return counts


def _empty(stateful_set: Manifest) -> bool:
    """The controller has seen the count of 0 and has no pod left. The pods in the store may lag behind that."""
    status = stateful_set.get("status") or {}
    seen = status.get("observedGeneration", 0) >= stateful_set["metadata"].get("generation", 0)
    return seen and not status.get("replicas")


def _deletes(
    model: InferenceModel, observed: Observed, desired: Mapping[Ref, Manifest], now: datetime
) -> Iterator[Delete]:
    """What is owned by the model and no longer desired, the replica with the highest index first."""
    going: list[tuple[int, Ref, Manifest]] = []
    for ref, live in observed.children.items():
        if controller_uid(live) != model.metadata.uid or deleting(live) or ref.kind == "PersistentVolumeClaim":
            # A claim is never deleted by a plan: what was downloaded stays until the model goes.
            continue
        if ref in desired:
            if ref.kind == "Job" and _fetch_again(model, observed, live, desired[ref], now):
                going.append((0, ref, live))
        elif not (ref.kind == "Service" and _has_pods(observed, ref.name)):
            # The pods of a replica keep their names until they have drained.
            index = names.replica_index(model.name, ref.name)
            going.append((-1 if index is None else index, ref, live))
    for _, ref, live in sorted(going, key=lambda each: (-each[0], each[1])):
        # Fetches write: the next one is made when no pod of this one is left.
        yield Delete(ref, live["metadata"]["uid"], "Foreground" if ref.kind == "Job" else "Background")


def _has_pods(observed: Observed, replica: str) -> bool:
    return any(pod["metadata"]["labels"].get(names.REPLICA_LABEL) == replica for pod in observed.pods)


def _fetch_again(model: InferenceModel, observed: Observed, job: Manifest, desired: Manifest, now: datetime) -> bool:
    """Whether the Job has to go so that a new one is made."""
    if holds(job, "Complete"):
        return _emptied(model, observed, job["status"]["completionTime"])
    if revision_of(job) != revision_of(desired):
        return True
    retried = _retried_at(job)
    return retried is not None and now >= retried


def seconds_until_fetch(model: InferenceModel, observed: Observed, now: datetime) -> float | None:
    """Until a fetch that failed for good is to be tried again; None when there is nothing to wait for."""
    key = model_files.cache_key(model)
    job = None if key is None else observed.child("Job", names.fetch(model.name, key))
    retried = None if job is None else _retried_at(job)
    return None if retried is None or retried <= now else (retried - now).total_seconds()


def _retried_at(job: Manifest) -> datetime | None:
    failed = condition(job, "Failed")
    if failed is None or failed["status"] != "True":
        return None
    return utc(failed["lastTransitionTime"]) + RETRY_FETCH_AFTER


def _emptied(model: InferenceModel, observed: Observed, since: str) -> bool:
    """Whether the cache's claim was made anew after `since`. A claim of the user's own is theirs to keep full."""
    claim = observed.child("PersistentVolumeClaim", names.cache(model.name))
    if model.spec.model.hub_cache.claim_name is not None or claim is None:
        return False
    return utc(claim["metadata"]["creationTimestamp"]) > utc(since)
