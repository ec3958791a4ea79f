"""The launcher of pod 0: it supervises the ranks of all pods of a replica."""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from minisgl import logging as log
from minisgl.launcher.control_server import Board
from minisgl.launcher.errors import LauncherError
from minisgl.launcher.group import GroupSpec
from minisgl.launcher.process import Child, Process, ProcessSpec
from minisgl.launcher.restarts import GroupState
from minisgl.launcher.signals import Signals
from minisgl.launcher.supervisor import Supervisor
from minisgl.models.config import ModelConfig
from minisgl.models.errors import ModelError
from minisgl.replica.epoch import OtherPod, plan_epoch
from minisgl.replica.failures import CURABLE, count_oom_kills, reason_of_refusal
from minisgl.replica.options import EngineOptions
from minisgl.replica.pods import Pods
from minisgl.replica.post_mortem import examine, shortened, timestamp
from minisgl.replica.remote_rank import RemoteRank
from minisgl.replica.report import PodFacts, ReplicaFacts, failed_status, pod_name, running_status
from minisgl.replica.restart_log import History
from minisgl.replica.timeline import Timeline, stage_of
from minisgl.replica.topology import own_place
from minisgl.tokenizer.model_files import hash_tokenizer_files
from minisgl.wire.status import EngineInfo, EngineStatus, Failure

logger = logging.getLogger(__name__)

_TURN_SECONDS: Final = 1.0
"""Between two looks at everything when nothing happens."""

_GROUP: Final = "engine"


