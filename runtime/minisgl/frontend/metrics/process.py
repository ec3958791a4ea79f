"""What this process uses of its machine: the metrics that Prometheus' client libraries report for every process."""

from __future__ import annotations

import os
import resource
from typing import Final

import msgspec

_MEMORY: Final = "/proc/self/statm"
_FILES: Final = "/proc/self/fd"


class ProcessUse(msgspec.Struct, frozen=True):
    started_at: float
    """Unix time, in seconds."""
    cpu_seconds: float
    resident_bytes: int
    open_files: int
    max_files: int


def read_process_use(started_at: float) -> ProcessUse | None:
    """Read the use of this process, which serves since `started_at`. None: the system has no /proc."""
    try:
        with open(_MEMORY, "rb", buffering=0) as file:
            resident_pages = int(file.read().split()[1])
        # The directory's size is its number of files since Linux 6.2. Listing thousands of them takes milliseconds.
        open_files = os.stat(_FILES).st_size or len(os.listdir(_FILES))
    except OSError:
        return None
    used = resource.getrusage(resource.RUSAGE_SELF)
    return ProcessUse(
        started_at=started_at,
        cpu_seconds=used.ru_utime + used.ru_stime,
        resident_bytes=resident_pages * resource.getpagesize(),
        open_files=open_files,
        max_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )
