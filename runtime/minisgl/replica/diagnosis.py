"""Diagnosis of a failed epoch, from its dead processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, cast

from minisgl.launcher.process import Child
from minisgl.replica.failures import failure_reason
from minisgl.replica.remote_rank import RemoteRank
from minisgl.wire.status import Failure, FailureReason

_MESSAGE_CHARACTERS: Final = 4000
"""Longest message: the status of the Kubernetes object carries it too."""


def rank_of(process: Child) -> int:
    return int(process.name.removeprefix("rank"))


def diagnose(
    processes: Sequence[Child],
    pod_of: Callable[[int], str],
    *,
    oom_killed: bool,
    startup_timeout: float,
    seconds_ago: float,
) -> Failure:
    """Return the failure of an epoch. `processes` are all of its ranks, dead; `pod_of` returns the pod of a rank. The
    failure was noticed `seconds_ago`."""
    first = root_cause(processes)
    hung = next((process for process in processes if process.stall), None)
    reason: FailureReason
    if first is None and hung is not None:
        first, reason, message = hung, "Error", f"{hung.label}: {hung.stall}"
    elif first is not None:
        message = first.describe_exit()
        if isinstance(first, RemoteRank):
            reason = cast(FailureReason, first.reason)
        else:
            reason = failure_reason(first.exit_code or 0, first.start_error, message, oom_killed=oom_killed)
    else:
        first = next((process for process in processes if not process.is_ready), processes[0])
        reason = "StartupTimeout"
        message = (
            f"{first.name} was not ready after {startup_timeout:g} s, its progress was: {first.progress}. "
            "Raise --startup-timeout to allow more time"
        )
    return Failure(
        at=timestamp(seconds_ago),
        rank=rank_of(first),
        pod=pod_of(rank_of(first)),
        # Our own SIGKILL explains nothing.
        exit_code=None if first.terminated_by_us else first.exit_code,
        reason=reason,
        message=shortened(message),
    )


def root_cause(processes: Sequence[Child]) -> Child | None:
    """The process whose exit caused the others'; None when the launcher has killed all of them. `processes` are in the
    order in which exits were noticed. A rank that waits for a dead one in a collective exits with an error of its own,
    which may be noticed first: a process that was killed by a signal comes before it."""
    own = [process for process in processes if not process.terminated_by_us]
    return min(own, key=lambda process: 0 if (process.exit_code or 0) < 0 else 1, default=None)


def timestamp(seconds_ago: float = 0.0) -> str:
    """Time in RFC 3339."""
    moment = datetime.now(UTC) - timedelta(seconds=seconds_ago)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def shortened(text: str) -> str:
    """Keep the beginning, which names the process, and the end, which has the exception."""
    if len(text) <= _MESSAGE_CHARACTERS:
        return text
    return f"{text[:1000]}\n  | …\n{text[-(_MESSAGE_CHARACTERS - 1010) :]}"
