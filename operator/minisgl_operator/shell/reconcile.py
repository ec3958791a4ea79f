"""The one step that acts: look at what was observed, send what the plan says, write down what is true.

What happened to wake the model is not known here, on purpose: whatever was missed, the next step makes it right.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from minisgl_operator.api.types import InferenceModel, InvalidSpec
from minisgl_operator.facts.lost_nodes import overdue, seconds_until_news
from minisgl_operator.facts.observed import ObjectEvent, Observed, Outcome, Refusal, ref_of, utc
from minisgl_operator.plan.plan import Apply, Delete, conflicts, plan, seconds_until_fetch
from minisgl_operator.render.defaults import Defaults
from minisgl_operator.render.names import MANAGED_BY, MANAGED_BY_LABEL
from minisgl_operator.shell.apply import Applier, Unseen, belongs, whose
from minisgl_operator.shell.client import ApiError, Client, Object
from minisgl_operator.shell.events import Recorder
from minisgl_operator.shell.pod_events import StuckEvents
from minisgl_operator.shell.probe import Prober
from minisgl_operator.shell.resources import POD, of_kind
from minisgl_operator.shell.store import ModelKey, Store
from minisgl_operator.status.conditions import Reason
from minisgl_operator.status.status import derive_status
from minisgl_operator.status.transitions import events_for

_log = logging.getLogger(__name__)

# Objects of others are not watched.
_LOOK_AT_FOREIGN_SECONDS: Final = 15.0
_ASK_NAMESPACE_AGAIN: Final = timedelta(minutes=5)


@dataclass(frozen=True)
class Result:
    """`failed`: a step was refused, to be tried again with a growing delay. `after`: seconds until the next look is
    due although nothing may have happened."""

    failed: bool = False
    after: float | None = None


@dataclass(frozen=True)
class Shell:
    """What a step needs of the world."""

    client: Client
    store: Store
    applier: Applier
    prober: Prober
    stuck: StuckEvents
    recorder: Recorder
    environment: Defaults


async def reconcile(shell: Shell, key: ModelKey, blocked: tuple[Refusal, ...], now: datetime) -> Result:
    """One step for one model. `blocked` says why nothing may be done now, if so: without its watches the operator
    would act on what it cannot see. Raises ApiError when the API server does not answer."""
    stored = shell.store.model(key)
    if stored is None or stored.body["metadata"].get("deletionTimestamp"):
        return await _see_off(shell, key, blocked, now)
    raw = stored.body
    if (rest := _rest_for_its_namespace(raw, now)) > 0:
        seen = await _see_off(shell, key, blocked, now)
        return Result(failed=seen.failed, after=rest if seen.after is None else min(rest, seen.after))
    await _look_at_foreign(shell, key, raw)
    events, again = await shell.stuck.about([one.body for one in shell.store.of_model(key)], now)
    observed = observe(shell, key, raw, events)
    outcome = Outcome(blocked)
    model: InferenceModel | InvalidSpec
    try:
        model = InferenceModel.parse(raw)
    except InvalidSpec as refusal:
        model = refusal
    else:
        if not blocked:
            outcome, complete = await _execute(shell, key, model, observed, now)
            if not complete:
                again = 0.0
            observed = observe(shell, key, raw, events)
    previous = raw.get("status", {})
    status = derive_status(model, observed, shell.environment, previous, outcome, now)
    ending = any(refusal.reason == Reason.NAMESPACE_TERMINATING.value for refusal in outcome.refusals)
    # No Event can be made there either.
    if await shell.applier.apply_status(key, raw, status) and not ending:
        for notice in events_for(previous, status):
            shell.recorder.record(raw, notice)
    if ending:
        return Result(after=_ASK_NAMESPACE_AGAIN.total_seconds())
    due = [again, seconds_until_news(observed.pods, now)]
    if not isinstance(model, InvalidSpec):
        due.append(seconds_until_fetch(model, observed, now))
        # A name that was wanted once and is taken is nothing to wait for.
        if conflicts(model, observed, shell.environment):
            due.append(_LOOK_AT_FOREIGN_SECONDS)
    after = min((seconds for seconds in due if seconds is not None), default=None)
    return Result(failed=bool(outcome.refusals) and not blocked, after=after)


async def _see_off(shell: Shell, key: ModelKey, blocked: tuple[Refusal, ...], now: datetime) -> Result:
    """A model that goes, or has gone. The cluster deletes its children, by their owner reference or with the namespace,
    in which nothing can be made any more; but it waits for ever for pods whose node is lost."""
    pods = [one.body for one in shell.store.of_model(key) if one.body["kind"] == POD.kind]
    failed = False
    for pod in () if blocked else overdue(pods, now):
        try:
            await _delete(shell, key, Delete(ref_of(pod), pod["metadata"]["uid"], force=True))
        except ApiError as error:
            if error.status == 0:
                raise
            failed = True
    return Result(failed=failed, after=seconds_until_news(pods, now))


def observe(shell: Shell, key: ModelKey, raw: Object, events: Mapping[str, tuple[ObjectEvent, ...]]) -> Observed:
    """The store as the core sees it."""
    objects = [one.body for one in shell.store.of_model(key)]
    children = [one for one in objects if one["kind"] != POD.kind]
    pods = tuple(one for one in objects if one["kind"] == POD.kind)
    reports = shell.prober.reports
    return Observed(
        raw=raw,
        children={ref_of(one): one for one in children if belongs(one, raw)},
        foreign={ref_of(one): whose(one) for one in children if not belongs(one, raw)},
        pods=pods,
        reports={uid: reports[uid] for uid in (pod["metadata"]["uid"] for pod in pods) if uid in reports},
        events=events,
    )


async def _execute(
    shell: Shell, key: ModelKey, model: InferenceModel, observed: Observed, now: datetime
) -> tuple[Outcome, bool]:
    """Send every step; False when something turned up that the plan should have known. A step that is refused hinders
    no other, unless it is by the end of the namespace; the next plan will name it again."""
    refusals: list[Refusal] = []
    complete = True
    for step in plan(model, observed, shell.environment, now):
        ref = ref_of(step.manifest) if isinstance(step, Apply) else step.ref
        try:
            if isinstance(step, Apply):
                await shell.applier.apply(key, step.manifest, observed.raw)
            else:
                await _delete(shell, key, step)
        except Unseen:
            complete = False
        except ApiError as error:
            if error.status == 0:
                raise
            refusals.append(Refusal(ref, error.status, error.reason, error.message))
            if error.reason == Reason.NAMESPACE_TERMINATING.value:
                break
    return Outcome(tuple(refusals)), complete


def _rest_for_its_namespace(raw: Object, now: datetime) -> float:
    """Seconds for which nothing is to be asked of the model's namespace, for it was said a moment ago that it ends. No
    namespace leaves that state but by its end; but an API server can take one that was made anew for the old one."""
    for condition in raw.get("status", {}).get("conditions", ()):
        if condition["reason"] == Reason.NAMESPACE_TERMINATING.value:
            return (utc(condition["lastTransitionTime"]) + _ASK_NAMESPACE_AGAIN - now).total_seconds()
    return 0.0


async def _delete(shell: Shell, key: ModelKey, step: Delete) -> None:
    left = await shell.client.delete(
        of_kind(step.ref.kind), key.namespace, step.ref.name, step.uid, step.propagation, 0 if step.force else None
    )
    if step.force:
        _log.warning("Removed pod %s/%s by force: its node does not say that it ended", key.namespace, step.ref.name)
    known = shell.store.get(step.ref.kind, key.namespace, step.ref.name)
    if left is not None:
        shell.store.put(left)
    elif known is not None and known.uid == step.uid:
        shell.store.remove(known.body)


async def _look_at_foreign(shell: Shell, key: ModelKey, raw: Object) -> None:
    """Whether objects of others that held a child's name still do. Those without our label are in no watch."""
    for one in shell.store.of_model(key):
        metadata = one.body["metadata"]
        if belongs(one.body, raw) or metadata.get("labels", {}).get(MANAGED_BY_LABEL) == MANAGED_BY:
            continue
        live = await shell.client.get(of_kind(one.body["kind"]), key.namespace, metadata["name"])
        if live is None or live["metadata"]["uid"] != one.uid:
            shell.store.remove(one.body)
        if live is not None:
            shell.store.put(live, key)
