"""FrontendReady: whether all frontends can answer requests."""

from __future__ import annotations

from minisgl_operator.api.conditions import Reason
from minisgl_operator.facts.facts import Facts
from minisgl_operator.status.condition import Condition, crash_message, suspended


def frontend_ready(facts: Facts) -> Condition:
    failure = facts.pod_failure(Reason.CRASHED)
    if failure is not None and failure.pod is not None:
        return Condition("False", Reason.CRASHED, crash_message(failure.pod))
    wanted, ready = facts.wanted_frontends, facts.ready_frontends
    if ready >= wanted:
        return Condition("True", Reason.FRONTENDS_READY, f"{wanted} of {wanted} frontends are ready.")
    if not facts.replicas:
        return suspended(facts)
    if facts.routing.any_report and not any(replica.routable_from_any for replica in facts.replicas):
        message = "No frontend can reach a ready replica; none accepts requests until then. See EngineReady."
        return Condition("False", Reason.NO_REPLICA_ROUTABLE, message)
    return Condition("False", Reason.STARTING, f"{ready} of {wanted} frontends are ready; the others are starting.")
