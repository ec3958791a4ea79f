"""`minisgl engine` as in pods, but as processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from minisgl.wire.sockets import url_host
from support import line_coverage
from support.frontend.served import RUNTIME, eventually, launched_by
from support.launcher.ports import free_port, free_ports

PORTS = ("control", "scheduler", "link", "rendezvous", "plans")
# Rank n receives its plans on the plans port plus n.
_MOST_RANKS = 8
_STOP_SECONDS = 20.0


class EnginePod:
    """One launcher. Its state directory and its log outlive restarts, as those of a container."""

    def __init__(
        self,
        folder: Path,
        index: int,
        flags: tuple[str, ...],
        ports: dict[str, int],
        program: str,
        host: str,
        replica: str,
    ) -> None:
        self.name = f"{replica}-{index}"
        self.url = f"http://{url_host(host)}:{ports['control']}"
        self.log = folder / f"{self.name}.log"
        self.log.touch()
        self._folder = folder
        self._command = [
            *(sys.executable, "-m", program, "engine", *flags),
            *("--replica", replica, "--leader", host, "--device", "cpu", "--num-pages", "512"),
            *("--pod-index", str(index), "--pod-name", self.name, "--node-name", f"node-{index}"),
            *("--state-directory", str(folder / self.name), "--log-format", "json"),
            *(word for name in PORTS for word in (f"--{name}-port", str(ports[name]))),
        ]
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            self.popen = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(RUNTIME), *sys.path]),
                    "TMPDIR": str(self._folder),
                    "HOME": str(self._folder),
                    "OMP_NUM_THREADS": "1",
                    # Only a launcher of pods runs most of its code.
                    **line_coverage.environment_of_child(),
                },
            )

    def get(self, path: str, method: str = "GET") -> tuple[int, bytes]:
        """Return HTTP status and body; status 0 when the port does not answer."""
        try:
            request = urllib.request.Request(self.url + path, method=method)
            with urllib.request.urlopen(request, timeout=10) as answer:
                return int(answer.status), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def status(self) -> dict[str, Any]:
        code, body = self.get("/status")
        return json.loads(body) if code == 200 else {"phase": ""}

    def wait_for(self, seconds: float = 240.0, **fields: Any) -> dict[str, Any]:
        """Wait until the status has these values; returns it."""
        deadline, interval = time.monotonic() + seconds, 0.02
        while True:
            status = self.status()
            if all(status.get(name) == value for name, value in fields.items()):
                return status
            assert self.popen.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"{fields} did not come, but {status}\n{self.log.read_text()}"
            time.sleep(interval)
            interval = min(1.2 * interval, 0.1)

    def wait_for_words(self, words: str, times: int = 1) -> None:
        eventually(lambda: self.log.read_text().count(words) >= times)

    def children(self) -> dict[str, int]:
        return launched_by(self.popen.pid)

    def kill_rank(self, rank: int) -> float:
        """Kill the process of a rank; returns the time on the monotonic clock."""
        os.kill(self.children()[f"rank{rank}"], signal.SIGKILL)
        return time.monotonic()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def close(self) -> None:
        """Stop the launcher; one that does not stop in time is killed."""
        self.popen.terminate()
        try:
            self.popen.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()


class Pods:
    """Pods of one replica, with their own ports; pods are numbered from 0."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *flags: str,
        program: str = "minisgl",
        host: str = "127.0.0.1",
        replica: str = "m-r0",
    ) -> None:
        """`program` is the module with the command `engine`; `host` the address of all pods; `replica` their name."""
        first = free_ports(len(PORTS) + _MOST_RANKS)
        self.ports = {name: first + offset for offset, name in enumerate(PORTS)}
        self.all: list[EnginePod] = []
        self._folder = folder
        self._flags = (str(model), *flags)
        self._program = program
        self._host = host
        self._replica = replica

    def add(self, *flags: str, index: int | None = None) -> EnginePod:
        index = len(self.all) if index is None else index
        ports = self.ports if index == 0 else {**self.ports, "control": free_port()}
        pod = EnginePod(self._folder, index, (*self._flags, *flags), ports, self._program, self._host, self._replica)
        self.all.append(pod)
        return pod

    @property
    def scheduler(self) -> str:
        return f"tcp://{url_host(self._host)}:{self.ports['scheduler']}"

    def close(self) -> None:
        for pod in self.all:
            pod.close()
