"""Ranks of engine pods: kill one of them, and ask the launcher about them."""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.request import urlopen

from harness.namespace import Namespace

_KILL: Final = """
import os, pathlib, signal, sys, time

def title(process):
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        # It has just exited, like processes of other commands.
        return ""

processes = (p for p in pathlib.Path("/proc").iterdir() if p.name.isdigit())
pids = [int(p.name) for p in processes if title(p) == "minisgl-" + sys.argv[1]]
print(time.time())
# A child of the rank has its title until it runs another program.
os.kill(min(pids), signal.SIGKILL)
"""


def kill_rank(namespace: Namespace, pod: str, rank: int) -> float:
    """Kill the process of a rank in its pod with SIGKILL; returns the time."""
    return float(namespace.kubectl("exec", pod, "--", "python3", "-c", _KILL, f"rank{rank}"))


def launcher_url(namespace: Namespace, pod: str) -> str:
    """URL on the host that is forwarded to the launcher of a pod, for as long as its container runs. To ask it costs
    hardly any CPU time, which ranks need."""
    return f"http://127.0.0.1:{namespace.port_from_pod(pod, '127.0.0.1:8080')}"


def launcher_status(url: str) -> dict[str, Any]:
    """`/status` of a launcher at the URL of `launcher_url`."""
    with urlopen(f"{url}/status", timeout=10) as answer:
        status: dict[str, Any] = json.load(answer)
    return status
