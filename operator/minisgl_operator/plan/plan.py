"""The next steps from the observed state towards the spec, computed from the facts alone.

No state of a rollout is stored anywhere: the templates of the StatefulSets and the states of the replicas determine
whose turn it is. An edit in the middle, a crash between two steps or a lost event need no special case.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from minisgl_operator.api.objects import Manifest, Ref, controller_uid, has_condition, is_deleting, ref_of
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.fetch_status import refetch_needed, retry_time
from minisgl_operator.facts.lost_nodes import pods_to_force_delete
from minisgl_operator.facts.observed import Nodes
from minisgl_operator.facts.pods import node_of, replica_name, revision_of
from minisgl_operator.facts.replicas import Replica
from minisgl_operator.facts.wanted import frontends_to_apply
from minisgl_operator.render import names, storage
from minisgl_operator.render.availability import engine_budget, has_budgets
from minisgl_operator.render.engine import first_pod
from minisgl_operator.render.gateway import slice_ref
from minisgl_operator.render.history import controller_revision
from minisgl_operator.render.pruning import pruning_of, with_pruning

_USED_BY_PODS: Final = frozenset({"PersistentVolumeClaim", "ServiceAccount"})
_CREATE_PODS: Final = frozenset({"Deployment", "Job", "StatefulSet"})


@dataclass(frozen=True)
class Apply:
    """Server-side apply of one complete child. The sender skips an apply that would change nothing."""

    manifest: Manifest

    @property
    def ref(self) -> Ref:
        return ref_of(self.manifest)


@dataclass(frozen=True)
class Delete:
    """Deletion of the child or pod with this uid. `lost_node`: node of a pod that is deleted by force, which is without
    confirmation of its kubelet."""

    ref: Ref
    uid: str
    propagation: Literal["Background", "Foreground"] = "Background"
    lost_node: str | None = None


@dataclass(frozen=True)
class Check:
    """Dry run of the creation of this pod of `revision`: what would admission refuse?"""

    pod: Manifest
    revision: str

    @property
    def ref(self) -> Ref:
        return ref_of(self.pod)


Step = Apply | Delete | Check


def plan(facts: Facts) -> tuple[Step, ...]:
    """Steps to send now, in this order: deletions first, then applies, then a dry run. More steps follow once the
    effect of these is observed."""
    if facts.model.metadata.deletion_timestamp is not None:
        return ()
    children = facts.observed.children
    # Pods would read and write another owner's PVC, or run under another owner's account.
    blocked = _CREATE_PODS if any(ref.kind in _USED_BY_PODS for ref in facts.conflicts) else frozenset()
    return (
        *force_deletions(facts.observed.pods, facts.observed.nodes, facts.now),
        *_deletions(facts),
        *_retries(facts),
        *(
            Apply(manifest)
            for ref, manifest in _manifests_to_apply(facts).items()
            if ref not in facts.conflicts
            and ref.kind not in blocked
            and not (ref in children and is_deleting(children[ref]))
        ),
        *_checks(facts),
    )


def _checks(facts: Facts) -> Iterator[Check]:
    """The dry run that must come before a replica that serves is drained."""
    replica = facts.replica_to_check
    if replica is not None and replica.stateful_set is not None and facts.admission.due(facts.now):
        yield Check(first_pod(facts.model, facts.template, replica.stateful_set), facts.revision)


def force_deletions(pods: Iterable[Manifest], nodes: Nodes | None, now: datetime) -> tuple[Delete, ...]:
    """Deletions of pods whose node is lost."""
    return tuple(
        Delete(ref_of(pod), pod["metadata"]["uid"], lost_node=node_of(pod))
        for pod in pods_to_force_delete(pods, nodes, now)
    )


def _manifests_to_apply(facts: Facts) -> dict[Ref, Manifest]:
    """The desired children, adjusted to the observed state: number of pods, disruption budget, an existing
    fetch Job, size and class of an existing PVC."""
    children = facts.observed.children
    result = dict(facts.desired)
    if facts.replicas and has_budgets(facts.model):
        ready_pods = {replica.name: replica.size if replica.ready else 0 for replica in facts.replicas}
        budget = engine_budget(facts.model, ready_pods)
        result[ref_of(budget)] = budget
    counts = _pod_counts(facts)
    annotations = {replica.name: facts.gang.annotations(replica) for replica in facts.replicas}
    for ref, manifest in facts.desired.items():
        if ref.kind == "StatefulSet":
            if ref.name in counts:
                result[ref] = _with_count(manifest, counts[ref.name], annotations.get(ref.name, {}))
            else:
                del result[ref]
        elif ref.kind == "PersistentVolumeClaim" and ref in children:
            result[ref] = storage.adjusted(facts.model, manifest, children[ref])
        elif ref.kind == "Job":
            if ref in children or facts.other_fetch_exists:
                # A Job's template is immutable, and its arguments depend on the state when it was created: it stays as
                # it is, or is deleted to be created again.
                del result[ref]
            else:
                result[ref] = with_pruning(manifest, facts.pruning)
        elif ref.kind == "Deployment":
            wanted = facts.model.spec.frontend.replicas
            count = 0 if facts.frontends_at_zero else frontends_to_apply(wanted, facts.frontend)
            result[ref] = _with_count(manifest, count, {})
    if facts.keeps_frontends:
        result.pop(Ref("Deployment", names.frontend(facts.model.name)))
    if facts.observed.gateway is None:
        # What is not known yet is left as it is.
        result.pop(slice_ref(facts.model.name), None)
    if (record := _new_record(facts)) is not None:
        result[ref_of(record)] = record
    return result


def _new_record(facts: Facts) -> Manifest | None:
    """The current template's ControllerRevision; None if it exists and is the newest one, and before any replica can
    have the template."""
    name = names.engine_revision(facts.model.name, facts.revision)
    ref = Ref("ControllerRevision", name)
    live = facts.observed.children.get(ref)
    is_foreign = live is not None and controller_uid(live) != facts.model.metadata.uid
    is_older = facts.template is not facts.spec_template
    if not facts.cached or is_older or is_foreign or ref in facts.observed.conflicting:
        return None
    number = facts.history.number_of(facts.revision, name)
    return None if number is None else controller_revision(facts.model, facts.template, number)


def _pod_counts(facts: Facts) -> dict[str, int]:
    """Number of pods by StatefulSet name, for those to be applied with the current template.

    A new template is applied together with a count of 0, and the pods are created when none of another revision is
    left: two revisions never meet in one replica, wherever a crash interrupts this.
    """
    if not facts.startable:
        return {}
    counts: dict[str, int] = {}
    startable: list[Replica] = []
    for replica in facts.replicas:
        live = replica.stateful_set
        if replica in facts.gang.to_release:
            # With the current template, also for an old one: it does not serve.
            counts[replica.name] = 0
        elif not replica.has_old_template:
            others = any(revision_of(pod) != facts.revision for pod in replica.pods)
            emptying = live is not None and replica.size == 0 and not _has_no_pods(live)
            if replica.size == 0 and not (others or emptying):
                startable.append(replica)
            counts[replica.name] = 0 if others or replica.size == 0 else facts.template.pods
        elif replica in facts.replicas_to_replace:
            counts[replica.name] = 0
    for replica in facts.gang.next_to_start(startable):
        counts[replica.name] = facts.template.pods
    return counts


def _with_count(controller: Manifest, count: int | None, annotations: dict[str, str]) -> Manifest:
    """The StatefulSet or Deployment with this number of pods and these annotations in addition to its own. None: the
    number is another manager's."""
    metadata = dict(controller["metadata"])
    if annotations:
        metadata["annotations"] = metadata.get("annotations", {}) | annotations
    spec = {name: value for name, value in controller["spec"].items() if name != "replicas"}
    return {**controller, "metadata": metadata, "spec": spec if count is None else {**spec, "replicas": count}}


