"""FrontendReady: whether all frontends can answer requests. Ready: whether the endpoint answers, because a frontend is
ready and at least one replica is routable."""

from __future__ import annotations

from collections.abc import Mapping

from minisgl_operator.api.conditions import ConditionType, Reason
from minisgl_operator.api.objects import Ref
from minisgl_operator.facts.facts import Facts
from minisgl_operator.render import names
from minisgl_operator.status.condition import Condition, crash_message, suspended


def frontend_ready(facts: Facts) -> Condition:
    if facts.frontends_at_zero:
        return _without_frontends(facts)
    failure = facts.pod_failure(Reason.CRASHED)
    if failure is not None and failure.pod is not None:
        return Condition("False", Reason.CRASHED, crash_message(failure.pod))
    wanted, ready = facts.wanted_frontends, facts.ready_frontends
    if ready >= wanted:
        return Condition("True", Reason.FRONTENDS_READY, f"{wanted} of {wanted} frontends are ready.")
    if not facts.replicas and not facts.is_idle:
        return suspended(facts)
    routable = any(replica.routable_from_any for replica in facts.replicas)
    if facts.replicas and facts.routing.any_report and not routable:
        message = "No frontend can reach a ready replica; none accepts requests until then. See EngineReady."
        return Condition("False", Reason.NO_REPLICA_ROUTABLE, message)
    return Condition("False", Reason.STARTING, f"{ready} of {wanted} frontends are ready; the others are starting.")


def _without_frontends(facts: Facts) -> Condition:
    if facts.observed.gateway is None or facts.gateway_addresses:
        message = "The model is idle and has no frontends; the gateway holds its next request."
        return Condition("True", Reason.FRONTENDS_READY, message)
    pods = f"{names.NAME_LABEL}={names.GATEWAY_APPLICATION} in namespace {facts.defaults.operator_namespace}"
    message = (
        "The model is idle and has no frontends, and no pod of the gateway is ready to hold its next request. See the "
        f"pods with the label {pods}."
    )
    return Condition("False", Reason.GATEWAY_UNAVAILABLE, message)


def ready(facts: Facts, prerequisites: Mapping[ConditionType, Condition]) -> Condition:
    """A condition that is not Ready repeats the first of the `prerequisites` that is not True. A model that is meant to
    have no replicas is Ready without any: a suspended one, and an idle one if a request would start it."""
    if not facts.replicas:
        needed = [ConditionType.ACCEPTED, ConditionType.MODEL_CACHED] if facts.is_idle else []
        if facts.is_idle and not facts.ready_frontends:
            needed.append(ConditionType.FRONTEND_READY)
        missing = (prerequisites[type] for type in needed if prerequisites[type].status == "False")
        return next(missing, suspended(facts)._replace(status="True"))
    # The Service may be another owner's.
    if facts.routable and facts.ready_frontends and Ref("Service", facts.model.name) not in facts.conflicts:
        message = f"{facts.routable} of {len(facts.replicas)} replicas are routable at {facts.url}."
        return Condition("True", Reason.READY, message)
    failing = {type: condition for type, condition in prerequisites.items() if condition.status != "True"}
    if failing:
        first = next(iter(failing.values()))
        if first.reason is Reason.WAITING_FOR_FETCH:
            # It says why the pod of the fetch has not started.
            first = failing.get(ConditionType.SCHEDULED, first)
        return Condition("False", first.reason, first.message)
    if not facts.routing.any_report:
        message = "No frontend reports to the operator which replicas it reaches. Check the NetworkPolicies."
        return Condition("Unknown", Reason.UNREACHABLE, message)
    message = "The replicas are ready, but no frontend has reached one yet."
    return Condition("False", Reason.NO_REPLICA_ROUTABLE, message)