class Leader:
    """Implements `supervisor.Surroundings`: the links to the other pods, and the status."""

    def __init__(
        self,
        options: EngineOptions,
        signals: Signals,
        board: Board,
        sockets: Path,
        on_line: Callable[[log.Line], None],
    ) -> None:
        self._options = options
        self._signals = signals
        self._board = board
        self._sockets = sockets
        self._on_line = on_line
        self._pods = Pods(options.expected, options.ports.link)
        self._history = History(options.directory / "restarts.json")
        self._last_failure = self._history.failures[-1] if self._history.failures else None
        self._oom_kills = count_oom_kills()
        self._boot_ms = time.time_ns() // 1_000_000
        self._counter = 0
        """Of starts, and so the second half of the epoch."""
        self._timeline = Timeline(time.monotonic())
        self._timeline_start = 1
        """Which start the timeline is about."""
        self._examined = True
        self._neighbours = False
        self._try_neighbours = True
        self._remote: dict[str, RemoteRank] = {}
        self._card: EngineInfo | None = None
        self._transport = ""
        self._architecture = ""

    def run(self) -> None:
        """Run until a signal, /drain, or the end of the pods together. Raises LauncherError."""
        try:
            self._run()
        finally:
            self._pods.close()

    def _run(self) -> None:
        options = self._options
        restarts = self._earlier_restarts()
        try:
            self._prepare()
        except ModelError as error:
            self._last_failure = Failure(
                at=timestamp(),
                rank=0,
                pod=options.pod,
                exit_code=None,
                reason=reason_of_refusal(error.code),
                message=shortened(str(error)),
            )
            self._stay_failed(str(error), restarts)
            return
        self._place = own_place(options.node, options.engine.device)
        while True:
            self._supervisor = self._new_supervisor(restarts)
            try:
                self._supervisor.run()
            except LauncherError as error:
                self._examine(time.monotonic())
                if not self._supervisor.draining:
                    self._stay_failed(str(error), self._supervisor.state.restarts)
                    return
                raise
            if self._signals.stops or self._signals.requested:
                self._pods.release(everybody=True)
                return
            # Another pod is about to be replaced. It has been drained for that; now it may go.
            self._pods.release(everybody=False)
            restarts = self._supervisor.state.restarts

    def _prepare(self) -> None:
        """What one look at the checkpoint tells should not take the start of all ranks to find out."""
        folder = Path(self._options.engine.model)
        model = ModelConfig.read(folder)
        model.check_tensor_parallel(self._options.engine.tensor_parallel)
        self._architecture = model.architecture
        self._hashes = hash_tokenizer_files(folder)
        self._board.files = {name: (folder / name, sha256) for name, sha256 in self._hashes.items()}

    def _new_supervisor(self, restarts: tuple[float, ...]) -> Supervisor:
        return Supervisor(
            [GroupSpec(name=_GROUP, processes=self._begin, can_start=self._all_joined, cures=CURABLE)],
            limits=self._options.limits,
            drain_timeout=self._options.drain_timeout,
            log_level=self._options.log.level,
            on_line=self._on_line,
            on_ready=lambda: None,
            on_end=lambda: None,
            create=self._create,
            surroundings=self,
            signals=self._signals,
            restarts=restarts,
        )

    def watch(self, selector: selectors.BaseSelector) -> None:
        self._pods.watch(selector)

    def turn(self) -> float:
        now = time.monotonic()
        due = self._pods.turn(now)
        group = self._supervisor.state.groups[_GROUP]
        self._follow(group, now)
        if self._pods.somebody_leaves and not self._supervisor.draining:
            self._supervisor.drain()
            due = now
        self._publish(
            running_status(
                self._options,
                self._facts(self._supervisor.state.restarts),
                group,
                self._supervisor.processes,
                self._supervisor.standbys,
                draining=self._supervisor.draining,
            )
        )
        return min(now + _TURN_SECONDS, due if due is not None else now + _TURN_SECONDS)

    def _all_joined(self) -> bool:
        return not self._pods.missing

    def _begin(self, number: int) -> list[ProcessSpec]:
        """The processes of the next epoch; all of the one before are gone."""
        timeline = self._timeline_of_next(self._supervisor.state.groups[_GROUP])
        self._examine(timeline.began)
        timeline.reach("join", time.monotonic())
        self._counter += 1
        self._examined = False
        members = [self._pods.members[index] for index in sorted(self._pods.members)]
        plan = plan_epoch(
            self._options,
            (self._boot_ms, self._counter),
            place=self._place,
            others=[
                OtherPod(host=member.connection.peer_host, leader_host=member.connection.local_host, place=member.place)
                for member in members
            ],
            sockets=self._sockets,
            tokenizer_hashes=self._hashes,
            try_neighbours=self._try_neighbours,
        )
        self._neighbours = plan.neighbours
        self._remote = {rank.spec.name: rank for rank in self._pods.begin(plan.begin)}
        return [*plan.local, *(rank.spec for rank in self._remote.values())]

    def _create(self, spec: ProcessSpec, standby: bool) -> Child:
        remote = self._remote.pop(spec.name, None)
        return remote or Process(spec, self._options.log.level, self._on_line, standby=standby)

    def _follow(self, group: GroupState, now: float) -> None:
        """Note what the epoch has reached."""
        match group.phase:
            case "ending":
                self._timeline_of_next(group)
            case "waiting":
                timeline = self._timeline_of_next(group)
                timeline.reach("reap", now)
                self._examine(timeline.began)
            case "starting":
                stage = stage_of([(process.is_ready, process.progress) for process in self._supervisor.processes])
                if stage is not None and stage != "serve":
                    self._timeline.reach(stage, now)
            case "ready" if not self._timeline.complete:
                self._timeline.reach("serve", now)
                self._see_card()
                logger.info(
                    "epoch %d of %s serves",
                    *(self._counter, self._options.expected.replica),
                    extra={"transport": self._transport, **self._timeline.seconds()},
                )

    def _timeline_of_next(self, group: GroupState) -> Timeline:
        if self._timeline_start != self._counter + 1:
            self._timeline, self._timeline_start = Timeline(group.since), self._counter + 1
        return self._timeline

    def _examine(self, failed_at: float) -> None:
        """Find out, once, why the epoch failed whose processes are all dead now."""
        dead = self._supervisor.processes
        if self._examined or not dead:
            return
        self._examined = True
        kills = count_oom_kills()
        failure = examine(
            dead,
            partial(pod_name, self._options, self._facts(()).pods),
            oom_killed=kills > self._oom_kills,
            startup_timeout=self._options.limits.startup_timeout,
            seconds_ago=time.monotonic() - failed_at,
        )
        self._oom_kills = kills
        self._last_failure = failure
        try:
            self._history.add(failure)
        except OSError as error:
            logger.warning("the restart history cannot be written: %s", error)
        if self._neighbours and not all(process.is_ready for process in dead):
            logger.warning("from now on without NVLink between the pods: the start with it failed")
            self._try_neighbours = False

    def _earlier_restarts(self) -> tuple[float, ...]:
        """When those began, on this machine's clock, that an earlier launcher of this pod has made."""
        ages = self._history.ages(datetime.now(UTC), self._options.limits.restart_window)
        return tuple(sorted(time.monotonic() - age for age in ages))

    def _stay_failed(self, message: str, restarts: tuple[float, ...]) -> None:
        """The replica stays down, and says why, until a person or the operator replaces its pods: an exit would only
        have it tried again without end."""
        logger.error("%s", message)
        self._pods.give_up(message)
        with selectors.DefaultSelector() as selector:
            self._signals.watch(selector)
            while not (self._signals.stops or self._signals.requested):
                self._publish(failed_status(self._options, self._facts(restarts), shortened(message)))
                for key, _ in selector.select(_TURN_SECONDS):
                    key.data()

    def _facts(self, restarts: tuple[float, ...]) -> ReplicaFacts:
        options, window = self._options, self._options.limits.restart_window
        return ReplicaFacts(
            epoch=(self._boot_ms, self._counter),
            timings=self._timeline.seconds(),
            restarts=sum(time.monotonic() - began < window for began in restarts),
            last_failure=self._last_failure,
            card=self._card,
            pods={
                0: PodFacts(options.pod, options.node),
                **{index: PodFacts(member.pod, member.place.node) for index, member in self._pods.members.items()},
            },
        )

    def _publish(self, status: EngineStatus) -> None:
        self._board.publish(status, "" if status.ready else f"{status.phase}: {status.progress}".removesuffix(": "))

    def _see_card(self) -> None:
        rank0 = self._supervisor.processes[0]
        assert isinstance(rank0, Process)
        message = rank0.ready_message
        self._transport = message.transport
        self._card = EngineInfo(
            name=self._options.model_name,
            architecture=self._architecture,
            max_model_len=message.max_model_len,
            vocab_size=message.vocab_size,
        )