def _has_no_pods(stateful_set: Manifest) -> bool:
    """True if the controller has processed the count of 0 and has no pod left. Pods in the store may lag behind."""
    status = stateful_set.get("status") or {}
    processed = status.get("observedGeneration", 0) >= stateful_set["metadata"].get("generation", 0)
    return processed and not status.get("replicas")


def _deletions(facts: Facts) -> Iterator[Delete]:
    """Owned children that are no longer desired, in the order in which `facts.surplus` lists their replicas. During a
    download also replicas that go back to no pods: a StatefulSet with the new template would say that its files are
    there."""
    released = () if facts.cached else tuple(Ref("StatefulSet", replica.name) for replica in facts.gang.to_release)
    order = {replica.name: position for position, replica in enumerate(facts.surplus)}
    found: list[tuple[int, Ref, Manifest]] = []
    for ref, live in facts.observed.children.items():
        if (
            controller_uid(live) != facts.model.metadata.uid
            or is_deleting(live)
            # A downloaded model is kept until the InferenceModel is deleted.
            or ref.kind in ("ControllerRevision", "PersistentVolumeClaim")
        ):
            continue
        if ref in facts.desired:
            if ref in released or (ref.kind == "Job" and _must_be_replaced(facts, live, facts.desired[ref])):
                found.append((len(order), ref, live))
        # The pods of a replica need their names until they have drained.
        elif ref.kind != "Service" or all(replica_name(pod) != ref.name for pod in facts.observed.pods):
            found.append((order.get(ref.name, len(order)), ref, live))
    current = names.engine_revision(facts.model.name, facts.revision)
    for record in facts.history.obsolete(current, facts.revisions_in_use):
        yield Delete(ref_of(record), record["metadata"]["uid"])
    for _, ref, live in sorted(found, key=lambda each: each[:2]):
        # Fetches write to the PVC: the next Job is created when no pod of this one is left.
        yield Delete(ref, live["metadata"]["uid"], "Foreground" if ref.kind == "Job" else "Background")


def _retries(facts: Facts) -> Iterator[Delete]:
    """Pods of failed replicas whose next attempt is due; their StatefulSets create them again."""
    for replica in facts.replicas:
        retry = facts.retries.get(replica.name)
        if retry is not None and retry.waits and facts.now >= retry.retry_at:
            yield from (Delete(ref_of(pod), pod["metadata"]["uid"]) for pod in replica.pods if not is_deleting(pod))


def _must_be_replaced(facts: Facts, job: Manifest, desired: Manifest) -> bool:
    """True if the fetch Job must be deleted so that a new one can be created."""
    if has_condition(job, "Complete"):
        return refetch_needed(facts.model, facts.observed, job)
    if revision_of(job) != revision_of(desired) or _can_make_room(facts, job):
        return True
    retried_at = retry_time(job)
    return retried_at is not None and facts.now >= retried_at


def _can_make_room(facts: Facts, job: Manifest) -> bool:
    """True if the download does not fit, and the pods of a new Job may remove a checkpoint that those of this one keep,
    as when the last pod that used it has ended. Each new Job keeps what is in use then, and must report again that its
    download does not fit, so that it is replaced only after another change."""
    kept = pruning_of(job)
    if facts.fetch is None or not facts.fetch.needed_bytes or kept is None or facts.pruning is None:
        return False
    return facts.pruning.allows_more_than(kept)
