"""EngineReady: whether the ranks of all wanted replicas serve, and otherwise the most severe cause."""

from __future__ import annotations

from typing import Final

from minisgl_operator.api.conditions import Reason
from minisgl_operator.api.text import quote
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.observed import Report
from minisgl_operator.facts.pods import last_terminations, waiting_reason
from minisgl_operator.facts.replicas import Replica
from minisgl_operator.render import names
from minisgl_operator.status.condition import Condition, crash_message, suspended
from minisgl_operator.status.conditions_accepted import model_rejection
from minisgl_operator.status.ending_pods import ending_pod

# The most severe first. Of several replicas that are not ready, the condition reports the most severe reason.
_REASONS_BY_SEVERITY: Final = (
    Reason.TENSOR_DOES_NOT_DIVIDE_HEADS,
    Reason.INVALID_MODEL,
    Reason.RESTART_BUDGET_EXHAUSTED,
    Reason.OUT_OF_MEMORY,
    Reason.CRASHED,
    Reason.RESTARTING,
    Reason.POD_NOT_TERMINATING,
    Reason.NODE_LOST,
    Reason.UNREACHABLE,
    Reason.LOADING,
    Reason.RENDEZVOUS,
    Reason.WAITING_FOR_PODS,
    Reason.DRAINING,
    Reason.WAITING_FOR_MODEL,
)


def engine_ready(facts: Facts) -> Condition:
    if not facts.replicas:
        return suspended(facts)
    wanted = len(facts.replicas)
    waiting = [_condition_of_replica(facts, replica) for replica in facts.replicas if not replica.ready]
    if not waiting:
        return Condition("True", Reason.ENGINES_READY, f"{wanted} of {wanted} replicas are ready.")
    worst = min(waiting, key=lambda condition: _REASONS_BY_SEVERITY.index(condition.reason))
    if wanted == 1:
        return worst
    return worst._replace(message=f"{wanted - len(waiting)} of {wanted} replicas are ready. {worst.message}")


def _condition_of_replica(facts: Facts, replica: Replica) -> Condition:
    """The cause why one replica is not ready."""
    name, phase = replica.name, replica.phase
    if (rejection := model_rejection(replica)) is not None:
        return rejection
    if (found := ending_pod(facts, replica.pods)) is not None:
        return found
    if phase == "Draining":
        message = f"{name} finishes its running requests before its pods are replaced."
        return Condition("False", Reason.DRAINING, message)
    for pod in replica.pods:
        if waiting_reason(pod) == "CrashLoopBackOff":
            if any(ended.get("reason") == "OOMKilled" for ended in last_terminations(pod)):
                message = f"{crash_message(pod)} Raise spec.engine.resources.limits.memory."
                return Condition("False", Reason.OUT_OF_MEMORY, message)
            return Condition("False", Reason.CRASHED, crash_message(pod))
    if phase == "Unknown":
        message = f"The launcher of {name} does not answer the operator. Check its node and the NetworkPolicies."
        return Condition("Unknown", Reason.UNREACHABLE, message)
    if replica.report is None:
        if not facts.startable and not replica.pods:
            return Condition("False", Reason.WAITING_FOR_MODEL, f"{name} starts when the model is cached.")
        if (first := facts.gang.placing or facts.gang.paused) is not None and first is not replica and not replica.pods:
            message = f"{name} starts when all pods of {first.name} are on nodes."
            return Condition("False", Reason.WAITING_FOR_PODS, message)
        return Condition("False", Reason.WAITING_FOR_PODS, f"Pods of {name} have not started.")
    failure = replica.last_failure
    if failure is not None and (phase in ("Failed", "Restarting") or replica.report.get("restarts")):
        return _after_failure(facts, replica, failure, failed=replica.report.get("phase") == "Failed")
    match phase:
        case "Waiting" | "Rendezvous":
            return Condition("False", Reason.RENDEZVOUS, f"The ranks of {name} wait for each other.")
        case "Restarting":
            return Condition("False", Reason.RESTARTING, f"The ranks of {name} restart.")
        case "Failed":
            message = f"{name} has failed. {_next_step_after_failing(facts, replica)}"
            return Condition("False", Reason.RESTART_BUDGET_EXHAUSTED, message)
    return Condition("False", Reason.LOADING, f"{name} loads the model.")


def _after_failure(facts: Facts, replica: Replica, failure: Report, *, failed: bool) -> Condition:
    """`failed`: the replica does not restart any more."""
    cause = f"{replica.name}: {_failure_message(failure)}."
    next_step = _next_step_after_failing(facts, replica) if failed else "Its ranks restart automatically."
    if failure.get("reason") == "OutOfMemory":
        remedy = (
            "Raise spec.engine.resources.limits.memory, or lower spec.model.maxModelLen."
            if facts.model.spec.engine.device == "cpu"
            else "Lower spec.model.maxModelLen, or raise spec.parallelism.tensor."
        )
        return Condition("False", Reason.OUT_OF_MEMORY, f"{cause} {remedy} {next_step}")
    if not failed:
        return Condition("False", Reason.RESTARTING, f"{cause} {next_step}")
    recovery = facts.model.spec.recovery
    # Pods from before an edit of spec.recovery have another limit.
    reported = None if replica.report is None else replica.report.get("max_restarts")
    limit = reported if isinstance(reported, int) else recovery.max_restarts
    budget = (
        f"It has used its {limit} restarts within {recovery.window_seconds} s, or failed in a way that "
        "a restart does not cure."
    )
    return Condition("False", Reason.RESTART_BUDGET_EXHAUSTED, f"{cause} {budget} {next_step}")


def _failure_message(failure: Report) -> str:
    """The end of a rank, such as `rank 1 ended with exit code -9 (Killed): last output`."""
    rank = "a rank" if failure.get("rank") is None else f"rank {failure['rank']}"
    code = "" if failure.get("exit_code") is None else f" with exit code {failure['exit_code']}"
    output = quote(str(failure.get("message") or ""))
    return f"{rank} ended{code} ({failure.get('reason') or 'Error'})" + (f": {output}" if output else "")


def _next_step_after_failing(facts: Facts, replica: Replica) -> str:
    delete = f"`kubectl delete pod -l {names.REPLICA_LABEL}={replica.name}`"
    log = f"`kubectl logs {replica.name}-0`"
    retry = facts.retries.get(replica.name)
    if retry is None:
        return f"Its pods are kept for inspection: see {log}. Correct the spec, or retry with {delete}."
    nodes = "".join(
        f" The same error came again on node {node}: check that node, or run `kubectl cordon {node}`, so that the next "
        "attempt uses another one."
        for node in retry.bad_nodes
    )
    return (
        f"It is tried again after a pause that grows with each failure; until then its pods are kept for inspection: "
        f"see {log}.{nodes} Correct the spec, or retry now with {delete}."
    )
