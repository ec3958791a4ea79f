"""Runs the groups of processes of a server, and restarts what died or hangs.

There is one thread and one selector: signals, the output of children and their control channels are all descriptors, so
no state is shared between threads. `restarts` decides what to do about an exit or a hang; here it is done.
`Supervisor.run` is the whole life of a server.
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
from minisgl.errors import LauncherError
from minisgl.launcher import control
from minisgl.launcher.group import Group, GroupSpec
from minisgl.launcher.process import Child, Standby
from minisgl.launcher.restarts import (
    KILL_SECONDS,
    Action,
    GiveUp,
    KillGroup,
    Limits,
    Recovered,
    Started,
    StartGroup,
    decide,
    initial_state,
    next_deadline,
)
from minisgl.launcher.signals import Signals

logger = logging.getLogger(__name__)

_STOP_SECONDS: Final = 3.0
"""Longest time for a process to exit after SIGTERM; then it is killed."""

_STACKS_SECONDS: Final = 0.5
"""Time for hung processes to write their stacks before they are killed."""

_SURVIVOR_SECONDS: Final = 5.0
"""Time after SIGKILL from which a process that is still alive is logged."""

_CHECK_SECONDS: Final = 1.0
"""Longest time between two looks at heartbeats, and at killed processes."""

_PROGRESS_SECONDS: Final = 2.0
"""Shortest time between two lines about the start of a process."""


class StopRequested(Exception):
    """SIGINT, SIGTERM or SIGHUP has arrived, or a drain was requested."""


class SupervisorHooks(Protocol):
    """Work that shares a supervisor's thread and selector."""

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Register descriptors; the data of a key is the callback."""
        ...

    def tick(self) -> float:
        """Called before each wait of the supervisor; returns the latest time for the next call, on the monotonic
        clock."""
        ...


class Supervisor:
    """Starts `groups`, calls `on_ready` once all of them are ready, and keeps them running until a signal, or until a
    restart does not help any more."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        *,
        limits: Limits,
        drain_timeout: float,
        log_level: log.LogLevel,
        on_line: Callable[[log.Line], None],
        on_ready: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
        standby_delay: float = 5.0,
        hooks: SupervisorHooks | None = None,
        signals: Signals | None = None,
        restarts: tuple[float, ...] = (),
    ) -> None:
        """Times in seconds. Standbys are started `standby_delay` after all groups are ready, so that their imports do
        not slow down the first requests; none where `limits` allow no restart. `on_line` gets every line of output of
        every child. `on_end` is called before processes with clients are stopped: from then on no new client may
        connect.

        Open `signals` outlive the supervisor. `restarts` are times of earlier restarts (monotonic clock) that count.
        """
        self._limits = limits
        self._drain_timeout = drain_timeout
        self._standby_delay = standby_delay
        self._on_ready = on_ready
        self._on_end = on_end
        self._selector = selectors.DefaultSelector()
        self._groups = {spec.name: Group(spec, self._selector, log_level, on_line) for spec in groups}
        self._hooks = hooks
        self._signals = signals
        self.state = initial_state(tuple(self._groups), time.monotonic(), restarts)
        self.draining = False
        self._history: list[str] = []
        self._progress = _Progress()
        self._standby_at: float | None = None
        self._survivors: set[str] = set()
        """Labels of killed processes that were logged as still alive."""
        self._handled_stops = 0
        self._drain_requested = False

    @property
    def processes(self) -> list[Child]:
        return [process for group in self._groups.values() for process in group.processes]

    @property
    def standbys(self) -> list[Standby]:
        return [process for group in self._groups.values() for process in group.standbys]

    def run(self) -> None:
        """Run until a signal has stopped the server. Call it on the main thread.

        Raises LauncherError: process_died and startup_timeout at the start, later restarts_exhausted, process_stuck,
        and process_died for an exit during the drain. No process is left when it returns or raises.
        """
        with ExitStack() as stack:
            self._signals = self._signals or stack.enter_context(Signals())
            self._signals.watch(self._selector)
            if self._hooks is not None:
                self._hooks.watch(self._selector)
            try:
                for group in self._groups.values():
                    group.prepare()
                while True:
                    self._apply_actions()
                    self._wait_for_events()
            except StopRequested:
                self.draining = True
                self._drain()
            except LauncherError as error:
                self._notify_giving_up(str(error))
                raise
            finally:
                self._stop_all()

    def drain(self) -> None:
        """Stop as after a first signal; for `SupervisorHooks.tick`."""
        self._drain_requested = True

    def _apply_actions(self) -> None:
        """Take all actions that are due now: no event announces the ones that follow from others."""
        while actions := self._decide():
            for action in actions:
                self._perform(action)
        if self._standby_at is not None and time.monotonic() >= self._standby_at:
            self._standby_at = None
            for group in self._groups.values():
                group.start_standbys()

    def _decide(self) -> list[Action]:
        observed = {name: group.observe() for name, group in self._groups.items()}
        self.state, actions = decide(self.state, observed, self._limits, time.monotonic())
        return actions

    def _perform(self, action: Action) -> None:
        match action:
            case GiveUp():
                raise self._giving_up(action)
            case KillGroup():
                self._kill(action)
            case StartGroup():
                self._groups[action.group].start(action.number)
            case Recovered():
                logger.info("%s is ready again", action.group, extra={"seconds": round(action.seconds, 1)})
                self._plan_standbys()
            case Started():
                self._plan_standbys()
                self._progress.show(self.processes)
                self._on_ready()

    def _plan_standbys(self) -> None:
        if self._limits.max_restarts:
            self._standby_at = time.monotonic() + self._standby_delay
            return
        # Nothing takes the place of a process that is never restarted.
        for group in self._groups.values():
            group.end_standbys()

    def _wait_for_events(self) -> None:
        """Wait until something happens, or until the next deadline. Raises StopRequested for a new signal."""
        now = time.monotonic()
        starting = any(group.phase == "starting" for group in self.state.groups.values())
        checked = any(group.phase == "terminating" for group in self.state.groups.values()) or any(
            process.heartbeat is not None for process in self.processes
        )
        deadlines = (
            next_deadline(self.state, self._limits),
            self._standby_at,
            now + _PROGRESS_SECONDS if starting else None,
            now + _CHECK_SECONDS if checked else None,
        )
        known = [deadline for deadline in deadlines if deadline is not None]
        self._poll(max(0.0, min(known) - now) if known else None)
        self._handle_signals()
        self._progress.show(self.processes)
        self._log_survivors()

    def _log_survivors(self) -> None:
        """Log the processes that SIGKILL does not end, once each: until they exit, their devices are not free."""
        late = time.monotonic() - _SURVIVOR_SECONDS
        for name, group in self.state.groups.items():
            alive = [process.label for process in self._groups[name].processes if process.alive]
            if group.phase == "terminating" and group.since < late and not self._survivors.issuperset(alive):
                self._survivors.update(alive)
                logger.warning(
                    "%s: still alive %g s after SIGKILL, as in a call of a device driver; waiting for at most %g s",
                    *(", ".join(alive), _SURVIVOR_SECONDS, KILL_SECONDS),
                )

    def _kill(self, action: KillGroup) -> None:
        group = self._groups[action.group]
        match action.cause:
            case "died":
                reason = group.describe_exits()
            case "hung":
                reason = group.describe_stalls()
            case "too_long":
                reason = self._startup_timeout_message(group)
        logger.error("%s", reason)
        self._log_stacks(group)
        # Not SIGTERM: a process in a call that does not return cannot handle it.
        group.kill()
        self._history.append(f"{time.strftime('%H:%M:%S')} {reason.partition('. Its last words:')[0]}")
        logger.warning(
            "restarting %s, restart %d of at most %d within %g s",
            *(action.group, len(self.state.restarts), self._limits.max_restarts, self._limits.restart_window),
        )

    def _log_stacks(self, group: Group) -> None:
        """Have the processes of a group that hangs write their stacks, which become lines of their logs."""
        if group.describe_stalls():
            group.dump_stacks()
            self._wait_for(group.processes, _STACKS_SECONDS)

    def _giving_up(self, action: GiveUp) -> LauncherError:
        group = self._groups[action.group]
        self._log_stacks(group)
        if action.code == "process_stuck":
            stuck = ", ".join(process.label for process in group.processes if process.alive)
            return LauncherError(action.code, f"{stuck} did not exit within {KILL_SECONDS:g} s of SIGKILL: see dmesg")
        message = group.describe_exits() or group.describe_stalls() or self._startup_timeout_message(group)
        if action.code == "restarts_exhausted":
            recent = self._history[len(self._history) - len(self.state.restarts) :]
            history = "".join(f"\n  before: {entry}" for entry in recent)
            message += (
                f"\nnot restarted: the budget of --max-restarts {self._limits.max_restarts} within "
                f"--restart-window {self._limits.restart_window:g} s is used up{history}"
            )
        return LauncherError(action.code, message)

    def _startup_timeout_message(self, group: Group) -> str:
        return (
            f"not ready after {self._limits.startup_timeout:g} s: {group.describe_unready()}. "
            "Raise --startup-timeout to allow more time"
        )

    def _drain(self) -> None:
        """Let the processes with clients finish their requests; a second signal or an exit ends that.

        Raises LauncherError when a process has died of another cause than the signal."""
        self._stop_accepting()
        if not self.state.started:
            return
        needed = []
        lost = ""
        for name, group in self._groups.items():
            # A group that restarts has no requests to finish, and its exit is no failure.
            if self.state.groups[name].phase == "ready":
                needed += group.processes
            else:
                group.kill()
                lost = name if group.spec.required else lost
        draining = [p for p in needed if p.drains and p.alive]
        logger.info("stopping: running requests may finish within %g s; a second signal ends them", self._drain_timeout)
        for process in draining:
            if lost:
                # Requests that wait for it would wait in vain until the end of the drain.
                process.send(control.GaveUp(f"the server was stopped while {lost} was restarting"))
            else:
                process.signal(signal.SIGTERM)
        deadline = time.monotonic() + self._drain_timeout + _STOP_SECONDS
        try:
            while any(p.alive for p in draining) and (left := deadline - time.monotonic()) > 0:
                self._poll(left)
                _raise_for_failed([p for p in needed if p not in draining])
                self._handle_signals()
        except StopRequested:
            logger.info("stopping immediately")
        except LauncherError as error:
            self._notify_giving_up(str(error))
            raise
        _raise_for_failed(draining)

    def _notify_giving_up(self, message: str) -> None:
        """Send the processes with clients the error for their requests, and wait until they have passed it on."""
        self._stop_accepting()
        notified = [p for p in self.processes if p.drains and p.is_ready and p.alive]
        for process in notified:
            process.send(control.GaveUp(message))
        self._wait_for(notified, _STOP_SECONDS)

    def _stop_accepting(self) -> None:
        """Leave the sockets of clients to the processes that serve them."""
        self._on_end()
        for process in self.standbys:
            process.signal(signal.SIGKILL)

    def _stop_all(self) -> None:
        everything = [*self.processes, *self.standbys]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in everything:
                if process.alive:
                    process.signal(number)
            self._wait_for(everything, _STOP_SECONDS)
        for process in everything:
            if process.alive:
                logger.error("%s did not exit after SIGKILL: see dmesg", process.label)
            process.close()
        self._selector.close()

    def _wait_for(self, processes: Sequence[Child], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(p.alive for p in processes) and (left := deadline - time.monotonic()) > 0:
            self._poll(left)

    def _handle_signals(self) -> None:
        assert self._signals is not None
        requested = self._signals.requested or self._drain_requested
        if self._signals.stops > self._handled_stops or (requested and not self.draining):
            # The signal that follows another request to stop counts as the same wish.
            self._handled_stops = max(self._signals.stops, 1)
            raise StopRequested

    def _poll(self, seconds: float | None) -> None:
        """Handle events for at most `seconds`; None: until one happens."""
        if self._hooks is not None:
            left = max(0.0, self._hooks.tick() - time.monotonic())
            seconds = left if seconds is None else min(seconds, left)
        for key, _ in self._selector.select(seconds):
            key.data()


class _Progress:
    """Logs the progress of processes that start."""

    def __init__(self) -> None:
        self._shown: dict[Child, tuple[str, float]] = {}

    def show(self, processes: Sequence[Child]) -> None:
        now = time.monotonic()
        self._shown = {process: self._shown.get(process, ("starting", 0.0)) for process in processes}
        for process, (previous, at) in self._shown.items():
            text = "ready" if process.is_ready else process.progress
            if text != previous and (process.is_ready or now - at >= _PROGRESS_SECONDS):
                self._shown[process] = text, now
                logger.info("%s: %s", process.name, text)


def _raise_for_failed(processes: Sequence[Child]) -> None:
    """Raises LauncherError `process_died` when one of them has exited with another code than 0."""
    dead = [process for process in processes if not process.alive and process.exit_code != 0]
    if dead:
        raise LauncherError("process_died", "\n".join(process.describe_exit() for process in dead))
