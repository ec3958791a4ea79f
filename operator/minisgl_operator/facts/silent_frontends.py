"""Frontends that run and do not answer the operator.

Nobody knows whether such a frontend has requests, so it keeps replicas from being removed, but not for ever: after
`LEFT_OUT_AFTER` the others decide. What runs in the engines is known from the others in any case, as each reports the
load of every engine. Only requests that the silent one holds are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from minisgl_operator.api.objects import Manifest, parse_time
from minisgl_operator.facts.observed import Observed, Unreachable
from minisgl_operator.facts.pods import component, serves_status
from minisgl_operator.render import names

LEFT_OUT_AFTER: Final = timedelta(minutes=10)


@dataclass(frozen=True)
class SilentFrontend:
    """`since`: time of the first probe without an answer, as the last status has it."""

    pod: str
    since: datetime

    def is_left_out(self, now: datetime) -> bool:
        return now - self.since >= LEFT_OUT_AFTER


def silent_frontends(observed: Observed, now: datetime) -> tuple[SilentFrontend, ...]:
    """In the order of their names. A pod that was not probed yet is not silent."""
    last = (observed.model_object.get("status") or {}).get("frontend") or {}
    since = {each["pod"]: parse_time(each["since"]) for each in last.get("silent") or ()}
    found = sorted(str(pod["metadata"]["name"]) for pod in observed.pods if _is_silent(pod, observed))
    return tuple(SilentFrontend(name, min(since.get(name, now), now)) for name in found)


def _is_silent(pod: Manifest, observed: Observed) -> bool:
    unreachable = isinstance(observed.reports.get(pod["metadata"]["uid"]), Unreachable)
    return unreachable and component(pod) == names.FRONTEND and serves_status(pod)


def next_left_out(silent: Iterable[SilentFrontend], now: datetime) -> datetime | None:
    """Time at which the next one is left out; None if none will be."""
    return min((each.since + LEFT_OUT_AFTER for each in silent if not each.is_left_out(now)), default=None)
