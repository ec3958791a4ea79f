"""One reconcile of one model: observe, send the steps of the plan, write the status.

The event that triggered it is deliberately unknown here: a missed event is made up for by the next reconcile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from minisgl_operator.api.conditions import Reason
from minisgl_operator.api.defaults import Defaults
from minisgl_operator.api.objects import Manifest, Ref, parse_time, ref_of
from minisgl_operator.api.types import InferenceModel, InvalidSpec
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.lost_nodes import ending, finalizers, is_lost, next_ending
from minisgl_operator.facts.observed import DryRun, Nodes, ObjectEvent, Observed, Rejection
from minisgl_operator.facts.pods import node_of
from minisgl_operator.facts.route import group_of
from minisgl_operator.plan.plan import Apply, Check, Delete, Step, force_deletions, plan
from minisgl_operator.render import names
from minisgl_operator.render.names import MANAGED_BY, MANAGED_BY_LABEL
from minisgl_operator.shell.apply import Applier, ConflictDetected, is_owned_by, owner_name
from minisgl_operator.shell.client import ApiError, Client
from minisgl_operator.shell.events import Recorder
from minisgl_operator.shell.gateways import Gateways
from minisgl_operator.shell.nodes import NodeWatch
from minisgl_operator.shell.peer_tokens import PeerTokens
from minisgl_operator.shell.pod_events import PodEvents
from minisgl_operator.shell.probe import Prober
from minisgl_operator.shell.resources import POD, of_kind
from minisgl_operator.shell.routes import Routes
from minisgl_operator.shell.store import ModelKey, Store
from minisgl_operator.shell.upgrades import Upgrades
from minisgl_operator.shell.writes import Writes
from minisgl_operator.status.status import Status, derive_status, status_of_invalid_spec
from minisgl_operator.status.transitions import ModelEvent, events_for

_log = logging.getLogger(__name__)

# Objects of other owners are not watched.
_RECHECK_CONFLICTS_SECONDS: Final = 15.0
_RECHECK_NAMESPACE_AFTER: Final = timedelta(minutes=5)


@dataclass(frozen=True)
class Result:
    """`failed`: a step was rejected; retry with a growing delay. `after`: seconds until the next reconcile is due, even
    without an event."""

    failed: bool = False
    after: float | None = None


@dataclass(frozen=True)
class Context:
    """Everything with effects that a reconcile uses."""

    client: Client
    store: Store
    applier: Applier
    prober: Prober
    nodes: NodeWatch
    gateways: Gateways | None
    routes: Routes
    pod_events: PodEvents
    recorder: Recorder
    writes: Writes
    upgrades: Upgrades
    peer_tokens: PeerTokens
    defaults: Defaults


async def reconcile(context: Context, key: ModelKey, blocked: tuple[Rejection, ...], now: datetime) -> Result:
    """Reconcile one model.

    `blocked` lists missing permissions: nothing is changed then, as the operator does not see everything.

    Raises:
        ApiError: the API server does not answer.
    """
    stored = context.store.model(key)
    if stored is None or stored.body["metadata"].get("deletionTimestamp"):
        context.upgrades.forget(key, now)
        context.peer_tokens.forget(key)
        context.prober.require_secret(key, False)
        return await _reconcile_deleted(context, key, blocked, now)
    model_object = stored.body
    if (backoff := _namespace_backoff(model_object, now)) > 0:
        context.upgrades.leave_out(key, now)
        result = await _reconcile_deleted(context, key, blocked, now)
        return replace(result, after=_earliest(backoff, result.after))
    await _recheck_conflicts(context, key, model_object)
    events, next_look = await context.pod_events.events_for([one.body for one in context.store.of_model(key)], now)
    observed = _observe(context, key, model_object, events, blocked)
    previous = model_object.get("status", {})
    due = [next_look]
    try:
        facts = Facts(InferenceModel.parse(model_object), observed, context.defaults, now)
    except InvalidSpec as error:
        context.upgrades.leave_out(key, now)
        status = status_of_invalid_spec(error, observed, previous, now)
        due.append(_seconds(next_ending(observed.pods, observed.nodes, now), now))
    else:
        if blocked:
            context.upgrades.leave_out(key, now)
        else:
            labels = model_object["metadata"].get("labels") or {}
            if (turn := context.upgrades.turn(key, labels, facts.upgrade, now)) is not None:
                facts = facts.seen_again(observed, turn)
            wanted = facts.wanted
            refusal = await context.peer_tokens.keep(key, facts.model, facts.peer_secret, now)
            sent = await _send(context, key, plan(facts), model_object)
            if refusal is not None:
                sent = replace(sent, rejections=(refusal, *sent.rejections))
            if sent.changed or sent.rejections or sent.dry_run is not None:
                observed = _observe(context, key, model_object, events, sent.rejections, sent.dry_run)
                facts = facts.seen_again(observed, facts.turn)
            # A report that came meanwhile may change the autoscaler's decision, and no event reports our own write.
            if not sent.complete or facts.wanted != wanted:
                due.append(0.0)
        context.prober.require_secret(key, facts.peer_secret.required)
        status = derive_status(facts, previous)
        due += [_seconds(facts.next_change, now), _seconds(facts.next_look, now)]
        if facts.conflicts:
            due.append(_RECHECK_CONFLICTS_SECONDS)
    terminating = any(each.reason == Reason.NAMESPACE_TERMINATING.value for each in observed.rejections)
    # Events cannot be created in a terminating namespace either.
    changes = () if terminating else events_for(previous, status)
    await asyncio.shield(context.writes.start(_write_status(context, key, model_object, status, changes)))
    stored = context.store.model(key)
    if stored is not None and _rollout(stored.body) != _rollout(model_object):
        # The plan depends on it, and no event reports our own write.
        due.append(0.0)
    if terminating:
        return Result(after=_RECHECK_NAMESPACE_AFTER.total_seconds())
    return Result(failed=bool(observed.rejections) and not blocked, after=_earliest(*due))


async def _write_status(
    context: Context, key: ModelKey, model_object: Manifest, status: Status, changes: Iterable[ModelEvent]
) -> None:
    if await context.applier.apply_status(key, model_object, status):
        for event in changes:
            context.recorder.record(model_object, event)


def _rollout(model_object: Manifest) -> object:
    """The state of a rollout that the next plan depends on, as the API server has stored it; an older definition of
    InferenceModel drops it."""
    status = model_object.get("status", {})
    rollout = status.get("rollout") or {}
    upgrade = rollout.get("upgrade")
    # The end of an upgrade is that the model is Ready.
    ready = upgrade and [each["status"] for each in status.get("conditions") or () if each["type"] == "Ready"]
    names = ("failure", "strategy", "admission")
    return status.get("failedRevision"), *(rollout.get(name) for name in names), upgrade, ready


def _seconds(moment: datetime | None, now: datetime) -> float | None:
    """Seconds from now to `moment`."""
    return None if moment is None else (moment - now).total_seconds()


def _earliest(*seconds: float | None) -> float | None:
    return min((each for each in seconds if each is not None), default=None)


async def _reconcile_deleted(context: Context, key: ModelKey, blocked: tuple[Rejection, ...], now: datetime) -> Result:
    """Reconcile a model that is deleted, or whose namespace is. The cluster deletes its children, through their owner
    reference or with the namespace; but it waits indefinitely for pods on a lost node."""
    pods = [one.body for one in context.store.of_model(key) if one.body["kind"] == POD.kind]
    nodes = _nodes_of(context, pods)
    for pod in pods:
        if ending(pod, nodes, now) in ("hangs", "not ready", "unknown"):
            # There may be no InferenceModel left that could have a condition.
            where = (pod["metadata"]["namespace"], pod["metadata"]["name"], node_of(pod))
            _log.warning("Pod %s/%s of a deleted model does not end, and its node %s is not known to be lost", *where)
        elif ending(pod, nodes, now) == "finalizer":
            kept = (pod["metadata"]["namespace"], pod["metadata"]["name"], ", ".join(finalizers(pod)))
            _log.warning("Pod %s/%s of a deleted model is kept by its finalizers: %s", *kept)
    sent = await _send(context, key, () if blocked else force_deletions(pods, nodes, now))
    return Result(failed=bool(sent.rejections), after=_seconds(next_ending(pods, nodes, now), now))


def _nodes_of(context: Context, pods: Iterable[Manifest]) -> Nodes | None:
    """The nodes of these pods, as they are now."""
    known = context.nodes.nodes
    return None if known is None else {name: known[name] for pod in pods if (name := node_of(pod) or "") in known}


def _observe(
    context: Context,
    key: ModelKey,
    model_object: Manifest,
    events: Mapping[str, tuple[ObjectEvent, ...]],
    rejections: tuple[Rejection, ...],
    dry_run: DryRun | None = None,
) -> Observed:
    objects = [one.body for one in context.store.of_model(key)]
    children = [one for one in objects if one["kind"] != POD.kind]
    pods = tuple(one for one in objects if one["kind"] == POD.kind)
    group = context.store.group(key.namespace, group_of(model_object))
    reports = context.prober.reports
    return Observed(
        model_object=model_object,
        children={ref_of(one): one for one in children if is_owned_by(one, model_object)},
        conflicting={ref_of(one): owner_name(one) for one in children if not is_owned_by(one, model_object)},
        pods=pods,
        reports={uid: reports[uid] for uid in (pod["metadata"]["uid"] for pod in pods) if uid in reports},
        events=events,
        read_by_others=context.store.directories_read(key.namespace, names.cache(key.name)),
        gateway=None if context.gateways is None else context.gateways.pods,
        nodes=_nodes_of(context, pods),
        group=tuple(each for each in group if each["metadata"]["name"] != key.name),
        routes_served=context.routes.served,
        rejections=rejections,
        dry_run=dry_run,
    )


@dataclass(frozen=True)
class Sent:
    """`changed`: the store has changed. `complete`: False when a conflict turned up that the plan did not know of."""

    rejections: tuple[Rejection, ...]
    changed: bool
    complete: bool
    dry_run: DryRun | None = None


async def _send(context: Context, key: ModelKey, steps: tuple[Step, ...], model_object: Manifest | None = None) -> Sent:
    """Send every step of a plan; `model_object` is the owner of applied children.

    A rejected step does not stop the others, unless the namespace is being deleted; the next plan contains it again. A
    replica whose Service conflicts gets no StatefulSet: the next plan gives it another index.
    """
    rejections: list[Rejection] = []
    conflicting: set[Ref] = set()
    changed, complete, dry_run = False, True, None
    for step in steps:
        if step.ref.kind == "StatefulSet" and Ref("Service", step.ref.name) in conflicting:
            continue
        try:
            if isinstance(step, Apply):
                assert model_object is not None
                changed |= await context.applier.apply(key, step.manifest, model_object)
            elif isinstance(step, Check):
                dry_run = await _dry_run(context, key, step)
            else:
                changed = True
                await _delete(context, key, step)
        except ConflictDetected:
            conflicting.add(step.ref)
            changed, complete = True, False
        except ApiError as error:
            if error.status == 0:
                raise
            rejections.append(Rejection(step.ref, error.status, error.reason, error.message))
            if error.reason == Reason.NAMESPACE_TERMINATING.value:
                break
    return Sent(tuple(rejections), changed, complete, dry_run)


async def _dry_run(context: Context, key: ModelKey, step: Check) -> DryRun:
    try:
        await context.client.dry_run(POD, key.namespace, step.pod)
    except ApiError as error:
        return DryRun(step.revision, error.status, error.reason, error.message)
    return DryRun(step.revision, 201)


def _namespace_backoff(model_object: Manifest, now: datetime) -> float:
    """Seconds for which no request is sent to a namespace that was reported as terminating. A namespace leaves that
    state only by its deletion, but an API server can confuse a namespace that was created again with the old one."""
    for condition in model_object.get("status", {}).get("conditions", ()):
        if condition["reason"] == Reason.NAMESPACE_TERMINATING.value:
            return (parse_time(condition["lastTransitionTime"]) + _RECHECK_NAMESPACE_AFTER - now).total_seconds()
    return 0.0


async def _delete(context: Context, key: ModelKey, step: Delete) -> None:
    if step.lost_node is not None:
        # The watch may be late. A node that has returned ends the pod itself.
        if not is_lost(await context.nodes.read(step.lost_node), context.client.now()):
            return
        _log.warning("Deleting pod %s/%s by force: its node %s is lost", key.namespace, step.ref.name, step.lost_node)
    grace = None if step.lost_node is None else 0
    left = await context.client.delete(
        of_kind(step.ref.kind), key.namespace, step.ref.name, step.uid, step.propagation, grace
    )
    known = context.store.get(step.ref.kind, key.namespace, step.ref.name)
    if left is not None:
        context.store.put(left)
    elif known is not None and known.uid == step.uid:
        context.store.remove(known.body)


async def _recheck_conflicts(context: Context, key: ModelKey, model_object: Manifest) -> None:
    """Read again the objects of other owners that have a child's name. Without our label they are in no watch."""
    for one in context.store.of_model(key):
        metadata = one.body["metadata"]
        if is_owned_by(one.body, model_object) or metadata.get("labels", {}).get(MANAGED_BY_LABEL) == MANAGED_BY:
            continue
        live = await context.client.get(of_kind(one.body["kind"]), key.namespace, metadata["name"])
        if live is None or live["metadata"]["uid"] != one.uid:
            context.store.remove(one.body)
        if live is not None:
            context.store.put(live, key)
