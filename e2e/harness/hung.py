"""Processes that no signal ends, as those that wait for a device: run as `python -m harness.hung PID`.

A process that is traced with ptrace(2) stays a zombie until its tracer waits for it, and the init of its PID namespace
cannot end before it. The tracer here never waits, so the container lives until the tracer is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from cluster.places import wait

_PTRACE_SEIZE: Final = 0x4206


@contextmanager
def hung(pod: dict[str, Any]) -> Iterator[None]:
    """Let a process of the pod's first container hang: neither the kubelet nor anyone else can end the container."""
    container = pod["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
    pid = _child_of_init(container)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-m", "harness.hung", str(pid)], env=environment) as tracer:
        try:
            wait(f"a tracer of process {pid}", lambda: _tracer_of(pid) == tracer.pid, 60)
            yield
        finally:
            tracer.kill()


def _child_of_init(container: str) -> int:
    """PID on the host of a process of a container that is not its init."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if container in (process / "cgroup").read_text() and _field(process, "NSpid").split()[-1] != "1":
                found.append(int(process.name))
        except OSError:
            continue
    assert found, f"container {container} has no process but its init"
    return min(found)


def _tracer_of(pid: int) -> int:
    return int(_field(Path("/proc") / str(pid), "TracerPid"))


def _field(process: Path, name: str) -> str:
    lines = (process / "status").read_text().splitlines()
    return next(line.partition(":")[2] for line in lines if line.startswith(f"{name}:"))


def _trace(pid: int) -> None:
    """Trace a process until this one is killed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(_PTRACE_SEIZE, pid, None, None):
        raise OSError(ctypes.get_errno(), f"ptrace of process {pid}")
    signal.pause()


if __name__ == "__main__":
    _trace(int(sys.argv[1]))
