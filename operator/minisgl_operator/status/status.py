"""The status of a model: the observed state, and conditions with their reason and the next step."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from minisgl_operator.api.conditions import ConditionType, Reason
from minisgl_operator.api.objects import has_condition, is_deleting, parse_time
from minisgl_operator.api.text import truncate
from minisgl_operator.api.types import InferenceModel, InvalidSpec
from minisgl_operator.facts.ended_pods import EndedPod
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.observed import Observed, Report, by_replica
from minisgl_operator.facts.pods import last_terminations, node_of, revision_of
from minisgl_operator.facts.replicas import Replica
from minisgl_operator.facts.rollout.retries import Retry
from minisgl_operator.render import names
from minisgl_operator.status.condition import Condition
from minisgl_operator.status.conditions import Conditions, all_conditions, as_status
from minisgl_operator.status.conditions_unsettled import unsettled
from minisgl_operator.status.phase import phase_of
from minisgl_operator.status.rollout import rollout_status
from minisgl_operator.status.size import bounded

Status = dict[str, Any]

_MAX_TEXT_LENGTH: Final = 1024
_MAX_TIMINGS: Final = 32
_RECORD_AGAIN_AFTER: Final = timedelta(minutes=1)
# Reported fields that a ready replica keeps while it does not answer for a moment.
_REPORTED_FIELDS: Final = ("transport", "dataTypes", "epoch", "restarts", "startupSeconds", "timings", "lastFailure")


def derive_status(facts: Facts, previous: Mapping[str, Any]) -> Status:
    """The complete status.

    `previous` is the last status, or {}: it has the times of transitions, and details of the model's files that only
    the fetch pod knew.
    """
    reported_before = [each["name"] for each in previous.get("replicaStatuses") or () if "epoch" in each]
    # Before the first status there is only what the API server gives a new object.
    has_status = bool(previous.keys() - {"observedGeneration"})
    if has_status and not facts.observed.rejections and facts.awaits_first_report(reported_before):
        # Without those reports the status would show that nothing serves, and a moment later that everything does.
        return dict(previous) | _autoscaling(facts)
    generation = facts.model.metadata.generation
    conditions = all_conditions(facts)
    phase = phase_of(facts, conditions)
    conditions = {**conditions, **unsettled(phase, conditions, _given_up(facts, conditions))}
    before = by_replica(previous)
    replicas = [_replica_status(facts, replica, before.get(replica.name, {})) for replica in facts.replicas]
    existing = [replica for replica in facts.replicas if replica.stateful_set is not None]
    ready_ranks, ranks = (sum(replica[count] for replica in replicas) for count in ("readyRanks", "ranks"))
    status: Status = {
        "observedGeneration": generation,
        "phase": phase,
        "conditions": as_status(conditions, generation, previous, facts.now),
        "replicas": len(existing),
        "readyReplicas": facts.routable,
        "updatedReplicas": sum(not replica.outdated for replica in existing),
        "ranks": f"{ready_ranks}/{ranks}",
        "selector": _selector(facts.model),
        "url": facts.url,
        "model": _served_model(facts, previous),
        "revision": facts.revision,
        "replicaStatuses": replicas,
        "frontend": _frontend_status(facts),
    }
    status |= _autoscaling(facts)
    status["rollout"] = rollout_status(facts)
    if facts.failed_revision is not None:
        status["failedRevision"] = facts.failed_revision
    if facts.fetch is not None:
        cached = facts.cached
        status["cache"] = {
            "phase": "Done" if cached else "Pending" if facts.fetch.phase == "Done" else facts.fetch.phase,
            "percent": 100 if cached else facts.fetch.percent,
        }
    return bounded(status)


def status_of_invalid_spec(
    error: InvalidSpec, observed: Observed, previous: Mapping[str, Any], now: datetime
) -> Status:
    """The status of a model whose spec cannot be read: its running pods stay, and so does their last status."""
    generation = int(observed.model_object["metadata"].get("generation", 0))
    invalid = Condition("False", Reason.INVALID_SPEC, f"{error}. Correct the spec; running pods are not changed.")
    conditions = {ConditionType.ACCEPTED: invalid, ConditionType.STALLED: invalid._replace(status="True")}
    before = {each["type"]: each for each in previous.get("conditions") or ()}
    before.pop(ConditionType.RECONCILING, None)
    # One that has no replica would not get any.
    was_ready = ConditionType.READY in before and before[ConditionType.READY]["reason"] == Reason.READY
    if not was_ready:
        conditions[ConditionType.READY] = invalid
    current = before | {each["type"]: each for each in as_status(conditions, generation, previous, now)}
    return {
        **previous,
        "observedGeneration": generation,
        "phase": previous.get("phase", "Failed") if was_ready else "Failed",
        "conditions": [current[type.value] for type in ConditionType if type.value in current],
    }


def _given_up(facts: Facts, conditions: Conditions) -> Condition | None:
    """The condition of a change that does not go on although others serve meanwhile; None: there is no such change."""
    if facts.fetch_has_failed:
        return conditions[ConditionType.MODEL_CACHED]
    if facts.progress.failure and not facts.rolled_back:
        return conditions[ConditionType.PROGRESSING]
    return None


def _autoscaling(facts: Facts) -> dict[str, Any]:
    """The autoscaler's decision, from which the next one follows."""
    decision = facts.autoscaling
    if decision is None:
        return {}
    since = decision.fewer_since
    fields = {
        "targetReplicas": decision.target,
        "fewerReplicas": decision.fewer,
        "fewerSince": None if since is None else _timestamp(since),
    }
    return {"autoscaling": {name: value for name, value in fields.items() if value is not None}}


