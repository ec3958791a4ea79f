"""A rank of a member pod, seen from the leader."""

from __future__ import annotations

import signal
from collections.abc import Callable

from minisgl.launcher import control
from minisgl.replica.messages import RankEnded, RankProgress, RankReady


class RemoteRank:
    """Implements `process.Child`: reports of the member pod make its state, any signal has the pod kill its ranks. The
    pod's launcher, which gets the heartbeats, reports a stall."""

    drains = False

    def __init__(self, rank: int, pod: str, kill: Callable[[], None]) -> None:
        """`kill` sends `KillRanks` to the pod."""
        self.name = f"rank{rank}"
        self.label = f"{self.name} [pod {pod}]"
        self.is_ready = False
        self.progress = "starting"
        self.start_error: control.StartError | None = None
        self.terminated_by_us = False
        self.heartbeat: control.Heartbeat | None = None
        self.stall = ""
        self.alive = True
        self.exit_code: int | None = None
        self.reason = ""
        self._message = ""
        self._pod = pod
        self._kill = kill

    def update(self, report: RankProgress | RankReady | RankEnded) -> None:
        """Take over a report of the pod."""
        match report:
            case RankProgress(hangs=True):
                self.stall = report.text
            case RankProgress():
                self.progress = report.text
            case RankReady():
                self.is_ready = True
            case RankEnded():
                self.alive, self.exit_code, self.reason = False, report.exit_code, report.reason
                self.terminated_by_us = report.terminated_by_us
                self._message = report.message
                if report.code:
                    self.start_error = control.StartError(report.code, report.message)

    def disconnected(self, why: str) -> None:
        """Treat the process as dead: the pod is lost, or kills it before it joins again."""
        if self.alive:
            self.alive, self.reason, self._message = False, "Error", f"{self.name}: {why}"

    def send(self, message: control.ToChild) -> None:
        """Ignored: a member pod only starts and kills ranks."""

    def signal(self, number: signal.Signals) -> None:
        if self.alive:
            self._kill()

    def close(self) -> None:
        """No resources of this rank are on this machine."""

    def describe_exit(self) -> str:
        return f"{self._message} [pod {self._pod}]"
