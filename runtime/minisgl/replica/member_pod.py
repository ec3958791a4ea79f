"""The launcher of a member pod: it starts, watches and kills its ranks for the leader."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from minisgl import logging as log
from minisgl.launcher.control_server import StatusBoard
from minisgl.launcher.group import Group, GroupSpec
from minisgl.launcher.process import Process, ProcessSpec
from minisgl.launcher.rank_specs import prepared_specs
from minisgl.launcher.signals import Signals
from minisgl.replica import messages
from minisgl.replica.diagnosis import rank_of, shortened
from minisgl.replica.epoch import member_pod_specs
from minisgl.replica.failures import count_oom_kills, failure_reason
from minisgl.replica.link import Link, LinkClosed
from minisgl.replica.options import EngineOptions
from minisgl.replica.report import member_status
from minisgl.replica.topology import own_topology
from minisgl.wire.status import EnginePhase

logger = logging.getLogger(__name__)

_TICK_SECONDS: Final = 1.0
"""Longest time between two ticks when nothing happens."""
_CONNECT_SECONDS: Final = 2.0
"""Timeout of one attempt to reach pod 0, and the pause after a failed one."""
_STANDBY_SECONDS: Final = 5.0
"""Delay of standbys after a start, as in the supervisor: they must not slow down the first requests."""
_RELEASE_SECONDS: Final = 10.0
"""Time after the drain timeout for pod 0 to report the end of the drain."""


class MemberPod:
    """One thread and one selector, like the supervisor; the leader decides what to do."""

    def __init__(
        self,
        options: EngineOptions,
        signals: Signals,
        board: StatusBoard,
        on_line: Callable[[log.Line], None],
    ) -> None:
        """`on_line` gets each line of output of each rank."""
        self._options = options
        self._signals = signals
        self._board = board
        self._selector = selectors.DefaultSelector()
        self._group = Group(
            GroupSpec(
                name="engine",
                processes=self._specs,
                prepared=prepared_specs(options.engine, options.identity.ranks(options.pod_index), alone=False),
                stall_seconds=options.stall_seconds,
            ),
            self._selector,
            options.log.level,
            on_line,
        )
        self._link: Link[messages.FromLeader] | None = None
        self._joined = False
        self._start = messages.StartRanks(epoch=(0, 0), rendezvous="", first_device=None, nccl_host="")
        self._reported: dict[int, str] = {}
        """Rank → state that the leader knows: its progress, `ready`, `hangs` or `ended`."""
        self._next_connect = 0.0
        self._standby_at: float | None = None
        self._exit_deadline: float | None = None
        """Set once the pod was asked to stop."""
        self._drained = False
        """The leader has drained the replica, and no leader has accepted this pod since."""
        self._gave_up = False
        self._problem = ""
        """Reason why this pod has not joined; empty when it has."""
        self._handled_stops = 0
        self._oom_kills = count_oom_kills()

    def run(self) -> None:
        """Run until this pod is asked to stop and the replica is drained. A drain for pod 0 alone, which is evicted or
        restarted, does not end this launcher: the kubelet delays the restart of a process longer each time it exits,
        even with code 0, and its successor would only wait for the next pod 0 as well."""
        self._signals.watch(self._selector)
        try:
            self._group.prepare()
            while not self._finished():
                self._tick()
                wait = _TICK_SECONDS
                if self._link is None:
                    wait = min(wait, max(0.0, self._next_connect - time.monotonic()))
                for key, _ in self._selector.select(wait):
                    key.data()
        finally:
            self._group.kill_and_close()
            if self._link is not None:
                self._link.close()
            self._selector.close()

    def _finished(self) -> bool:
        """Handle signals: the first one asks the leader to drain the replica, a second one ends the wait for it."""
        signals = self._signals
        if self._exit_deadline is None and (signals.stops or signals.requested):
            self._exit_deadline = time.monotonic() + self._options.drain_timeout + _RELEASE_SECONDS
            self._handled_stops = max(signals.stops, 1)
            self._send(messages.DrainRequested())
        if self._exit_deadline is None:
            return False
        late = signals.stops > self._handled_stops or time.monotonic() > self._exit_deadline
        return self._drained or late or not self._joined

    def _tick(self) -> None:
        now = time.monotonic()
        self._report_ranks()
        if self._link is not None:
            self._link.tick(now)
        elif now >= self._next_connect and self._ranks_have_ended():
            self._connect()
        if self._standby_at is not None and now >= self._standby_at:
            self._standby_at = None
            self._group.start_standbys()
        self._publish()

    def _ranks_have_ended(self) -> bool:
        """Whether all ranks were seen to end while the link was lost: the next leader gets no report of them."""
        return all(state == "ended" for state in self._reported.values())

    def _connect(self) -> None:
        options, identity = self._options, self._options.identity
        self._next_connect = time.monotonic() + _CONNECT_SECONDS
        try:
            connection = socket.create_connection((options.leader, options.ports.link), _CONNECT_SECONDS)
            self._link = Link(connection, messages.from_leader)
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            self._warn_once(f"pod 0 cannot be reached at {options.leader}:{options.ports.link} yet: {reason}")
            return
        self._link.watch(self._selector, self._handle, self._disconnect)
        self._send(
            messages.Join(
                version=messages.LINK_VERSION,
                **msgspec.structs.asdict(identity),
                pod_index=options.pod_index,
                pod=options.pod,
                topology=own_topology(options.node, options.engine.device),
                proof=options.secret().proof(
                    *("join", identity.replica, identity.revision, str(options.pod_index), options.pod)
                ),
            )
        )

    def _handle(self, message: messages.FromLeader) -> None:
        match message:
            case messages.Accepted():
                self._joined, self._problem, self._gave_up, self._drained = True, "", False, False
                logger.info("joined %s", self._options.identity.replica)
            case messages.Rejected():
                self._warn_once(f"pod 0 has rejected this pod: {message.message}")
            case messages.StartRanks():
                self._start_ranks(message)
            case messages.KillRanks() if message.epoch == self._start.epoch:
                self._group.kill()
            case messages.Drained():
                self._drained = True
            case messages.GaveUp():
                self._gave_up = True
                self._warn_once(f"the replica has failed: {message.message}")

    def _start_ranks(self, message: messages.StartRanks) -> None:
        if self._group.observe().alive:
            raise LinkClosed("it started an epoch before the last one had ended")
        self._start = message
        self._reported = {}
        self._standby_at = None
        self._group.start(message.epoch[1])

    def _specs(self, number: int) -> Sequence[ProcessSpec]:
        return member_pod_specs(self._options, self._start)

    def _report_ranks(self) -> None:
        """Send the leader what it does not know of the ranks yet."""
        self._group.observe()
        for process in self._group.processes:
            rank = rank_of(process)
            known = self._reported.get(rank)
            state = "ended" if not process.alive else "ready" if process.is_ready else process.progress
            if process.stall and process.alive:
                # A step that ends after all does not save the epoch: the leader kills it.
                state = "hangs"
            if known in (state, "ended"):
                continue
            self._reported[rank] = state
            match state:
                case "hangs":
                    logger.error("%s: %s", process.label, process.stall)
                    self._group.dump_stacks()
                    self._send(messages.RankProgress(self._start.epoch, rank, process.stall, hangs=True))
                case "ended":
                    assert isinstance(process, Process)
                    self._send(self._rank_ended(process, rank))
                case "ready":
                    self._send(messages.RankReady(self._start.epoch, rank))
                    if all(each.is_ready for each in self._group.processes):
                        self._standby_at = time.monotonic() + _STANDBY_SECONDS
                case _:
                    self._send(messages.RankProgress(self._start.epoch, rank, shortened(state)))

    def _rank_ended(self, process: Process, rank: int) -> messages.RankEnded:
        assert process.exit_code is not None
        message = process.describe_exit()
        start_error = process.start_error
        kills = count_oom_kills()
        reason = failure_reason(process.exit_code, start_error, message, oom_killed=kills > self._oom_kills)
        self._oom_kills = kills
        if not process.terminated_by_us:
            # In a drain the ranks end together with rank 0; otherwise the leader says what it means.
            logger.log(logging.ERROR if process.exit_code else logging.INFO, "%s", message)
        return messages.RankEnded(
            epoch=self._start.epoch,
            rank=rank,
            exit_code=process.exit_code,
            terminated_by_us=process.terminated_by_us,
            code="" if start_error is None else start_error.code,
            reason=reason,
            message=shortened(message if start_error is None else start_error.message),
        )

    def _send(self, message: messages.ToLeader) -> None:
        if self._link is None:
            return
        try:
            self._link.send(message)
        except LinkClosed as error:
            self._disconnect(str(error))

    def _disconnect(self, why: str) -> None:
        """Close the link and kill the ranks: their group cannot go on while this launcher is cut off."""
        assert self._link is not None
        self._link.close()
        self._link = None
        self._next_connect = time.monotonic() + (_CONNECT_SECONDS if not self._joined else 0.0)
        if self._joined and not self._drained and not self._gave_up:
            self._warn_once(f"the link to pod 0 was lost: {why}")
        self._joined = False
        self._group.kill()

    def _warn_once(self, problem: str) -> None:
        """Log a problem when it is new. The failure of the replica stays the problem until a leader accepts the pod."""
        if problem != self._problem and not (self._gave_up and "has failed" in self._problem):
            self._problem = problem
            logger.warning("%s", problem)

    def _publish(self) -> None:
        phase: EnginePhase | None = None
        if self._gave_up:
            phase = "Failed"
        elif self._exit_deadline is not None:
            phase = "Draining"
        status = member_status(
            self._options,
            self._start.epoch,
            self._group.processes,
            self._group.standbys,
            phase=phase,
            joined=self._joined,
            problem=self._problem,
        )
        self._board.publish(status, "" if self._joined else self._problem or "waiting for pod 0")