def _frontend_status(facts: Facts) -> dict[str, Any]:
    silent = [{"pod": each.pod, "since": _timestamp(each.since)} for each in facts.silent_frontends]
    found = {"replicas": facts.wanted_frontends, "readyReplicas": facts.ready_frontends}
    return found | ({"silent": silent} if silent else {})


def _selector(model: InferenceModel) -> str:
    """Selects one pod of each replica: an autoscaler that divides by the number of pods then divides by replicas."""
    labels = names.selector(model.name, names.ENGINE) | {names.POD_INDEX_LABEL: "0"}
    return ",".join(f"{key}={value}" for key, value in labels.items())


def _served_model(facts: Facts, previous: Mapping[str, Any]) -> dict[str, Any]:
    name = truncate(facts.title, _MAX_TEXT_LENGTH)
    before = previous.get("model") or {}
    # The fetch pod, which reported the commit, may have been deleted.
    known = before if before.get("name") == name else {}
    reports = [replica.report for replica in facts.replicas if replica.report is not None]
    card: Mapping[str, Any] = next(
        (report["card"] for report in reports if isinstance(report.get("card"), Mapping)), {}
    )
    found = {
        "commit": (facts.fetch.commit if facts.fetch is not None else "") or known.get("commit"),
        "architecture": card.get("architecture") or known.get("architecture"),
        "task": card.get("task") or known.get("task"),
        "maxModelLen": card.get("max_model_len") or known.get("maxModelLen"),
    }
    return {"name": name} | {key: value for key, value in found.items() if value}


def _replica_status(facts: Facts, replica: Replica, previous: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "name": replica.name,
        "phase": replica.phase,
        "readyRanks": _ready_ranks(facts, replica),
        "ranks": _ranks(facts, replica),
        "nodes": sorted({str(node) for pod in replica.pods if (node := node_of(pod))}),
    }
    if replica.revision is not None:
        result["revision"] = replica.revision
    if (retry := facts.retries.get(replica.name)) is not None:
        result["retry"] = _retry_status(retry)
    before = _from_previous(replica, previous) if replica.report is None else {}
    if replica.report is not None:
        result |= _from_report(replica.report, replica.last_failure)
    elif replica.ready:
        result |= before
    if "lastFailure" not in result:
        # The last failure stays in the status of a replica that restarts and does not answer for a moment.
        failures = [found for found in (before.get("lastFailure"), _last_crash(replica)) if found is not None]
        if failures:
            result["lastFailure"] = max(failures, key=lambda failure: str(failure.get("at")))
        if replica.ended is not None:
            result["lastFailure"] = _end_by_node(replica.ended, before.get("lastFailure") or {})
    return result


