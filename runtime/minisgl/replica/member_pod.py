"""The launcher of a pod other than pod 0: it starts, watches and ends its ranks for the one that leads."""

from __future__ import annotations

import logging
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from minisgl import logging as log
from minisgl.launcher.control_server import Board
from minisgl.launcher.errors import LauncherError
from minisgl.launcher.group import Group, GroupSpec
from minisgl.launcher.process import Child, Process, ProcessSpec
from minisgl.launcher.signals import Signals
from minisgl.replica.epoch import member_pod_ranks
from minisgl.replica.failures import count_oom_kills, reason_of
from minisgl.replica.link import (
    LINK_VERSION,
    PING_SECONDS,
    SILENCE_SECONDS,
    Accepted,
    Begin,
    Connection,
    Drained,
    End,
    GaveUp,
    Join,
    Leaving,
    LinkLost,
    Ping,
    RankEnded,
    RankProgress,
    RankReady,
    Rejected,
    ToLeader,
    from_leader,
)
from minisgl.replica.options import EngineOptions
from minisgl.replica.post_mortem import rank_of, shortened
from minisgl.replica.status import rank_phase, standing_by
from minisgl.replica.topology import own_place
from minisgl.wire.status import EnginePhase, EngineStatus, RankStatus

logger = logging.getLogger(__name__)

_TURN_SECONDS: Final = 1.0
_DIAL_SECONDS: Final = 2.0
"""For one attempt to reach pod 0, and between two of them after a refusal."""
_STANDBY_SECONDS: Final = 5.0
"""As in the supervisor: standbys must not slow down the first requests."""
_RELEASE_SECONDS: Final = 10.0
"""How long after the drain must be over pod 0's word for it is waited for."""


