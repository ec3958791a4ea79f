"""Processes that depend on each other: started, killed and counted together."""

from __future__ import annotations

import math
import selectors
import signal
import time
from collections.abc import Callable, Sequence

import msgspec

from minisgl import logging as log
from minisgl.launcher.process import Child, Process, ProcessSpec, Standby
from minisgl.launcher.restarts import GroupObservation
from minisgl.launcher.stalls import StallMonitor

_Imports = tuple[tuple[str, ...], tuple[tuple[str, str], ...], tuple[int, ...]]
"""Modules, environment and descriptors of a standby: those of the processes that it can fork."""


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A group to start. All ranks of an engine are one group; every other process is a group of its own."""

    name: str
    processes: Callable[[int], Sequence[ProcessSpec | Child]]
    """Called for the n-th start, from 1 on: returns processes to start, and children that run elsewhere already.
    Between starts only configurations differ."""
    can_start: Callable[[], bool] = lambda: True
    """Called before each start."""
    prepared: Sequence[ProcessSpec] = ()
    """Processes whose imports begin before the first start, which waits for `can_start`. Their configurations are not
    used."""
    retryable_codes: frozenset[str] | None = None
    """Codes of start errors after which another start may succeed; None: all."""
    required: bool = False
    """Requests wait for this group while it restarts, and none can complete without it."""
    stall_seconds: float = math.inf
    """Longest time of a step, and of the silence of a process that sends heartbeats; beyond it the process hangs."""


class Group:
    """A group with its processes, which `selector` watches."""

    def __init__(
        self,
        spec: GroupSpec,
        selector: selectors.BaseSelector,
        log_level: str,
        on_line: Callable[[log.Line], None],
    ) -> None:
        """`on_line` gets each line of output of each process."""
        self.processes: list[Child] = []
        self.spec = spec
        self._standbys: dict[_Imports, Standby] = {}
        self._retired: list[Standby] = []
        """Killed standbys, until they have exited."""
        self._selector = selector
        self._log_level = log_level
        self._on_line = on_line
        self._stalls = StallMonitor(spec.stall_seconds, time.monotonic())

    @property
    def standbys(self) -> list[Standby]:
        return [*self._standbys.values(), *self._retired]

    def observe(self) -> GroupObservation:
        """Call it after each wait for events, and at least every second."""
        self._stalls.update(self.processes, time.monotonic())
        alive = [process for process in self.processes if process.alive]
        return GroupObservation(
            len(alive),
            len(self.processes) - len(alive),
            sum(process.is_ready for process in alive),
            sum(process.stall != "" for process in alive),
            can_start=self.spec.can_start(),
            permanent=any(map(self._failed_permanently, self.processes)),
        )

    def start(self, number: int) -> None:
        """Start the group for the `number`-th time; the processes of the last start are dead."""
        specs = self.spec.processes(number)
        for process in self.processes:
            process.close()
            if isinstance(process, Process) and not process.is_ready and process.came_from is not None:
                # What has not started may have failed because of its standby.
                self._retire(process.came_from)
        self.processes = []
        self._stalls = StallMonitor(self.spec.stall_seconds, time.monotonic())
        for spec in specs:
            self.processes.append(self._start(spec) if isinstance(spec, ProcessSpec) else spec)

    def prepare(self) -> None:
        """Start standbys for the first start."""
        for spec in self.spec.prepared:
            self._keep_standby(spec, wait_for_cores=False)

    def start_standbys(self) -> None:
        """Start the standbys that are missing, and end those that no process of today can come from."""
        own = [process for process in self.processes if isinstance(process, Process) and process.spec.preload]
        wanted = {_imports(process.spec) for process in own}
        for imports, standby in list(self._standbys.items()):
            if imports not in wanted:
                self._retire(standby)
        for process in own:
            self._keep_standby(process.spec, wait_for_cores=True)

    def end_standbys(self) -> None:
        """End all standbys: there will be no further start."""
        for standby in list(self._standbys.values()):
            self._retire(standby)

    def dump_stacks(self) -> None:
        """Have the processes of this machine write their stacks to their output."""
        for process in self.processes:
            if isinstance(process, Process) and process.alive:
                process.dump_stacks()

    def kill(self) -> None:
        for process in self.processes:
            if process.alive:
                process.signal(signal.SIGKILL)

    def kill_and_close(self) -> None:
        """Kill and reap all processes and standbys. All of them must be on this machine."""
        self.kill()
        for process in (*self.processes, *self.standbys):
            assert isinstance(process, Process)
            process.kill_and_close()

    def describe_exits(self) -> str:
        """Describe the exits of the dead processes."""
        return "\n".join(process.describe_exit() for process in self.processes if not process.alive)

    def describe_stalls(self) -> str:
        """Describe the processes that hang, and what the others are doing; empty if none hangs."""
        hung = [f"{process.label}: {process.stall}" for process in self.processes if process.stall]
        others = [
            f"{process.name}: in a step for {process.heartbeat.step_age:.0f} s"
            if process.heartbeat.step_age
            else f"{process.name}: no step in progress"
            for process in self.processes
            if process.heartbeat is not None and not process.stall
        ]
        return "\n".join([*hung, *others]) if hung else ""

    def describe_unready(self) -> str:
        """Name the processes that are not ready, with their progress."""
        return ", ".join(f"{p.name} ({p.progress})" for p in self.processes if not p.is_ready)

    def _failed_permanently(self, process: Child) -> bool:
        if self.spec.retryable_codes is None or process.alive:
            return False
        # Its start error may still be in the pipe.
        process.describe_exit()
        return process.start_error is not None and process.start_error.code not in self.spec.retryable_codes

    def _start(self, spec: ProcessSpec) -> Process:
        standby = self._standbys.get(_imports(spec))
        if standby is None or not standby.alive:
            # Only a standby can choose process ids.
            standby = self._keep_standby(spec, wait_for_cores=False) if spec.pid_residue != (0, 1) else None
        return Process(spec, self._selector, self._log_level, self._on_line, standby)

    def _keep_standby(self, spec: ProcessSpec, *, wait_for_cores: bool) -> Standby:
        """The standby for a process, which is started unless it runs."""
        imports = _imports(spec)
        if (found := self._standbys.get(imports)) is not None:
            if found.alive:
                return found
            self._retire(found)
        self._standbys[imports] = Standby(
            self.spec.name, spec, self._selector, self._log_level, self._on_line, wait_for_cores=wait_for_cores
        )
        return self._standbys[imports]

    def _retire(self, standby: Standby) -> None:
        """Kill a standby. It may take long to exit, and nothing waits for it."""
        if self._standbys.get(_imports(standby.spec)) is standby:
            del self._standbys[_imports(standby.spec)]
            standby.signal(signal.SIGKILL)
            self._retired.append(standby)
        for each in [each for each in self._retired if not each.alive]:
            self._retired.remove(each)
            each.close()


def _imports(spec: ProcessSpec) -> _Imports:
    return spec.preload, tuple(spec.environment.items()), spec.descriptors