def _retry_status(retry: Retry) -> dict[str, Any]:
    fields = {
        "revision": retry.revision,
        "failures": retry.failures,
        "leaderStart": retry.leader_start,
        "failedAt": _timestamp(retry.failed_at),
        "retryAt": _timestamp(retry.retry_at) if retry.waits else None,
        "errors": [{"node": each.node, "error": each.error, "count": each.count} for each in retry.errors] or None,
    }
    return _without_empty(fields)


def _timestamp(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _ranks(facts: Facts, replica: Replica) -> int:
    """Ranks that the replica has; an edit of their number takes effect when it reaches the replica."""
    reported = replica.report.get("tensor") if replica.report is not None else None
    return reported if isinstance(reported, int) else facts.model.spec.parallelism.tensor


def _ready_ranks(facts: Facts, replica: Replica) -> int:
    reported = replica.report.get("ready_ranks") if replica.report is not None else None
    if isinstance(reported, int):
        return reported
    pods = sum(has_condition(pod, "Ready") and not is_deleting(pod) for pod in replica.pods)
    return pods * facts.model.spec.parallelism.ranks_per_pod


def _from_report(report: Report, failure: Report | None) -> dict[str, Any]:
    """Fields of the leader's report under their names in the status; empty ones are left out."""
    timings = {
        str(phase): round(float(seconds), 1)
        for phase, seconds in list((report.get("timings") or {}).items())[:_MAX_TIMINGS]
        if isinstance(seconds, int | float)
    }
    found = {
        "transport": report.get("transport"),
        "dataTypes": _data_types(report.get("data_types")),
        "epoch": report.get("epoch"),
        "restarts": report.get("restarts"),
        "startupSeconds": timings.get("total"),
        "timings": timings or None,
    }
    if failure is not None:
        found["lastFailure"] = _without_empty(
            {
                "rank": failure.get("rank"),
                "pod": failure.get("pod"),
                "reason": failure.get("reason"),
                "exitCode": failure.get("exit_code"),
                "message": truncate(str(failure.get("message") or ""), _MAX_TEXT_LENGTH),
                "at": failure.get("at"),
            }
        )
    return _without_empty(found)


def _data_types(reported: Any) -> dict[str, str] | None:
    """`data_types` of a report under their names in the status; None: not reported."""
    if not isinstance(reported, Mapping):
        return None
    found = {"weights": reported.get("weights"), "kvCache": reported.get("kv_cache")}
    return {name: truncate(each, _MAX_TEXT_LENGTH) for name, each in found.items() if isinstance(each, str)} or None


def _from_previous(replica: Replica, previous: Mapping[str, Any]) -> dict[str, Any]:
    """What the replica has reported; `previous` is its last status, of this or another revision."""
    if previous.get("revision") != replica.revision:
        return {}
    return {key: previous[key] for key in _REPORTED_FIELDS if key in previous}


def _last_crash(replica: Replica) -> dict[str, Any] | None:
    """The end of a launcher, which it could not report. Deleted pods have not failed."""
    for pod in replica.pods:
        if revision_of(pod) != replica.revision or is_deleting(pod):
            continue
        for ended in last_terminations(pod):
            return _without_empty(
                {
                    "pod": pod["metadata"]["name"],
                    "reason": "OutOfMemory" if ended.get("reason") == "OOMKilled" else ended.get("reason"),
                    "exitCode": ended.get("exitCode"),
                    "message": truncate(str(ended.get("message") or ""), _MAX_TEXT_LENGTH),
                    "at": ended.get("finishedAt"),
                }
            )
    return None


def _end_by_node(ended: EndedPod, before: Mapping[str, Any]) -> dict[str, Any]:
    """A pod that its node ended, as lastFailure. `before` is the last one: a node may end one pod a second, and the
    status must not change as often."""
    again = (before.get("node"), before.get("reason"), before.get("pod")) == (ended.node, ended.reason, ended.name)
    if again and parse_time(ended.at) < parse_time(str(before["at"])) + _RECORD_AGAIN_AFTER:
        return dict(before)
    return _without_empty(
        {
            "pod": ended.name,
            "node": ended.node,
            "reason": truncate(ended.reason, _MAX_TEXT_LENGTH),
            "message": ended.message,
            "at": ended.at,
        }
    )


def _without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, "")}
