"""RouteAccepted: whether the Gateways that the model names lead requests to it."""

from __future__ import annotations

from minisgl_operator.api.conditions import Reason
from minisgl_operator.api.text import quote
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.route import acceptance_of
from minisgl_operator.render.route import route_ref
from minisgl_operator.status.condition import Condition, shortened


def route_accepted(facts: Facts) -> Condition | None:
    """None for a model without a route."""
    if not facts.parents:
        if facts.model.spec.route is None or not facts.model.spec.route.enabled:
            return None
        message = "spec.route names no Gateway, and the operator has no default: set spec.route.parentRefs."
        return Condition("False", Reason.NO_GATEWAY_NAMED, message)
    if facts.observed.routes_served is False:
        message = (
            "The cluster does not serve HTTPRoute of gateway.networking.k8s.io/v1: install the Gateway API, or set "
            "spec.route.enabled to false."
        )
        return Condition("False", Reason.GATEWAY_API_MISSING, message)
    route = facts.observed.children.get(route_ref(facts.model.name))
    if route is None:
        message = "The HTTPRoute does not exist yet. If it does not come, see Accepted and the operator's log."
        return Condition("Unknown", Reason.WAITING_FOR_GATEWAY, message)
    found = acceptance_of(route, facts.parents, facts.model.metadata.namespace)
    if found.refusals:
        first = found.refusals[0]
        message = (
            f"Gateway {first.gateway} does not lead to the model ({first.reason}): {quote(first.message)}. Correct "
            "spec.route, or the listeners of the Gateway."
        )
        return Condition("False", Reason.ROUTE_REFUSED, message)
    if found.silent:
        message = (
            f"Gateways that have not said whether they accept the route: {shortened(list(found.silent))}. See whether "
            "they exist, and whether their controller runs."
        )
        return Condition("Unknown", Reason.WAITING_FOR_GATEWAY, message)
    return Condition("True", Reason.ACCEPTED, "All Gateways of the route lead to the model.")
