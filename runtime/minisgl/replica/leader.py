"""The launcher of pod 0: it supervises the ranks of all pods of a replica."""

from __future__ import annotations

import logging
import secrets
import selectors
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from minisgl import logging as log
from minisgl.errors import LauncherError, ModelError
from minisgl.launcher.control_server import StatusBoard
from minisgl.launcher.devices import device_memory
from minisgl.launcher.group import GroupSpec
from minisgl.launcher.process import Child, Process, ProcessSpec
from minisgl.launcher.rank_specs import prepared_specs
from minisgl.launcher.restarts import GroupState
from minisgl.launcher.signals import Signals
from minisgl.launcher.supervisor import Supervisor
from minisgl.models.config import ModelConfig
from minisgl.models.fit import check_fit
from minisgl.replica.diagnosis import diagnose, shortened, timestamp
from minisgl.replica.epoch import MemberAddress, plan_epoch
from minisgl.replica.failures import RETRYABLE_CODES, count_oom_kills, reason_for_code
from minisgl.replica.options import EngineOptions
from minisgl.replica.pods import MemberPods
from minisgl.replica.report import PodInfo, ReplicaInfo, failed_status, leader_status, pod_name
from minisgl.replica.restart_log import RestartLog
from minisgl.replica.start_timings import StartTimings, reached_stage
from minisgl.replica.topology import own_topology
from minisgl.tokenizer.file_hashes import hash_tokenizer_files
from minisgl.wire.status import EngineInfo, EngineStatus, Failure

logger = logging.getLogger(__name__)

_TICK_SECONDS: Final = 1.0
"""Longest time between two ticks when nothing happens."""

_GROUP: Final = "engine"


