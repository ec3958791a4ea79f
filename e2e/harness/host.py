"""State of the host that a cluster must not change: compared before it starts and after it has stopped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from cluster.layout import cgroup_hierarchies
from cluster.places import shell

# Counters and clocks of the kernel, which change at any time.
_VOLATILE: Final = (
    "fs.aio-nr",
    "fs.dentry-state",
    "fs.file-nr",
    "fs.inode",
    "fs.quota.",
    "kernel.ns_last_pid",
    "kernel.perf_",
    "kernel.pty.nr",
    "kernel.random",
    "net.netfilter.nf_conntrack_count",
)


def snapshot(mark: str) -> dict[str, set[str]]:
    """Instances by kind of resource. Processes, control groups and files are limited to those related to the path
    `mark`."""
    return {
        "processes": _processes(mark),
        "mounts": {line.split(" ", 1)[1] for line in Path("/proc/self/mountinfo").read_text().splitlines()},
        "links": set(shell("ip", "-o", "-br", "link").stdout.splitlines()),
        "addresses": set(shell("ip", "-o", "-br", "address").stdout.splitlines()),
        "routes": _routes(),
        "rules": {line for line in shell("nft", "list", "ruleset").stdout.splitlines() if "counter" not in line},
        "cgroups": {str(d) for h in cgroup_hierarchies() for d in h.glob("*") if Path(mark).name in d.name},
        "network namespaces": set(shell("ip", "netns", "list").stdout.splitlines()),
        "sysctls": _sysctls(),
        "files": {str(p) for p in (Path(mark), Path("/var/lib/kubelet"), Path("/var/lib/cni")) if p.exists()},
    }


def _processes(mark: str) -> set[str]:
    found = set()
    for process in Path("/proc").iterdir():
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if process.name.isdigit() and (mark in command or str((process / "cwd").readlink()).startswith(mark)):
                found.add(f"{process.name} {command}")
        except OSError:
            continue
    return found


def _routes() -> set[str]:
    """Routes without the remaining lifetime of those that a router has advertised."""
    text = shell("ip", "route", "show", "table", "all").stdout
    return {re.sub(r" expires \d+sec", "", line) for line in text.splitlines()}


def _sysctls() -> set[str]:
    lines = shell("sysctl", "--all", "--ignore", check=False).stdout.splitlines()
    return {line for line in lines if not line.startswith(_VOLATILE)}
