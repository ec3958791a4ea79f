"""What a process died of, in the words of the status."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from minisgl.launcher import control
from minisgl.wire.status import FailureReason

CURABLE: Final = frozenset({"rendezvous_failed", "follower_stuck", "plan_gap", "ranks_diverged"})
"""Refusals after which another start may do better. Any other one would only be repeated."""

_REASONS: Final[dict[str, FailureReason]] = {
    "tensor_does_not_divide": "TensorDoesNotDivideHeads",
    "out_of_memory": "OutOfMemory",
    "kv_pool_too_small": "OutOfMemory",
    "memory_imbalance": "OutOfMemory",
    **dict.fromkeys(
        ("too_few_devices", "no_cuda", "no_device", "backend_unavailable", "no_process_id", *CURABLE), "Error"
    ),
}

_OUT_OF_MEMORY: Final = ("OutOfMemoryError", "CUDA out of memory", "can't allocate memory", "MemoryError")

_OOM_COUNTERS: Final = (
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
)


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """One process that has ended; those of a failure in the order in which they were noticed."""

    rank: int
    pod: str
    exit_code: int | None
    told_to_end: bool
    reason: FailureReason
    message: str


def reason_of_refusal(code: str) -> FailureReason:
    """What the launcher does not know about, it takes for a property of the checkpoint and its options."""
    return _REASONS.get(code, "InvalidModel")


def reason_of(exit_code: int, refusal: control.Refused | None, last_words: str, *, oom_killed: bool) -> FailureReason:
    """`oom_killed`: the kernel has killed processes of this container for their memory since this one began."""
    if refusal is not None:
        return reason_of_refusal(refusal.code)
    if exit_code == -9:
        return "OutOfMemory" if oom_killed else "Killed"
    if any(words in last_words for words in _OUT_OF_MEMORY):
        return "OutOfMemory"
    return "Killed" if exit_code == -15 else "Error"


def cause(deaths: Sequence[Death]) -> Death | None:
    """The one that the others followed: whoever waits for a dead rank in a collective ends with an error of its own,
    and may be noticed first. None when all were told to end."""
    own = [death for death in deaths if not death.told_to_end]
    return min(own, key=lambda death: 0 if (death.exit_code or 0) < 0 else 1, default=None)


def count_oom_kills(counters: Sequence[Path] = _OOM_COUNTERS) -> int:
    """How many processes of this container the kernel has killed for their memory; 0 where it does not say."""
    for path in counters:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdigit():
                return int(value)
    return 0
