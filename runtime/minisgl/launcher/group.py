"""Processes that cannot go on without each other, seen from the launcher: started, killed and counted together."""

from __future__ import annotations

import selectors
import signal
from collections.abc import Callable, Sequence

import msgspec

from minisgl.launcher.process import Process, ProcessSpec
from minisgl.launcher.restarts import Seen


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a group is made of. All ranks of an engine are one group, every other process is its own."""

    name: str
    processes: Callable[[int], Sequence[ProcessSpec]]
    """For the n-th start, counted from 1. Between starts only configurations differ."""


class Group:
    """A group and its processes, whose callbacks are on `selector`."""

    def __init__(
        self, spec: GroupSpec, selector: selectors.BaseSelector, create: Callable[[ProcessSpec, bool], Process]
    ) -> None:
        """`create` starts a process; its second argument says whether as a standby."""
        self.spec = spec
        self.processes: list[Process] = []
        self._standbys: dict[str, Process] = {}
        self._selector = selector
        self._create = create

    @property
    def standbys(self) -> list[Process]:
        return list(self._standbys.values())

    def seen(self) -> Seen:
        alive = [process for process in self.processes if process.alive]
        return Seen(len(alive), len(self.processes) - len(alive), sum(process.is_ready for process in alive))

    def start(self, number: int) -> None:
        """The processes of the `number`-th start; those of the one before have ended. A standby takes the place of
        the process that it stands by for."""
        for process in self.processes:
            process.close()
        self.processes = []
        for spec in self.spec.processes(number):
            standby = self._standbys.pop(spec.name, None)
            if standby is not None and standby.alive:
                standby.begin(spec)
                self.processes.append(standby)
                continue
            if standby is not None:
                standby.close()
            self.processes.append(self._new(spec, standby=False))

    def stand_by(self) -> None:
        """Keep a standby for each process that has something to preload."""
        for process in self.processes:
            if process.spec.preload and process.spec.name not in self._standbys:
                self._standbys[process.spec.name] = self._new(process.spec, standby=True)

    def kill(self) -> None:
        for process in self.processes:
            if process.alive:
                process.signal(signal.SIGKILL)

    def deaths(self) -> str:
        """How those of its processes that are dead have ended."""
        return "\n".join(process.death() for process in self.processes if not process.alive)

    def unready(self) -> str:
        """Those that are not ready, and what they do."""
        return ", ".join(f"{p.spec.name} ({p.progress})" for p in self.processes if not p.is_ready)

    def _new(self, spec: ProcessSpec, *, standby: bool) -> Process:
        process = self._create(spec, standby)
        process.watch(self._selector)
        return process
