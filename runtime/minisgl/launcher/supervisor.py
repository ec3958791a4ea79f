"""Runs the groups of processes that make a server, and starts again what died.

One thread and one selector: signals, the children's output and their control lines are all descriptors, so there is
no state that two threads share. What to do about a death is decided in `restarts`; here it is done. The way of a
server is written once, in `Supervisor.run`.
"""

from __future__ import annotations

import logging
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final, Protocol

from minisgl import logging as log
from minisgl.launcher import control
from minisgl.launcher.errors import LauncherError
from minisgl.launcher.group import Group, GroupSpec
from minisgl.launcher.process import Child, Process, ProcessSpec
from minisgl.launcher.restarts import (
    END_SECONDS,
    Action,
    GiveUp,
    Kill,
    Limits,
    Recovered,
    Serve,
    Start,
    begin,
    decide,
    next_deadline,
)
from minisgl.launcher.signals import Signals

logger = logging.getLogger(__name__)

_STOP_SECONDS: Final = 3.0
"""How long a process that was told to end may take before it is killed."""

_PROGRESS_SECONDS: Final = 2.0
"""Time between two lines about the same process during the start."""


class StopRequested(Exception):
    """SIGINT, SIGTERM or SIGHUP arrived, or somebody asked for the same."""


class Surroundings(Protocol):
    """What a supervisor has to look after besides its groups."""

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Register what shall wake the supervisor; each key's data is what to call then."""
        ...

    def turn(self) -> float | None:
        """Called whenever the supervisor has done what there was to do, before it waits; returns when to call it again
        at the latest, on the monotonic clock."""
        ...


