"""What pods report about the tokens by which the pods of one model know one another.

Nobody but the pods can read the tokens. Each reports a fingerprint of those that it knows: whether all know a common
one, and how old it is, follows from these reports alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Final

from minisgl_operator.facts.observed import Observed
from minisgl_operator.facts.pods import component, serves_status
from minisgl_operator.render import names
from minisgl_operator.render.peer_secret import SLOTS

_ROTATION: Final = timedelta(days=30)
"""Each token is replaced after two such times."""


@dataclass(frozen=True)
class PeerSecret:
    """`reports`: slot → fingerprint, of each pod that has reported. `is_complete`: no running pod has yet to report.
    `others_mount`: the pods without a report mount the tokens."""

    reports: tuple[Mapping[str, str], ...]
    is_complete: bool
    others_mount: bool

    @cached_property
    def common(self) -> dict[str, str]:
        """Slot → fingerprint of the tokens that all pods know."""
        if not self.reports:
            return {}
        first, *others = self.reports
        return {slot: value for slot, value in first.items() if all(each.get(slot) == value for each in others)}

    @property
    def required(self) -> bool:
        """True if engines shall refuse others."""
        return bool(self.common) and self.others_mount

    @property
    def is_unknown(self) -> bool:
        """True if no pod knows a token, so that one must be created if there is none."""
        return self.is_complete and not any(self.reports)

    def slot_to_replace(self, now: datetime) -> str | None:
        """The slot whose token is due to be replaced; None if none is, or if pods might know no other one."""
        periods = [_period(value) for report in self.reports for value in report.values()]
        if not self.common or not self.is_complete or max(periods) >= period_at(now):
            return None
        newest = max(self.common, key=lambda slot: _period(self.common[slot]))
        return next(slot for slot in SLOTS if slot != newest)


def peer_secret_of(observed: Observed) -> PeerSecret:
    pods = [
        pod
        for pod in observed.pods
        if component(pod) in (names.ENGINE, names.FRONTEND)
        and pod["status"].get("phase") not in ("Failed", "Succeeded")
    ]
    reports = {pod["metadata"]["uid"]: observed.report(pod) for pod in pods}
    silent = [pod for pod in pods if reports[pod["metadata"]["uid"]] is None]
    return PeerSecret(
        tuple(_known(report) for report in reports.values() if report is not None),
        is_complete=all(pod["metadata"]["uid"] in observed.reports for pod in pods if serves_status(pod)),
        others_mount=all(_mounts_tokens(pod) for pod in silent),
    )


def period_at(now: datetime) -> int:
    """Number of the time in which a token is written: its public part."""
    return int(now.timestamp() // _ROTATION.total_seconds())


def _known(report: Mapping[str, object]) -> dict[str, str]:
    known = report.get("peer_secret")
    if not isinstance(known, dict):
        return {}
    return {slot: value for slot in SLOTS if isinstance(value := known.get(slot), str)}


def _mounts_tokens(pod: Mapping[str, object]) -> bool:
    spec = pod.get("spec")
    volumes = spec.get("volumes") if isinstance(spec, dict) else None
    return any(volume["name"] == names.PEERS_VOLUME for volume in volumes or ())


def _period(fingerprint: str) -> int:
    """0 for a text that is no fingerprint of a token of ours."""
    number = fingerprint.partition(".")[0]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 16 else 0
