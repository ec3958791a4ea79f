"""Degraded: whether a replica or a frontend that had started is down, or does not end."""

from __future__ import annotations

from minisgl_operator.api.conditions import Reason
from minisgl_operator.facts.facts import Facts
from minisgl_operator.status.condition import Condition, frontends_stuck, shortened
from minisgl_operator.status.ending_pods import ending_pod


def degraded(facts: Facts) -> Condition:
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
    return Condition("False", Reason.ALL_REPLICAS_SERVE, "No replica or frontend that has started is down.")