class MemberPod:
    """One thread and one selector, like the supervisor; what to do is pod 0's to decide."""

    def __init__(
        self,
        options: EngineOptions,
        signals: Signals,
        board: Board,
        on_line: Callable[[log.Line], None],
    ) -> None:
        self._options = options
        self._signals = signals
        self._board = board
        self._selector = selectors.DefaultSelector()
        self._group = Group(
            GroupSpec(name="engine", processes=self._specs),
            self._selector,
            lambda spec, standby: Process(spec, options.log.level, on_line, standby=standby),
        )
        self._link: Connection | None = None
        self._joined = False
        self._epoch = Begin(epoch=(0, 0), rendezvous="", first_device=None, nccl_host="")
        self._told: dict[int, str] = {}
        """What the leader knows of each rank: its last progress, `ready` or `ended`."""
        self._heard = self._next_ping = self._next_dial = 0.0
        self._standby_at: float | None = None
        self._leave_by: float | None = None
        self._over = False
        self._trouble = ""
        """Why this pod has not joined."""
        self._given_up = False
        self._stops_obeyed = 0
        self._oom_kills = count_oom_kills()

    def run(self) -> None:
        """Run until pod 0 reports that the replica has been drained, or until a signal while there is no link."""
        self._signals.watch(self._selector)
        try:
            while not self._finished():
                self._turn()
                for key, _ in self._selector.select(_TURN_SECONDS if self._link is not None else self._until_dial()):
                    key.data()
        finally:
            self._end()

    def _finished(self) -> bool:
        """Obey signals; the first one asks pod 0 to have the replica drained."""
        signals = self._signals
        if self._leave_by is None and (signals.stops or signals.requested):
            self._leave_by = time.monotonic() + self._options.drain_timeout + _RELEASE_SECONDS
            self._stops_obeyed = max(signals.stops, 1)
            self._send(Leaving())
        if self._leave_by is None:
            return self._over
        at_once = signals.stops > self._stops_obeyed or time.monotonic() > self._leave_by
        return self._over or at_once or not self._joined

    def _turn(self) -> None:
        now = time.monotonic()
        self._report()
        if self._link is not None:
            if now - self._heard > SILENCE_SECONDS:
                self._lose(f"nothing came from it for {SILENCE_SECONDS:g} s")
            elif now >= self._next_ping:
                self._next_ping = now + PING_SECONDS
                self._send(Ping())
        elif now >= self._next_dial and not self._group.seen().alive:
            self._dial()
        if self._standby_at is not None and now >= self._standby_at:
            self._standby_at = None
            self._group.stand_by()
        self._publish()

    def _until_dial(self) -> float:
        return min(_TURN_SECONDS, max(0.0, self._next_dial - time.monotonic()))

    def _dial(self) -> None:
        options = self._options
        self._next_dial = time.monotonic() + _DIAL_SECONDS
        try:
            link = Connection(socket.create_connection((options.leader, options.ports.link), _DIAL_SECONDS))
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            self._explain(f"pod 0 cannot be reached at {options.leader}:{options.ports.link} yet: {reason}")
            return
        self._link, self._heard = link, time.monotonic()
        self._selector.register(link.socket, selectors.EVENT_READ, self._read)
        expected = options.expected
        self._send(
            Join(
                version=LINK_VERSION,
                replica=expected.replica,
                revision=expected.revision,
                tensor_parallel=expected.tensor_parallel,
                ranks_per_pod=expected.ranks_per_pod,
                pod_index=options.pod_index,
                pod=options.pod,
                place=own_place(options.node, options.engine.device),
            )
        )

    def _read(self) -> None:
        assert self._link is not None
        try:
            lines = self._link.receive()
            self._heard = time.monotonic()
            for line in lines:
                if self._link is not None:
                    self._take(line)
        except LinkLost as error:
            self._lose(str(error))

    def _take(self, line: bytes) -> None:
        try:
            message = from_leader.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise LinkLost(f"it sent a line that is not understood: {error}") from error
        match message:
            case Accepted():
                self._joined, self._trouble, self._given_up = True, "", False
                logger.info("joined %s", self._options.expected.replica)
            case Rejected():
                self._explain(f"pod 0 does not take this pod: {message.message}")
            case Begin():
                self._begin(message)
            case End() if message.epoch == self._epoch.epoch:
                self._group.kill()
            case Drained():
                self._over = True
            case GaveUp():
                self._given_up = True
                self._explain(f"the replica has failed: {message.message}")

    def _begin(self, message: Begin) -> None:
        if self._group.seen().alive:
            raise LinkLost("it began an epoch before the last one had ended")
        self._epoch = message
        self._told = {}
        self._standby_at = None
        try:
            self._group.start(message.epoch[1])
        except LauncherError as error:
            raise LinkLost(f"the ranks cannot be started: {error}") from error

    def _specs(self, number: int) -> Sequence[ProcessSpec]:
        return member_pod_ranks(self._options, self._epoch)

    def _report(self) -> None:
        """Tell the leader what it does not know of the ranks yet."""
        for process in self._group.processes:
            rank = rank_of(process)
            known = self._told.get(rank)
            state = "ended" if not process.alive else "ready" if process.is_ready else process.progress
            if known in (state, "ended"):
                continue
            self._told[rank] = state
            match state:
                case "ended":
                    self._send(self._ended(process, rank))
                case "ready":
                    self._send(RankReady(self._epoch.epoch, rank))
                    if all(each.is_ready for each in self._group.processes):
                        self._standby_at = time.monotonic() + _STANDBY_SECONDS
                case _:
                    self._send(RankProgress(self._epoch.epoch, rank, shortened(state)))

    def _ended(self, process: Child, rank: int) -> RankEnded:
        assert isinstance(process, Process) and process.exit_code is not None
        message = process.death()
        kills = count_oom_kills()
        reason = reason_of(process.exit_code, process.refusal, message, oom_killed=kills > self._oom_kills)
        self._oom_kills = kills
        if not process.told_to_end:
            logger.error("%s", message)
        return RankEnded(
            epoch=self._epoch.epoch,
            rank=rank,
            exit_code=process.exit_code,
            told_to_end=process.told_to_end,
            code=process.refusal.code if process.refusal is not None else "",
            reason=reason,
            message=shortened(process.refusal.message if process.refusal is not None else message),
        )

    def _send(self, message: ToLeader) -> None:
        if self._link is None:
            return
        try:
            self._link.send(message)
        except LinkLost as error:
            self._lose(str(error))

    def _lose(self, why: str) -> None:
        """The ranks end with the link: their group cannot go on without this pod's launcher being heard."""
        assert self._link is not None
        self._selector.unregister(self._link.socket)
        self._link.close()
        self._link = None
        self._next_dial = time.monotonic() + (_DIAL_SECONDS if not self._joined else 0.0)
        if self._joined and not self._over and not self._given_up:
            self._explain(f"the link to pod 0 was lost: {why}")
        self._joined = False
        self._group.kill()

    def _explain(self, trouble: str) -> None:
        """A line for people, once; a replica that has failed stays so until a pod 0 accepts this pod again."""
        if trouble != self._trouble and not (self._given_up and "has failed" in self._trouble):
            self._trouble = trouble
            logger.warning("%s", trouble)

    def _end(self) -> None:
        everything = [*self._group.processes, *self._group.standbys]
        for process in everything:
            if process.alive:
                process.signal(signal.SIGKILL)
        for process in everything:
            assert isinstance(process, Process)
            process.wait()
            process.close()
        if self._link is not None:
            self._link.close()
        self._selector.close()

    def _publish(self) -> None:
        options, expected = self._options, self._options.expected
        seen = self._group.seen()
        ranks = tuple(
            RankStatus(
                rank=rank_of(process),
                pod=options.pod,
                node=options.node,
                phase=rank_phase(process.is_ready, process.progress) if process.alive else "Restarting",
                progress="" if process.is_ready or not process.alive else process.progress,
            )
            for process in self._group.processes
        )
        phase: EnginePhase = "Waiting"
        if self._given_up:
            phase = "Failed"
        elif self._leave_by is not None:
            phase = "Draining"
        elif seen.alive:
            phase = next((rank.phase for rank in ranks if rank.phase != "Ready"), "Ready")
        status = EngineStatus(
            model=options.model_name,
            replica=expected.replica,
            pod=options.pod,
            pod_index=options.pod_index,
            revision=expected.revision,
            epoch=self._epoch.epoch,
            phase=phase,
            progress=self._trouble,
            ready=self._joined,
            ranks=ranks,
            ready_ranks=sum(rank.phase == "Ready" for rank in ranks),
            tensor=expected.tensor_parallel,
            transport="",
            timings={},
            standbys=standing_by(self._group.standbys),
            restarts=0,
            max_restarts=options.limits.max_restarts,
            last_failure=None,
            card=None,
        )
        self._board.publish(status, "" if self._joined else self._trouble or "waiting for pod 0")
