"""The status of a model: what was observed, in conditions that say the reason and the next step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from minisgl_operator.api.types import InferenceModel, InvalidSpec
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.observed import Observed, Outcome
from minisgl_operator.facts.pod_failures import last_end
from minisgl_operator.facts.replicas import Replica, containers, deleting, holds, revision_of
from minisgl_operator.render import names
from minisgl_operator.render.defaults import Defaults
from minisgl_operator.status.conditions import Condition, Kind, Reason, as_status, clipped
from minisgl_operator.status.conditions_model import verdicts

Status = dict[str, Any]

_LONGEST_WORDS: Final = 1024
_MAX_TIMINGS: Final = 32
# What a replica told keeps holding while it is ready, though it may not answer for a moment.
_TOLD: Final = ("transport", "epoch", "restarts", "startupSeconds", "timings", "lastFailure")


def derive_status(
    model: InferenceModel | InvalidSpec,
    observed: Observed,
    env: Defaults,
    previous: Mapping[str, Any],
    outcome: Outcome,
    now: datetime,
) -> Status:
    """The whole status.

    `model` is the refusal where the spec could not be read. `previous` is the last status ({} for none): it gives the
    times of transitions, and what is known of a model's files after their fetch pod is gone.
    """
    if isinstance(model, InvalidSpec):
        return _invalid(model, observed, previous, now)
    facts = Facts(model, observed, env, outcome, now)
    generation = model.metadata.generation
    told_before = [each["name"] for each in previous.get("replicaStatuses") or () if "epoch" in each]
    if previous and not outcome.refusals and facts.not_asked_yet(told_before):
        # Said without those answers, it would be that nothing serves, and a moment later that all does.
        return dict(previous)
    found = verdicts(facts)
    replicas = [_replica(facts, replica, previous) for replica in facts.replicas]
    ready_ranks, ranks = (sum(replica[count] for replica in replicas) for count in ("readyRanks", "ranks"))
    status: Status = {
        "observedGeneration": generation,
        "phase": _phase(facts, {condition.kind: condition for condition in found}),
        "conditions": as_status(found, generation, previous, now),
        "replicas": sum(replica.stateful_set is not None for replica in facts.replicas),
        "readyReplicas": facts.routable,
        "updatedReplicas": sum(
            replica.stateful_set is not None and not facts.outdated(replica) for replica in facts.replicas
        ),
        "ranks": f"{ready_ranks}/{ranks}",
        "selector": _selector(model),
        "url": facts.url,
        "model": _served_model(facts, previous),
        "revision": facts.revision,
        "replicaStatuses": replicas,
        "frontend": {"replicas": model.spec.frontend.replicas, "readyReplicas": facts.ready_frontends},
    }
    if facts.fetch is not None:
        cached = facts.cached
        status["cache"] = {
            "phase": "Done" if cached else "Pending" if facts.fetch.phase == "Done" else facts.fetch.phase,
            "percent": 100 if cached else facts.fetch.percent,
        }
    return status


def _invalid(refusal: InvalidSpec, observed: Observed, previous: Mapping[str, Any], now: datetime) -> Status:
    """Nothing can be said of a spec that cannot be read but that; what runs goes on as it was, and so does what was
    said of it."""
    generation = int(observed.raw["metadata"].get("generation", 0))
    message = f"{refusal}. Correct the spec; what ran before goes on."
    conditions = [Condition(Kind.ACCEPTED, "False", Reason.INVALID_SPEC, message)]
    if not any(each["type"] == Kind.READY.value and each["status"] == "True" for each in _before(previous)):
        conditions.append(Condition(Kind.READY, "False", Reason.INVALID_SPEC, message))
    said = as_status(conditions, generation, previous, now)
    replaced = {each["type"] for each in said}
    kept = [each for each in _before(previous) if each["type"] not in replaced]
    order = [kind.value for kind in Kind]
    phase = "Failed" if len(conditions) > 1 else previous.get("phase", "Failed")
    return {
        **previous,
        "observedGeneration": generation,
        "phase": phase,
        "conditions": sorted((*said, *kept), key=lambda each: order.index(each["type"])),
    }


def _before(previous: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    return previous.get("conditions") or ()


def _phase(facts: Facts, by_kind: Mapping[Kind, Condition]) -> str:
    """The whole in one word."""
    if not facts.replicas:
        return "Suspended"
    if by_kind[Kind.READY].status == "True":
        if by_kind[Kind.DEGRADED].status == "True":
            return "Degraded"
        return "Updating" if by_kind[Kind.PROGRESSING].status == "True" else "Ready"
    if by_kind[Kind.ACCEPTED].status == "False":
        return "Failed"
    if by_kind[Kind.MODEL_CACHED].status == "False":
        assert facts.fetch is not None
        return "Failed" if facts.fetch.given_up else "Caching"
    if all(facts.phase(replica) == "Failed" for replica in facts.replicas):
        return "Failed"
    if by_kind[Kind.SCHEDULED].status == "False":
        return "Pending"
    return "Degraded" if by_kind[Kind.DEGRADED].status == "True" else "Starting"


def _selector(model: InferenceModel) -> str:
    """One pod for each replica: an autoscaler that divides by the number of pods then divides by replicas."""
    wanted = names.selector(model.name, names.ENGINE) | {names.POD_INDEX_LABEL: "0"}
    return ",".join(f"{key}={value}" for key, value in wanted.items())


def _served_model(facts: Facts, previous: Mapping[str, Any]) -> dict[str, Any]:
    name = clipped(facts.title, _LONGEST_WORDS)
    before = previous.get("model") or {}
    # The fetch pod, which knew the commit, may be gone.
    known = before if before.get("name") == name else {}
    result: dict[str, Any] = {"name": name}
    commit = (facts.fetch.commit if facts.fetch is not None else "") or known.get("commit")
    cards = [
        replica.report["card"]
        for replica in facts.replicas
        if replica.report is not None and isinstance(replica.report.get("card"), Mapping)
    ]
    card = cards[0] if cards else {}
    architecture = card.get("architecture") or known.get("architecture")
    longest = card.get("max_model_len") or known.get("maxModelLen")
    for key, value in (("commit", commit), ("architecture", architecture), ("maxModelLen", longest)):
        if value:
            result[key] = value
    return result


def _replica(facts: Facts, replica: Replica, previous: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "name": replica.name,
        "phase": facts.phase(replica),
        "readyRanks": _ready_ranks(facts, replica),
        "ranks": _ranks(facts, replica),
        "nodes": sorted({str(node) for pod in replica.pods if (node := (pod.get("spec") or {}).get("nodeName"))}),
    }
    if replica.revision is not None:
        result["revision"] = replica.revision
    if replica.report is not None:
        result |= _told(replica.report)
    elif replica.ready:
        result |= _told_before(replica, previous)
    if "lastFailure" not in result:
        # A death stays one, also of a replica that is on its way back and does not answer for a moment.
        before = _told_before(replica, previous).get("lastFailure") if replica.report is None else None
        deaths = [death for death in (before, _crash(replica)) if death is not None]
        if deaths:
            result["lastFailure"] = max(deaths, key=lambda death: str(death.get("at")))
    return result


def _ranks(facts: Facts, replica: Replica) -> int:
    """Those that it has: until an edit of their number reaches the replica, as many as before."""
    said = replica.report.get("tensor") if replica.report is not None else None
    return said if isinstance(said, int) else facts.model.spec.parallelism.tensor


def _ready_ranks(facts: Facts, replica: Replica) -> int:
    if replica.report is not None and isinstance(replica.report.get("ready_ranks"), int):
        return int(replica.report["ready_ranks"])
    pods = sum(holds(pod, "Ready") and not deleting(pod) for pod in replica.pods)
    return pods * facts.model.spec.parallelism.ranks_per_pod


def _told(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the launcher of rank 0 says, under the names of the status. What it leaves out is left out."""
    timings = {
        str(phase): round(float(seconds), 1)
        for phase, seconds in list((report.get("timings") or {}).items())[:_MAX_TIMINGS]
        if isinstance(seconds, int | float)
    }
    found = {
        "transport": report.get("transport"),
        "epoch": report.get("epoch"),
        "restarts": report.get("restarts"),
        "startupSeconds": timings.get("total"),
        "timings": timings or None,
    }
    failure = report.get("last_failure")
    if isinstance(failure, Mapping):
        found["lastFailure"] = {
            key: value
            for key, value in (
                ("rank", failure.get("rank")),
                ("pod", failure.get("pod")),
                ("reason", failure.get("reason")),
                ("exitCode", failure.get("exit_code")),
                ("message", clipped(str(failure.get("message") or ""), _LONGEST_WORDS)),
                ("at", failure.get("at")),
            )
            if value not in (None, "")
        }
    return {key: value for key, value in found.items() if value not in (None, "")}


def _told_before(replica: Replica, previous: Mapping[str, Any]) -> dict[str, Any]:
    for before in previous.get("replicaStatuses") or ():
        if before.get("name") == replica.name and before.get("revision") == replica.revision:
            return {key: before[key] for key in _TOLD if key in before}
    return {}


def _crash(replica: Replica) -> dict[str, Any] | None:
    """A launcher's own end, which it could not report itself."""
    for pod in replica.pods:
        if revision_of(pod) != replica.revision or deleting(pod):
            # One that was told to end has not failed.
            continue
        for container in containers(pod):
            ended = last_end(container)
            if ended is not None:
                killed = ended.get("reason") == "OOMKilled"
                found = {
                    "pod": pod["metadata"]["name"],
                    "reason": "OutOfMemory" if killed else ended.get("reason"),
                    "exitCode": ended.get("exitCode"),
                    "message": clipped(str(ended.get("message") or ""), _LONGEST_WORDS),
                    "at": ended.get("finishedAt"),
                }
                return {key: value for key, value in found.items() if value not in (None, "")}
    return None
