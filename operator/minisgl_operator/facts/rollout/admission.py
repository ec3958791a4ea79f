"""Whether the API server would accept the pods of a revision, from dry runs of their creation. Pure.

The last result is in the status, as no object shows it. A rollout drains no replica that serves before it is known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal, get_args

from minisgl_operator.api.objects import parse_time
from minisgl_operator.api.text import quote
from minisgl_operator.facts.observed import DryRun

Result = Literal["Unchecked", "NoAnswer", "Accepted", "Refused", "Skipped"]
"""NoAnswer: the API server, or a webhook, failed. Skipped: the rollout goes on without an answer."""

_FIRST_PAUSE: Final = timedelta(seconds=10)
_LONGEST_PAUSE: Final = timedelta(minutes=5)
_MAX_FAILURES: Final = 5
"""Dry runs without an answer after which the check is skipped: 150 s with the pauses, and the time of the requests."""

# RBAC; a policy speaks of the pod.
_NO_PERMISSION: Final = re.compile(r"^pods is forbidden: User \".*\" cannot create resource")
_NO_DRY_RUN: Final = "does not support dry run"
_REFUSALS: Final = frozenset({400, 403, 422})


@dataclass(frozen=True)
class Admission:
    """The last result of a dry run for pods of `revision`.

    message: the server's, for a refusal or an error; for a check that was skipped, the reason.
    attempts: dry runs that were refused or had no answer.
    retry_at: time of the next one; None: now, or never again.
    """

    revision: str
    result: Result = "Unchecked"
    message: str = ""
    attempts: int = 0
    retry_at: datetime | None = None

    @property
    def allows(self) -> bool:
        """True if a replica that serves may be drained for this revision."""
        return self.result in ("Accepted", "Skipped")

    @property
    def refused(self) -> bool:
        return self.result == "Refused"

    def due(self, now: datetime) -> bool:
        """True if a dry run is due, where one is needed."""
        return not self.allows and (self.retry_at is None or self.retry_at <= now)


def admission_of(revision: str, rollout: Mapping[str, Any], answer: DryRun | None, now: datetime) -> Admission:
    """The state after `answer`, which is None without a new dry run. `rollout` is the last `status.rollout`."""
    before = _recorded(revision, rollout.get("admission") or {})
    if answer is None or answer.revision != revision:
        return before
    if _is_accepted(answer):
        return Admission(revision, "Accepted")
    if _NO_PERMISSION.search(answer.message):
        return Admission(revision, "Skipped", "the operator may not create pods, which a dry run needs")
    if _NO_DRY_RUN in answer.message:
        return Admission(revision, "Skipped", quote(answer.message))
    attempts = before.attempts + 1
    retry_at = now.replace(microsecond=0) + min(_FIRST_PAUSE * (1 << min(attempts - 1, 16)), _LONGEST_PAUSE)
    terminating = answer.reason == "NamespaceTerminating"
    if answer.status in _REFUSALS and not terminating:
        return Admission(revision, "Refused", quote(answer.message), attempts, retry_at)
    if before.refused:
        return Admission(revision, "Refused", before.message, attempts, retry_at)
    if attempts >= _MAX_FAILURES:
        return Admission(revision, "Skipped", f"the dry run failed {attempts} times: {quote(answer.message)}")
    return Admission(revision, "NoAnswer", quote(answer.message), attempts, retry_at)


def _is_accepted(answer: DryRun) -> bool:
    """True if nothing but a quota, which the drained replica makes room in, keeps the pod from being created. Quotas,
    and the name of the pod, which still exists, are checked after everything else."""
    exists = answer.status == 409 and answer.reason == "AlreadyExists"
    return 200 <= answer.status < 300 or exists or "exceeded quota" in answer.message


def _recorded(revision: str, recorded: Mapping[str, Any]) -> Admission:
    result = next((each for each in get_args(Result) if each == recorded.get("result")), None)
    if result is None or recorded.get("revision") != revision:
        return Admission(revision)
    return Admission(
        revision,
        result,
        str(recorded.get("message") or ""),
        int(recorded.get("attempts") or 0),
        parse_time(recorded["retryAt"]) if "retryAt" in recorded else None,
    )
