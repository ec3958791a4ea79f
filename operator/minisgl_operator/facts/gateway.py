"""What the pods of the cluster's gateway report about one model.

A request that a gateway holds has reached no frontend, so only the gateway knows of it. One that it has passed on is in
the reports of the frontends as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from minisgl.wire.gateway import ModelDemand
from minisgl_operator.facts.observed import GatewayPod
from minisgl_operator.facts.silent_frontends import LEFT_OUT_AFTER


@dataclass(frozen=True)
class Demand:
    """Requests of one model in all gateways.

    held: those that wait for a frontend.
    idle_seconds: time since the last one; None if there was none.
    complete: every gateway that may have requests reports.
    """

    held: int = 0
    idle_seconds: float | None = None
    complete: bool = True


def demand_of(pods: Iterable[GatewayPod], model: str, now: datetime) -> Demand:
    """Requests of the model `NAMESPACE/NAME`. A gateway that has been silent for long no longer counts, as a silent
    frontend does not."""
    pods = tuple(pods)
    known = [pod.status.models.get(model, ModelDemand()) for pod in pods if pod.status is not None]
    seconds = [each.idle_seconds for each in known if each.idle_seconds is not None]
    unknown = (pod.silent_since or now for pod in pods if pod.status is None)
    return Demand(
        held=sum(max(each.held, 0) for each in known),
        idle_seconds=min(seconds, default=None),
        complete=all(now - since >= LEFT_OUT_AFTER for since in unknown),
    )


def addresses(pods: Iterable[GatewayPod]) -> tuple[str, ...]:
    """Addresses to which new requests may be sent, in a stable order."""
    return tuple(sorted(pod.address for pod in pods if pod.ready))