class Supervisor:
    """Starts `groups`, calls `on_ready` once all of them are ready, and keeps them running until a signal or until a
    restart does not help any more."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        *,
        limits: Limits,
        drain_timeout: float,
        log_level: log.LogLevel,
        on_line: Callable[[log.Line], None],
        on_ready: Callable[[], None],
        on_end: Callable[[], None],
        standby_delay: float = 5.0,
        create: Callable[[ProcessSpec, bool], Child] | None = None,
        surroundings: Surroundings | None = None,
        signals: Signals | None = None,
        restarts: tuple[float, ...] = (),
    ) -> None:
        """Times in seconds. Standbys are started `standby_delay` after everything is ready, so that their imports
        do not slow down the first requests. `on_line` gets every line of output of every child. `on_end` is called
        before the processes with clients are told to end: nobody new may come to them.

        `create` starts a process, as a standby where its second argument says so; None: on this machine. `signals`
        that are open already outlive the supervisor. `restarts` that began earlier (monotonic clock) count too.
        """
        self._limits = limits
        self._drain_timeout = drain_timeout
        self._standby_delay = standby_delay
        self._on_ready = on_ready
        self._on_end = on_end
        self._selector = selectors.DefaultSelector()
        self._groups = {
            spec.name: Group(
                spec,
                self._selector,
                create or (lambda process, standby: Process(process, log_level, on_line, standby=standby)),
            )
            for spec in groups
        }
        self._surroundings = surroundings
        self._signals = signals
        self.state = begin(tuple(self._groups), time.monotonic(), restarts)
        self.draining = False
        self._history: list[str] = []
        self._progress = _Progress()
        self._standby_at: float | None = None
        self._stops_obeyed = 0
        self._drain_asked = False

    @property
    def processes(self) -> list[Child]:
        return [process for group in self._groups.values() for process in group.processes]

    @property
    def standbys(self) -> list[Child]:
        return [process for group in self._groups.values() for process in group.standbys]

    def run(self) -> None:
        """Returns when a signal has ended the server. Call it on the main thread.

        Raises LauncherError: process_died and startup_timeout at the start, later restarts_exhausted, process_stuck,
        and process_died for a death while requests are drained. No process is left, whatever happens.
        """
        with ExitStack() as stack:
            self._signals = self._signals or stack.enter_context(Signals())
            self._signals.watch(self._selector)
            if self._surroundings is not None:
                self._surroundings.watch(self._selector)
            try:
                while True:
                    self._keep_running()
                    self._wait_for_events()
            except StopRequested:
                self.draining = True
                self._drain()
            except LauncherError as error:
                self._announce(str(error))
                raise
            finally:
                self._end_all()

    def drain(self) -> None:
        """End as after a first signal; for `Surroundings.turn`."""
        self._drain_asked = True

    def _keep_running(self) -> None:
        """Do what there is to do now: what follows from it at once is not announced by another event."""
        while actions := self._decide():
            for action in actions:
                self._act(action)
        if self._standby_at is not None and time.monotonic() >= self._standby_at:
            self._standby_at = None
            for group in self._groups.values():
                group.stand_by()

    def _decide(self) -> list[Action]:
        seen = {name: group.seen() for name, group in self._groups.items()}
        self.state, actions = decide(self.state, seen, self._limits, time.monotonic())
        return actions

    def _act(self, action: Action) -> None:
        match action:
            case GiveUp():
                raise self._given_up(action)
            case Kill():
                self._kill(action)
            case Start():
                self._groups[action.group].start(action.number)
            case Recovered():
                logger.info("%s is back", action.group, extra={"seconds": round(action.seconds, 1)})
                self._standby_at = time.monotonic() + self._standby_delay
            case Serve():
                self._standby_at = time.monotonic() + self._standby_delay
                self._progress.show(self.processes)
                self._on_ready()

    def _wait_for_events(self) -> None:
        """Until something happens or must be looked at. Raises StopRequested for a new signal."""
        now = time.monotonic()
        starting = any(group.phase == "starting" for group in self.state.groups.values())
        deadlines = (
            next_deadline(self.state, self._limits),
            self._standby_at,
            now + _PROGRESS_SECONDS if starting else None,
        )
        known = [deadline for deadline in deadlines if deadline is not None]
        self._dispatch(max(0.0, min(known) - now) if known else None)
        self._obey_signals()
        self._progress.show(self.processes)

    def _kill(self, action: Kill) -> None:
        group = self._groups[action.group]
        reason = group.deaths() if action.cause == "died" else self._too_long(group)
        group.kill()
        self._history.append(f"{time.strftime('%H:%M:%S')} {reason.partition('. Its last words:')[0]}")
        logger.error("%s", reason)
        logger.warning(
            "starting %s again, restart %d of at most %d within %g s",
            *(action.group, len(self.state.restarts), self._limits.max_restarts, self._limits.restart_window),
        )

    def _given_up(self, action: GiveUp) -> LauncherError:
        group = self._groups[action.group]
        if action.code == "process_stuck":
            stuck = ", ".join(f"{p.spec.name} (pid {p.pid})" for p in group.processes if p.alive)
            return LauncherError(action.code, f"{stuck} did not end within {END_SECONDS:g} s when killed: see dmesg")
        message = group.deaths() or self._too_long(group)
        if action.code == "restarts_exhausted":
            recent = self._history[len(self._history) - len(self.state.restarts) :]
            history = "".join(f"\n  before: {entry}" for entry in recent)
            message += (
                f"\nnot started again: --max-restarts {self._limits.max_restarts} within "
                f"--restart-window {self._limits.restart_window:g} s are used up{history}"
            )
        return LauncherError(action.code, message)

    def _too_long(self, group: Group) -> str:
        return (
            f"not ready after {self._limits.startup_timeout:g} s: {group.unready()}. Allow more with --startup-timeout."
        )

    def _drain(self) -> None:
        """Let the processes with clients finish what they have begun; a second signal or a death ends that.

        Raises LauncherError when a process died of something else than the signal."""
        self._close_door()
        if not self.state.serving:
            return
        needed = []
        lost = ""
        for name, group in self._groups.items():
            # One that is being started again has nothing to finish, and its end is no failure.
            if self.state.groups[name].phase == "ready":
                needed += group.processes
            else:
                group.kill()
                lost = name if group.spec.required else lost
        draining = [p for p in needed if p.spec.drains and p.alive]
        logger.info("stopping: running requests may finish within %g s, a second signal ends them", self._drain_timeout)
        for process in draining:
            if lost:
                # Requests that wait for it would wait in vain until the end of the drain.
                process.send(control.GaveUp(f"the server was stopped while {lost} was restarting"))
            else:
                process.signal(signal.SIGTERM)
        deadline = time.monotonic() + self._drain_timeout + _STOP_SECONDS
        try:
            while any(p.alive for p in draining) and (left := deadline - time.monotonic()) > 0:
                self._dispatch(left)
                _raise_for([p for p in needed if p not in draining])
                self._obey_signals()
        except StopRequested:
            logger.info("stopping at once")
        except LauncherError as error:
            self._announce(str(error))
            raise
        _raise_for([p for p in draining if p.exit_code])

    def _announce(self, message: str) -> None:
        """Tell the processes with clients why their requests end, and wait for those to have passed it on."""
        self._close_door()
        telling = [p for p in self.processes if p.spec.drains and p.is_ready and p.alive]
        for process in telling:
            process.send(control.GaveUp(message))
        self._wait_for(telling, _STOP_SECONDS)

    def _close_door(self) -> None:
        """The processes with clients alone hold their sockets from now on."""
        self._on_end()
        for process in self.standbys:
            process.signal(signal.SIGKILL)

    def _end_all(self) -> None:
        everything = [*self.processes, *self.standbys]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in everything:
                if process.alive:
                    process.signal(number)
            self._wait_for(everything, _STOP_SECONDS)
        for process in everything:
            if process.alive:
                logger.error("%s (pid %d) does not even end when killed: see dmesg", process.spec.name, process.pid)
            process.close()
        self._selector.close()

    def _wait_for(self, processes: Sequence[Child], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(p.alive for p in processes) and (left := deadline - time.monotonic()) > 0:
            self._dispatch(left)

    def _obey_signals(self) -> None:
        assert self._signals is not None
        asked = self._signals.requested or self._drain_asked
        if self._signals.stops > self._stops_obeyed or (asked and not self.draining):
            # Who was asked by other means takes the signal that follows for the same wish.
            self._stops_obeyed = max(self._signals.stops, 1)
            raise StopRequested

    def _dispatch(self, seconds: float | None) -> None:
        due = self._surroundings.turn() if self._surroundings is not None else None
        if due is not None:
            left = max(0.0, due - time.monotonic())
            seconds = left if seconds is None else min(seconds, left)
        for key, _ in self._selector.select(seconds):
            key.data()


class _Progress:
    """Lines for people about processes that start."""

    def __init__(self) -> None:
        self._shown: dict[tuple[str, int], tuple[str, float]] = {}

    def show(self, processes: Sequence[Child]) -> None:
        now = time.monotonic()
        for process in processes:
            text = "ready" if process.is_ready else process.progress
            key = process.spec.name, process.pid
            previous, at = self._shown.get(key, ("starting", 0.0))
            if text != previous and (process.is_ready or now - at >= _PROGRESS_SECONDS):
                self._shown[key] = text, now
                logger.info("%s: %s", process.spec.name, text)


def _raise_for(processes: Sequence[Child]) -> None:
    """Raises LauncherError `process_died` when one of them has ended of something else than its work's end."""
    dead = [process for process in processes if not process.alive and process.exit_code != 0]
    if dead:
        raise LauncherError("process_died", "\n".join(process.death() for process in dead))
