"""A rank of another pod, seen from the launcher that leads."""

from __future__ import annotations

import selectors
import signal
from collections.abc import Callable

from minisgl.launcher import control
from minisgl.launcher.process import ProcessSpec
from minisgl.replica.link import RankEnded, RankProgress, RankReady


class RemoteRank:
    """Implements `process.Child`: what a follower's launcher reports makes its state, a signal becomes a request."""

    def __init__(self, rank: int, pod: str, end: Callable[[], None]) -> None:
        """`end` asks its pod to kill its ranks."""
        self.spec = ProcessSpec(name=f"rank{rank}", target="", config=None)
        self.is_ready = False
        self.progress = "starting"
        self.refusal: control.Refused | None = None
        self.told_to_end = False
        self.alive = True
        self.exit_code: int | None = None
        self.reason = ""
        self._message = ""
        self._pod = pod
        self._end = end

    @property
    def pid(self) -> int:
        """Not known here; that of its own pod would say nothing."""
        return 0

    def take(self, report: RankProgress | RankReady | RankEnded) -> None:
        match report:
            case RankProgress():
                self.progress = report.text
            case RankReady():
                self.is_ready = True
            case RankEnded():
                self.alive, self.exit_code, self.reason = False, report.exit_code, report.reason
                self.told_to_end = report.told_to_end
                self._message = report.message
                if report.code:
                    self.refusal = control.Refused(report.code, report.message)

    def lose(self, why: str) -> None:
        """Its pod is gone, and with it the process, if not now then before the pod joins again."""
        if self.alive:
            self.alive, self.reason, self._message = False, "Error", f"{self.spec.name}: {why}"

    def begin(self, spec: ProcessSpec) -> None:
        raise AssertionError("standbys are kept by the pod's own launcher")

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Its pod's link is watched."""

    def send(self, message: control.ToChild) -> None:
        """Ranks of other pods are told nothing but to end."""

    def signal(self, number: signal.Signals) -> None:
        if self.alive:
            self._end()

    def close(self) -> None:
        """Nothing of it is on this machine."""

    def death(self) -> str:
        return f"{self._message} [pod {self._pod}]"
