"""EngineReady: whether the ranks of all wanted replicas serve, and if not, what is the worst that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.lost_nodes import PATIENCE, seems_lost
from minisgl_operator.facts.pod_failures import crash_text, last_end
from minisgl_operator.facts.replicas import Replica, containers, waiting_reason
from minisgl_operator.render import names
from minisgl_operator.status.conditions import Condition, Kind, Reason, Verdict, quoted

# What of a model's own files no restart and no wait will change.
_REFUSALS: Final[Mapping[str, tuple[Reason, str]]] = {
    "InvalidModel": (
        Reason.INVALID_MODEL,
        "Name a model that is complete and of an architecture that is supported, in spec.model.source.",
    ),
    "TensorDoesNotDivideHeads": (
        Reason.TENSOR_DOES_NOT_DIVIDE_HEADS,
        "Set spec.parallelism.tensor to a number that divides them.",
    ),
}
# The worst first: it is the one that is told.
_ENGINE_REASONS: Final = (
    Reason.TENSOR_DOES_NOT_DIVIDE_HEADS,
    Reason.INVALID_MODEL,
    Reason.RESTART_BUDGET_EXHAUSTED,
    Reason.OUT_OF_MEMORY,
    Reason.CRASHED,
    Reason.RESTARTING,
    Reason.NODE_LOST,
    Reason.UNREACHABLE,
    Reason.LOADING,
    Reason.RENDEZVOUS,
    Reason.WAITING_FOR_PODS,
    Reason.DRAINING,
    Reason.WAITING_FOR_MODEL,
)


def engine_ready(facts: Facts) -> Condition:
    """Whether the ranks of all wanted replicas serve."""
    if not facts.replicas:
        return Condition(Kind.ENGINE_READY, "False", Reason.SUSPENDED, asleep(facts))
    waiting = [replica for replica in facts.replicas if not replica.ready]
    if not waiting:
        message = f"{len(facts.replicas)} of {len(facts.replicas)} replicas are ready."
        return Condition(Kind.ENGINE_READY, "True", Reason.ENGINES_READY, message)
    # The first of equally bad ones is told.
    reason, message = min((_engine(facts, replica) for replica in waiting), key=lambda each: _rank(each[0]))
    if len(facts.replicas) > 1:
        message = f"{len(facts.replicas) - len(waiting)} of {len(facts.replicas)} replicas are ready. {message}"
    status: Verdict = "Unknown" if reason is Reason.UNREACHABLE else "False"
    return Condition(Kind.ENGINE_READY, status, reason, message)


def asleep(facts: Facts) -> str:
    if facts.model.spec.suspend:
        return "spec.suspend is true: the model has no engine pods until it is set to false."
    return f"spec.replicas is 0: `kubectl scale imodel/{facts.model.name} --replicas=1` starts the model."


def failure_text(failure: Mapping[str, Any]) -> str:
    """A rank's end in words: `rank 1 ended with exit code -9 (Killed): its last words`."""
    rank = "a rank" if failure.get("rank") is None else f"rank {failure['rank']}"
    code = "" if failure.get("exit_code") is None else f" with exit code {failure['exit_code']}"
    words = quoted(str(failure.get("message") or ""))
    return f"{rank} ended{code} ({failure.get('reason') or 'Error'})" + (f": {words}" if words else "")


def _engine(facts: Facts, replica: Replica) -> tuple[Reason, str]:
    """Why a replica is not ready."""
    name, phase = replica.name, facts.phase(replica)
    if (found := refused(facts, replica)) is not None:
        return found
    for pod in replica.pods:
        if seems_lost(pod, facts.now):
            node = (pod.get("spec") or {}).get("nodeName") or "its node"
            message = (
                f"Pod {pod['metadata']['name']} was told to end and does not: {node} seems to be lost. The pod is "
                f"removed by force {PATIENCE.total_seconds():.0f} s after its time, and made again on another node. "
                f"See `kubectl describe node {node}`."
            )
            return Reason.NODE_LOST, message
    if phase == "Draining":
        return Reason.DRAINING, f"{name} ends its last requests before its pods are replaced."
    for pod in replica.pods:
        if waiting_reason(pod) == "CrashLoopBackOff":
            ends = [end for container in containers(pod) if (end := last_end(container)) is not None]
            if any(end.get("reason") == "OOMKilled" for end in ends):
                return Reason.OUT_OF_MEMORY, f"{crash_text(pod)} Raise spec.engine.resources.limits.memory."
            return Reason.CRASHED, crash_text(pod)
    report = replica.report
    if report is None or phase == "Unknown":
        if phase == "Unknown":
            return Reason.UNREACHABLE, (
                f"{name} does not tell the operator how it is. Check its node, and the NetworkPolicies."
            )
        if not facts.cached and not replica.pods:
            return Reason.WAITING_FOR_MODEL, f"{name} starts when the model is cached."
        return Reason.WAITING_FOR_PODS, f"Pods of {name} have not started."
    failure = report.get("last_failure")
    if isinstance(failure, Mapping) and (phase in ("Failed", "Restarting") or report.get("restarts")):
        return _after_failure(facts, replica, report, failure)
    if phase in ("Waiting", "Rendezvous"):
        return Reason.RENDEZVOUS, f"The ranks of {name} wait for each other."
    if phase == "Restarting":
        return Reason.RESTARTING, f"The ranks of {name} start again."
    if phase == "Failed":
        return Reason.RESTART_BUDGET_EXHAUSTED, f"{name} has given up. {_after_giving_up(replica)}"
    return Reason.LOADING, f"{name} loads the model."


def _after_failure(
    facts: Facts, replica: Replica, report: Mapping[str, Any], failure: Mapping[str, Any]
) -> tuple[Reason, str]:
    what = f"{replica.name}: {failure_text(failure)}."
    given_up = report.get("phase") == "Failed"
    next_step = _after_giving_up(replica) if given_up else "Its ranks start again by themselves."
    if failure.get("reason") == "OutOfMemory":
        remedy = (
            "Raise spec.engine.resources.limits.memory, or lower spec.model.maxModelLen."
            if facts.model.spec.engine.device == "cpu"
            else "Lower spec.model.maxModelLen, or raise spec.parallelism.tensor."
        )
        return Reason.OUT_OF_MEMORY, f"{what} {remedy} {next_step}"
    if not given_up:
        return Reason.RESTARTING, f"{what} {next_step}"
    recovery = facts.model.spec.recovery
    budget = (
        f"It has used up its {recovery.max_restarts} restarts within {recovery.window_seconds} s, or failed in a way "
        "that no restart cures."
    )
    return Reason.RESTART_BUDGET_EXHAUSTED, f"{what} {budget} {next_step}"


def _after_giving_up(replica: Replica) -> str:
    return (
        f"Its pods are kept as they are: see `kubectl logs {replica.name}-0`. Correct the spec, or try again with "
        f"`kubectl delete pod -l {names.REPLICA_LABEL}={replica.name}`."
    )


def refused(facts: Facts, replica: Replica) -> tuple[Reason, str] | None:
    """What the model's own files say against the spec. Only of pods that were made from the present spec."""
    report = replica.report
    if report is None or report.get("phase") != "Failed" or facts.outdated(replica):
        return None
    failure = report.get("last_failure")
    if not isinstance(failure, Mapping) or failure.get("reason") not in _REFUSALS:
        return None
    reason, remedy = _REFUSALS[str(failure["reason"])]
    return reason, f"{quoted(str(failure.get('message') or failure['reason']))}. {remedy}"


def _rank(reason: Reason) -> int:
    return _ENGINE_REASONS.index(reason)
