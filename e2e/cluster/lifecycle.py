"""Start and stop the whole cluster."""

from __future__ import annotations

import contextlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from cluster import control_plane, images, node, system, tools
from cluster.layout import CGROUP, STATE
from cluster.places import CONTROL, HOST, kill, pid_of, proc, remove_cgroups

NODES: Final = 2


def up(count: int = NODES) -> None:
    """Build and start everything that is missing, also after components were stopped or killed."""
    system.require()
    for each in tools.ALL:
        tools.directory(each)
    STATE.mkdir(mode=0o755, parents=True, exist_ok=True)
    control_plane.up()
    if count:
        images.pause_archive()
    with ThreadPoolExecutor() as pool:
        list(pool.map(node.up, range(count)))
    control_plane.wait_until_usable()


def down() -> None:
    """Kill the cluster with all its processes, mounts, links and rules; then remove its files and control groups."""
    kill(CONTROL)
    remove_cgroups(CGROUP)
    shutil.rmtree(STATE, ignore_errors=True)
    # This directory is a mount point. Removing it would remove the mounts of other running clusters.
    if not any(STATE.parent.glob("*-cluster")):
        with contextlib.suppress(OSError):
            os.rmdir("/var/lib/kubelet")


def status() -> list[str]:
    """One line per component: place, name, PID in the place, resident memory."""
    lines = []
    for place in (HOST, CONTROL, *sorted(p.name for p in STATE.glob("node*"))):
        for note in sorted((STATE / place).glob("*.pid")):
            pid = pid_of(note.stem, place)
            memory = f"{_resident_mib(proc(place) / str(pid)):5} MiB" if pid else "does not run"
            lines.append(f"{place or 'host':8} {note.stem:28} {pid or '-':>8} {memory}")
    return lines


def is_up() -> bool:
    return all(pid_of(component) for component in tools.CONTROL_PLANE)


def _resident_mib(process: Path) -> int:
    for line in (process / "status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) // 1024
    return 0
