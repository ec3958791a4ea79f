"""From the dead processes of an epoch to the failure that they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, cast

from minisgl.launcher.process import Child, Process
from minisgl.replica.failures import Death, cause, reason_of
from minisgl.replica.remote_rank import RemoteRank
from minisgl.wire.status import Failure, FailureReason

_MESSAGE_CHARACTERS: Final = 4000
"""Of the last words, which the status of the Kubernetes object carries too."""


def rank_of(process: Child) -> int:
    return int(process.spec.name.removeprefix("rank"))


def examine(
    processes: Sequence[Child],
    pod_of: Callable[[int], str],
    *,
    oom_killed: bool,
    startup_timeout: float,
    seconds_ago: float,
) -> Failure:
    """`processes` are all ranks of one start, dead; `pod_of` names the pod of a rank. The failure was noticed
    `seconds_ago`."""
    deaths = [_death(process, pod_of(rank_of(process)), oom_killed) for process in processes]
    at = timestamp(seconds_ago)
    first = cause(deaths)
    if first is not None:
        return Failure(
            at=at,
            rank=first.rank,
            pod=first.pod,
            exit_code=first.exit_code,
            reason=first.reason,
            message=shortened(first.message),
        )
    late = next((process for process in processes if not process.is_ready), processes[0])
    return Failure(
        at=at,
        rank=rank_of(late),
        pod=pod_of(rank_of(late)),
        exit_code=None,
        reason="StartupTimeout",
        message=f"{late.spec.name} was not ready after {startup_timeout:g} s but at: {late.progress}. "
        "Allow more with --startup-timeout",
    )


def timestamp(seconds_ago: float = 0.0) -> str:
    """RFC 3339."""
    moment = datetime.now(UTC) - timedelta(seconds=seconds_ago)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def shortened(text: str) -> str:
    """Its beginning, which names the process, and its end, which holds the exception."""
    if len(text) <= _MESSAGE_CHARACTERS:
        return text
    return f"{text[:1000]}\n  | …\n{text[-(_MESSAGE_CHARACTERS - 1010) :]}"


def _death(process: Child, pod: str, oom_killed: bool) -> Death:
    message = process.death()
    if isinstance(process, RemoteRank):
        told, reason = process.told_to_end, cast(FailureReason, process.reason)
    else:
        assert isinstance(process, Process)
        told = process.told_to_end
        reason = reason_of(process.exit_code or 0, process.refusal, message, oom_killed=oom_killed)
    return Death(
        rank=rank_of(process), pod=pod, exit_code=process.exit_code, told_to_end=told, reason=reason, message=message
    )
