"""Reasons of failures, as /status reports them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from minisgl.launcher import control
from minisgl.wire.status import FailureReason

RETRYABLE_CODES: Final = frozenset(
    {"rendezvous_failed", "follower_stuck", "plan_gap", "ranks_diverged", "no_process_id", "cannot_fork"}
)
"""Codes of start errors after which another start may succeed. With any other code it would fail again."""

_REASONS: Final[dict[str, FailureReason]] = {
    "tensor_does_not_divide": "TensorDoesNotDivideHeads",
    "out_of_memory": "OutOfMemory",
    "kv_pool_too_small": "OutOfMemory",
    "memory_imbalance": "OutOfMemory",
    **dict.fromkeys(("too_few_devices", "no_cuda", "no_device", "backend_unavailable", *RETRYABLE_CODES), "Error"),
}

_OUT_OF_MEMORY: Final = ("OutOfMemoryError", "CUDA out of memory", "can't allocate memory", "MemoryError")

_OOM_COUNTERS: Final = (
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
)


def reason_for_code(code: str) -> FailureReason:
    """Reason for the code of a start error. An unknown code is a property of the checkpoint and its options."""
    return _REASONS.get(code, "InvalidModel")


def failure_reason(
    exit_code: int, start_error: control.StartError | None, last_words: str, *, oom_killed: bool
) -> FailureReason:
    """Reason for the exit of a process. `oom_killed`: the kernel has killed processes of this container for lack of
    memory since this one started."""
    if start_error is not None:
        return reason_for_code(start_error.code)
    if exit_code == -9:
        return "OutOfMemory" if oom_killed else "Killed"
    if any(words in last_words for words in _OUT_OF_MEMORY):
        return "OutOfMemory"
    return "Killed" if exit_code == -15 else "Error"


def count_oom_kills(counters: Sequence[Path] = _OOM_COUNTERS) -> int:
    """Count the processes of this container that the kernel has killed for lack of memory; 0 where no counter is
    readable."""
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
