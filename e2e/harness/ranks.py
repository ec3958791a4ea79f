"""Ranks of engine pods: kill one of them, and ask the launcher about them."""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.request import urlopen

from harness.namespace import Namespace

_KILL: Final = """
import os, pathlib, signal, sys, time

def is_rank(process):
    try:
        arguments = (process / "cmdline").read_bytes().decode().split("\\0")
        return "minisgl.launcher.child" in arguments and sys.argv[1] in (a.removeprefix("standby-") for a in arguments)
    except OSError:
        # It has just exited, like processes of other commands.
        return False

me = str(os.getpid())
pids = [p.name for p in pathlib.Path("/proc").iterdir() if p.name.isdigit() and p.name != me and is_rank(p)]
print(time.time())
# The oldest one: a standby that has taken over keeps its name, and the next standby starts after that.
os.kill(min(map(int, pids)), signal.SIGKILL)
"""


def kill_rank(namespace: Namespace, pod: str, rank: int) -> float:
    """Kill the process of a rank in its pod with SIGKILL; returns the time."""
    return float(namespace.kubectl("exec", pod, "--", "python3", "-c", _KILL, f"rank{rank}"))


def launcher_url(namespace: Namespace, pod: str) -> str:
    """URL on the host that is forwarded to the launcher of a pod, for as long as its container runs. To ask it costs
    hardly any CPU time, which ranks and standbys need."""
    return f"http://127.0.0.1:{namespace.port_from_pod(pod, '127.0.0.1:8080')}"


def launcher_status(url: str) -> dict[str, Any]:
    """`/status` of a launcher at the URL of `launcher_url`."""
    with urlopen(f"{url}/status", timeout=10) as answer:
        status: dict[str, Any] = json.load(answer)
    return status
