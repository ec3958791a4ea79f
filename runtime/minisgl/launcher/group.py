"""Processes that cannot go on without each other, seen from the launcher: started, killed and counted together."""

from __future__ import annotations

import selectors
import signal
from collections.abc import Callable, Sequence

import msgspec

from minisgl.launcher.process import Child, ProcessSpec
from minisgl.launcher.restarts import GroupObservation


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a group is made of. All ranks of an engine are one group, every other process is its own."""

    name: str
    processes: Callable[[int], Sequence[ProcessSpec]]
    """For the n-th start, counted from 1. Between starts only configurations differ."""
    can_start: Callable[[], bool] = lambda: True
    """Asked before each start."""
    cures: frozenset[str] | None = None
    """Codes of refusals after which another start may do better; None: all."""
    required: bool = False
    """Requests wait for this group while it restarts, and none can complete without it."""


class Group:
    """A group and its processes, whose callbacks are on `selector`."""

    def __init__(
        self, spec: GroupSpec, selector: selectors.BaseSelector, create: Callable[[ProcessSpec, bool], Child]
    ) -> None:
        """`create` starts a process; its second argument says whether as a standby."""
        self.spec = spec
        self.processes: list[Child] = []
        self._standbys: dict[str, Child] = {}
        self._selector = selector
        self._create = create

    @property
    def standbys(self) -> list[Child]:
        return list(self._standbys.values())

    def seen(self) -> GroupObservation:
        alive = [process for process in self.processes if process.alive]
        return GroupObservation(
            len(alive),
            len(self.processes) - len(alive),
            sum(process.is_ready for process in alive),
            can_start=self.spec.can_start(),
            incurable=any(map(self._refused_for_good, self.processes)),
        )

    def start(self, number: int) -> None:
        """The processes of the `number`-th start; those of the one before have ended. A standby takes the place of
        the process that it stands by for."""
        specs = self.spec.processes(number)
        for process in self.processes:
            process.close()
        self.processes = []
        for spec in specs:
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

    def _refused_for_good(self, process: Child) -> bool:
        if self.spec.cures is None or process.alive:
            return False
        # What it said last may still be in the pipe.
        process.death()
        return process.refusal is not None and process.refusal.code not in self.spec.cures

    def _new(self, spec: ProcessSpec, *, standby: bool) -> Child:
        process = self._create(spec, standby)
        process.watch(self._selector)
        return process
