"""The replicas that frontends can send requests to, as the frontends report them."""

from __future__ import annotations

from minisgl_operator.api.objects import has_condition, is_deleting
from minisgl_operator.facts.observed import Observed, Report
from minisgl_operator.facts.pods import component
from minisgl_operator.render import names


class Routing:
    """Routing of all frontends together. Draining ones, and those without a routable replica, do not count."""

    def __init__(self, observed: Observed) -> None:
        frontends = [pod for pod in observed.pods if component(pod) == names.FRONTEND and not is_deleting(pod)]
        reports = [report for pod in frontends if (report := observed.report(pod)) is not None]
        routing = [report for report in reports if not report.get("draining") and _replicas_with(report, "routable")]
        self._routable = [_replicas_with(report, "routable") for report in routing]
        self._usable = [_replicas_with(report, "routable", "waits_for_files") for report in routing]
        self.any_report = bool(reports)
        self.any_frontend_ready = any(has_condition(pod, "Ready") for pod in frontends)

    def from_any(self, replica: str, revision: str | None) -> bool | None:
        """True if at least one frontend can send requests to the replica; None when no frontend reports."""
        return any((replica, revision) in routable for routable in self._routable) if self.any_report else None

    def from_all(self, replica: str, revision: str | None) -> bool | None:
        """True if every frontend that can answer requests can send them to the replica; None when none reports."""
        routable = bool(self._routable) and all((replica, revision) in each for each in self._routable)
        return routable if self.any_report else None

    def usable_from_all(self, replica: str, revision: str | None) -> bool:
        """True if every frontend that can answer requests can send them to the replica, or could if the replica's
        tokenizer files were in use. A frontend uses one set of files at a time: that of most replicas."""
        return bool(self._usable) and all((replica, revision) in usable for usable in self._usable)


def _replicas_with(report: Report, *flags: str) -> frozenset[tuple[str, str]]:
    """Names and revisions of the replicas for which a frontend reports any of the flags."""
    return frozenset(
        (str(entry.get("replica")), str(entry.get("revision")))
        for entry in report.get("replicas") or ()
        if any(entry.get(flag) for flag in flags)
    )