class Leader:
    """Implements `supervisor.SupervisorHooks`: the links to the member pods, and the status."""

    def __init__(
        self,
        options: EngineOptions,
        signals: Signals,
        board: StatusBoard,
        sockets: Path,
        on_line: Callable[[log.Line], None],
    ) -> None:
        """`sockets` is a directory for the sockets inside the pod; `on_line` gets each line of output of each rank."""
        self._options = options
        self._signals = signals
        self._board = board
        self._sockets = sockets
        self._on_line = on_line
        self._secret = options.secret()
        self._pods = MemberPods(options.identity, options.ports.link, self._secret)
        self._restart_log = RestartLog(options.directory / "restarts.json")
        self._last_failure = next(reversed(self._restart_log.failures), None)
        self._oom_kills = count_oom_kills()
        self._boot_ms = time.time_ns() // 1_000_000
        self._starts = 0
        """Starts so far; the second half of the epoch."""
        self._timings = StartTimings(time.monotonic())
        self._timed_start = 1
        """Number of the start that `_timings` is about."""
        self._diagnosed = True
        self._same_host = False
        self._try_same_host = True
        self._engine_info: EngineInfo | None = None

    def run(self) -> None:
        """Run until a signal, /drain, or the drain of the whole replica. Raises LauncherError."""
        try:
            self._run()
        finally:
            self._pods.close()

    def _run(self) -> None:
        options = self._options
        restarts = self._earlier_restarts()
        try:
            self._check_model()
        except ModelError as error:
            self._last_failure = Failure(
                at=timestamp(),
                rank=0,
                pod=options.pod,
                exit_code=None,
                reason=reason_for_code(error.code),
                message=shortened(str(error)),
            )
            self._wait_failed(str(error), restarts)
            return
        self._topology = own_topology(options.node, options.engine.device)
        while True:
            self._supervisor = self._new_supervisor(restarts)
            try:
                self._supervisor.run()
            except LauncherError as error:
                self._diagnose(time.monotonic())
                if not self._supervisor.draining:
                    self._wait_failed(str(error), self._supervisor.state.restarts)
                    return
                raise
            if self._signals.stops or self._signals.requested:
                self._pods.release(everybody=True)
                return
            # A member pod was asked to stop, and the replica was drained for it. Now it may exit.
            self._pods.release(everybody=False)
            restarts = self._supervisor.state.restarts

    def _check_model(self) -> None:
        """Find errors that are visible in the checkpoint's small files, and options that cannot fit, before any rank
        starts. Raises ModelError."""
        folder = Path(self._options.engine.model)
        engine = self._options.engine
        model = ModelConfig.read(folder, engine.hf_overrides, engine.quantization)
        check_fit(model, engine, device_memory(engine.device, self._options.identity.ranks_per_pod))
        self._architecture = model.architecture
        self._hashes = hash_tokenizer_files(folder)
        self._board.files = {name: (folder / name, sha256) for name, sha256 in self._hashes.items()}

    def _new_supervisor(self, restarts: tuple[float, ...]) -> Supervisor:
        engine, identity = self._options.engine, self._options.identity
        return Supervisor(
            [
                GroupSpec(
                    name=_GROUP,
                    processes=self._start_epoch,
                    can_start=lambda: self._pods.complete,
                    prepared=prepared_specs(engine, identity.ranks(0), alone=identity.pods == 1),
                    retryable_codes=RETRYABLE_CODES,
                    stall_seconds=self._options.stall_seconds,
                )
            ],
            limits=self._options.limits,
            drain_timeout=self._options.drain_timeout,
            log_level=self._options.log.level,
            on_line=self._on_line,
            hooks=self,
            signals=self._signals,
            restarts=restarts,
        )

    def watch(self, selector: selectors.BaseSelector) -> None:
        self._pods.watch(selector)

    def tick(self) -> float:
        now = time.monotonic()
        due = now + _TICK_SECONDS
        self._pods.tick(now)
        group = self._supervisor.state.groups[_GROUP]
        self._record_stages(group, now)
        if self._pods.drain_requested and not self._supervisor.draining:
            self._supervisor.drain()
            due = now
        self._publish(
            leader_status(
                self._options,
                self._info(self._supervisor.state.restarts),
                group,
                self._supervisor.processes,
                self._supervisor.standbys,
                draining=self._supervisor.draining,
            )
        )
        return due

    def _start_epoch(self, number: int) -> Sequence[ProcessSpec | Child]:
        """Start the ranks of the member pods; returns the ranks of all pods. All ranks of the last epoch are dead."""
        timings = self._timings_of_next_start(self._supervisor.state.groups[_GROUP])
        self._diagnose(timings.began)
        timings.reached("join", time.monotonic())
        self._starts += 1
        self._diagnosed = False
        plan = plan_epoch(
            self._options,
            (self._boot_ms, self._starts),
            topology=self._topology,
            members=[
                MemberAddress(host=pod.link.peer_host, leader_host=pod.link.local_host, topology=pod.topology)
                for _, pod in sorted(self._pods.joined.items())
            ],
            sockets=self._sockets,
            tokenizer_hashes=self._hashes,
            try_same_host=self._try_same_host,
            plans_token=secrets.token_hex(16),
        )
        self._same_host = plan.same_host
        return [*plan.local, *self._pods.start(plan.messages)]

    def _record_stages(self, group: GroupState, now: float) -> None:
        """Record the stages that the current start has reached."""
        match group.phase:
            case "terminating":
                self._timings_of_next_start(group)
            case "waiting":
                timings = self._timings_of_next_start(group)
                timings.reached("reap", now)
                self._diagnose(timings.began)
            case "starting":
                stage = reached_stage([(process.is_ready, process.progress) for process in self._supervisor.processes])
                if stage is not None and stage != "serve":
                    self._timings.reached(stage, now)
            case "ready" if not self._timings.complete:
                self._timings.reached("serve", now)
                self._on_ready()

    def _on_ready(self) -> None:
        rank0 = self._supervisor.processes[0]
        assert isinstance(rank0, Process)
        message = rank0.ready_message
        self._engine_info = EngineInfo(
            name=self._options.model_name,
            architecture=self._architecture,
            max_model_len=message.max_model_len,
            vocab_size=message.vocab_size,
            task=message.task,
        )
        logger.info(
            "epoch %d of %s is ready",
            *(self._starts, self._options.identity.replica),
            extra={"transport": message.transport, **self._timings.seconds()},
        )

    def _timings_of_next_start(self, group: GroupState) -> StartTimings:
        if self._timed_start != self._starts + 1:
            self._timings, self._timed_start = StartTimings(group.since), self._starts + 1
        return self._timings

    def _diagnose(self, failed_at: float) -> None:
        """Find the cause of the last epoch's failure, once. All of its processes are dead."""
        dead = self._supervisor.processes
        if self._diagnosed or not dead:
            return
        self._diagnosed = True
        kills = count_oom_kills()
        self._last_failure = diagnose(
            dead,
            partial(pod_name, self._options, self._info(()).pods),
            oom_killed=kills > self._oom_kills,
            startup_timeout=self._options.limits.startup_timeout,
            seconds_ago=time.monotonic() - failed_at,
        )
        self._oom_kills = kills
        self._restart_log.add(self._last_failure)
        if self._same_host and not all(process.is_ready for process in dead):
            logger.warning("the start with NVLink between pods failed: retrying without")
            self._try_same_host = False

    def _earlier_restarts(self) -> tuple[float, ...]:
        """Times, on this machine's monotonic clock, of the restarts by earlier launchers of this pod."""
        ages = self._restart_log.ages(datetime.now(UTC), self._options.limits.restart_window)
        return tuple(sorted(time.monotonic() - age for age in ages))

    def _wait_failed(self, message: str, restarts: tuple[float, ...]) -> None:
        """Report the failure until the pods are replaced; an exit would only have the replica restarted forever."""
        logger.error("%s", message)
        self._pods.give_up(message)
        with selectors.DefaultSelector() as selector:
            self._signals.watch(selector)
            while not (self._signals.stops or self._signals.requested):
                self._publish(failed_status(self._options, self._info(restarts), shortened(message)))
                for key, _ in selector.select(_TICK_SECONDS):
                    key.data()

    def _info(self, restarts: tuple[float, ...]) -> ReplicaInfo:
        window = self._options.limits.restart_window
        return ReplicaInfo(
            epoch=(self._boot_ms, self._starts),
            pods={
                0: PodInfo(self._options.pod, self._options.node),
                **{index: PodInfo(pod.name, pod.topology.node) for index, pod in self._pods.joined.items()},
            },
            timings=self._timings.seconds(),
            restarts=sum(time.monotonic() - began < window for began in restarts),
            last_failure=self._last_failure,
            engine_info=self._engine_info,
            peer_secret=self._secret.fingerprints(),
        )

    def _publish(self, status: EngineStatus) -> None:
        self._board.publish(status, "" if status.ready else f"{status.phase}: {status.progress}".removesuffix(": "))
