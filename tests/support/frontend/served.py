"""`minisgl serve` as a user starts it, for tests that send requests and signals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

RUNTIME = Path(__file__).parents[3] / "runtime"
ONE_START: Final = ("--max-restarts", "0")
"""Flags of a server whose processes shall not die. It keeps no standbys."""
_STANDBY: Final = "minisgl-standby"
"""Title of a standby, of which the kernel keeps 15 bytes. One that still imports has another."""


class Served:
    """A started server; its log goes to a file as JSON lines."""

    def __init__(self, model: Path, temporary: Path, *flags: str, program: str = "minisgl") -> None:
        """`program` is the module with the command `serve`."""
        self.log = temporary / "serve.log"
        self.temporary = temporary
        command = [sys.executable, "-m", program, "serve", str(model), "--port", "0", "--num-pages", "512"]
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                [*command, "--log-format", "json", *flags],
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(RUNTIME), *sys.path]),
                    "TMPDIR": str(temporary),
                    "OMP_NUM_THREADS": "1",
                },
            )
        self.url = ""

    def wait_until_ready(self, seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while not (started := [line for line in self.lines() if line["message"].startswith("serving ")]):
            assert self.popen.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)
        self.url = started[0]["message"].partition(" at ")[2].partition("/v1")[0]
        eventually(lambda: self.status("/ready") == 200)

    def lines(self) -> list[dict[str, Any]]:
        text = self.log.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.startswith("{")]

    def status(self, path: str) -> int:
        """Return the HTTP status of a GET, 0 without a response."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def metric(self, name: str) -> float:
        """Return the sum of the metric over all its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            return metric_sum(answer.read().decode(), name)

    def children(self) -> dict[str, int]:
        return launched_by(self.popen.pid)

    def standing_by(self) -> set[str]:
        """Names of standbys that can take over at once."""
        return standing_by(self.popen.pid)

    def leftovers(self) -> list[Path]:
        """Return the remaining socket directories."""
        return list(self.temporary.glob("minisgl-*"))

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


def launched_by(launcher: int) -> dict[str, int]:
    """Return process ids of the children of a launcher by name, from /proc. Forks have the command line of their
    standby, but a title of their own."""
    return {name: pid for name, pid, _ in _children_of(launcher)}


def standing_by(launcher: int) -> set[str]:
    """Return names of the standbys of a launcher that have imported everything."""
    return {name for name, _, title in _children_of(launcher) if title == _STANDBY}


def is_fork(process: int, standby: int) -> bool:
    """Whether a process is a fork of a standby, whose command line it has."""
    first, second = (Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (process, standby))
    return process != standby and first == second


def _children_of(launcher: int) -> Iterator[tuple[str, int, str]]:
    """Name, process id and title of each child."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                title = (entry / "comm").read_text().strip()
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if b"minisgl.launcher.child" in words:
                arguments = words[words.index(b"minisgl.launcher.child") + 1 :]
                # Other programs may have the module's name among their arguments.
                if len(arguments) > 2 and arguments[2] == str(launcher).encode() and parent == str(launcher):
                    yield _name(arguments[0].decode(), title), int(entry.name), title


def _name(name: str, title: str) -> str:
    """Name of a child from that in its command line and its title."""
    if not name.startswith("standby-") or title == _STANDBY or not title.startswith("minisgl-"):
        return name
    forked = title.removeprefix("minisgl-")
    return "frontend" if "frontend".startswith(forked) else forked


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition, asking at intervals that grow: what is waited for needs the processor itself."""
    deadline, interval = time.monotonic() + seconds, 0.01
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(interval)
        interval = min(1.2 * interval, 0.05)


def metric_sum(page: str, name: str) -> float:
    """Return the sum of the metric `name` over all its labels in a page of /metrics."""
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
