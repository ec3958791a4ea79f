"""The load of a model, as its frontends and the cluster's gateway report it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from minisgl_operator.api.objects import Manifest
from minisgl_operator.facts.autoscaling import Load, ReplicaLoad
from minisgl_operator.facts.gateway import Demand
from minisgl_operator.facts.observed import Observed, Report
from minisgl_operator.facts.pods import component, containers_started
from minisgl_operator.render import names


def load_of(observed: Observed, demand: Demand, left_out: Collection[str] = ()) -> Load:
    """The load of all frontends together, and the `demand` in the gateway. A frontend that stops still has requests, so
    it counts; one that has not started or has ended does not, nor do the pods in `left_out`."""
    frontends = [
        pod
        for pod in observed.pods
        if component(pod) == names.FRONTEND
        and pod["metadata"]["name"] not in left_out
        and _may_have_requests(pod, observed)
    ]
    reports = [report for pod in frontends if (report := observed.report(pod)) is not None]
    complete = bool(reports) and len(reports) == len(frontends) and demand.complete
    return Load(
        held=demand.held + sum(_count(report.get("held")) for report in reports),
        replicas=_replica_loads(reports),
        idle_seconds=_idle_seconds(reports, demand.idle_seconds) if complete else None,
        complete=complete,
    )


def _may_have_requests(pod: Manifest, observed: Observed) -> bool:
    if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return False
    return containers_started(pod) or observed.report(pod) is not None


def _idle_seconds(reports: Iterable[Report], of_gateway: float | None) -> float | None:
    """The shortest time without a request of any frontend and of the gateway, which need not have had one; None if that
    of a frontend is unknown."""
    seconds = [_number(report.get("idle_seconds")) for report in reports]
    known = [each for each in seconds if each is not None]
    if not known or len(known) != len(seconds):
        return None
    return min(known) if of_gateway is None else min(*known, of_gateway)


def _replica_loads(reports: Iterable[Report]) -> tuple[ReplicaLoad, ...]:
    """Loads of the replicas that any frontend sends requests to. Each frontend repeats what the engine said last, so
    the highest figure counts."""
    found: dict[tuple[str, str], ReplicaLoad] = {}
    for report in reports:
        entries = report.get("replicas")
        for entry in entries if isinstance(entries, list) else ():
            if not isinstance(entry, dict) or not entry.get("routable"):
                continue
            key = (str(entry.get("replica")), str(entry.get("revision")))
            load = ReplicaLoad(
                _count(entry.get("running")) + _count(entry.get("waiting")),
                _number(entry.get("queue_ms")),
                _number(entry.get("kv_usage")),
            )
            found[key] = _higher(found[key], load) if key in found else load
    return tuple(found.values())


def _higher(one: ReplicaLoad, other: ReplicaLoad) -> ReplicaLoad:
    return ReplicaLoad(
        max(one.requests, other.requests),
        max((each for each in (one.queue_ms, other.queue_ms) if each is not None), default=None),
        max((each for each in (one.kv_usage, other.kv_usage) if each is not None), default=None),
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _number(value: object) -> float | None:
    valid = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
    return float(value) if valid and isinstance(value, int | float) else None
