"""Degraded: whether a replica or a frontend that had started is down, or does not end."""

from __future__ import annotations

from minisgl_operator.api.conditions import Reason
from minisgl_operator.facts.drains import BlockedDrain
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.silent_frontends import LEFT_OUT_AFTER
from minisgl_operator.status.condition import Condition, frontends_stuck, shortened
from minisgl_operator.status.ending_pods import ending_pod


def degraded(facts: Facts) -> Condition:
    if (blocked := facts.blocked_drain) is not None:
        return Condition("True", Reason.DRAIN_BLOCKED, _blocked_message(blocked))
    down = [replica.name for replica in facts.replicas if replica.failing]
    if down:
        message = f"Replicas that are down: {shortened(down)}. See EngineReady and Scheduled for the cause."
        return Condition("True", Reason.REPLICAS_DOWN, message)
    if facts.failing_frontends:
        message = "A frontend pod is down. See FrontendReady and Scheduled for the cause."
        return Condition("True", Reason.FRONTENDS_DOWN, message)
    if failure := facts.frontend_rollout_failure:
        return Condition("True", Reason.PROGRESS_DEADLINE_EXCEEDED, frontends_stuck(failure))
    found = ending_pod(facts, facts.observed.pods)
    if found is not None and found.reason == Reason.POD_NOT_TERMINATING:
        return found._replace(status="True")
    silent = [each.pod for each in facts.silent_frontends if each.is_left_out(facts.now)]
    if silent:
        return Condition("True", Reason.FRONTEND_SILENT, _silent_message(facts, silent))
    return Condition("False", Reason.ALL_REPLICAS_SERVE, "No replica or frontend that has started is down.")


def _blocked_message(blocked: BlockedDrain) -> str:
    down = f"replicas are down: {shortened(list(blocked.replicas))}" if blocked.replicas else "a frontend pod is down"
    return (
        f"The drain of {shortened(list(blocked.nodes))} waits: PodDisruptionBudget {blocked.budget} allows no eviction "
        f"while {down}. See EngineReady, FrontendReady and Scheduled for the cause, which in most cases is a lack of "
        "room on other nodes. To let the drain evict the pods that serve, set spec.availability.disruptionBudget to "
        "None; nothing serves until they start elsewhere."
    )


def _silent_message(facts: Facts, silent: list[str]) -> str:
    effect = " The number of replicas follows the other frontends." if facts.autoscaling is not None else ""
    return (
        f"Frontend pods that have not answered the operator for {LEFT_OUT_AFTER.total_seconds() / 60:.0f} minutes: "
        f"{shortened(silent)}.{effect} See their logs and the NetworkPolicies between the operator and the pods; "
        "delete a pod that hangs."
    )
