from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
import torch
import zmq

from minisgl.config import EngineConfig
from minisgl.engine.broadcast import QUEUE_PLANS, PlanBroadcast, TensorParallelEngine
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.engine import create_engine
from minisgl.engine.interface import Engine, EngineLimits, EngineStats
from minisgl.engine.worker_rank import PlanReceiver, run_plans
from minisgl.errors import EngineError
from minisgl.wire.plan import PlanError, StepPlan, StepResult
from minisgl.wire.sockets import try_send
from minisgl.wire.token_gate import show_token
from support.launcher.worker_rank_process import start_worker_rank
from support.plans import Segment, make_plan, new_row

PROMPTS = [[7, 8, 9, 10, 11, 12], [100, 101, 102], [55] * 9, [300, 12, 17, 14]]


class RecordingEngine:
    """Records its calls."""

    limits = EngineLimits(num_pages=1, page_size=1, max_running=1, max_model_len=1, vocab_size=1, eos_token_ids=())
    stats = EngineStats()

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def launch(self, plan: StepPlan) -> int:
        self.events.append(("launch", plan.step))
        return plan.step

    def collect(self, handle: int) -> StepResult:
        self.events.append(("collect", handle))
        return StepResult(handle, make_plan(0).decode_slots)

    def close(self) -> None:
        self.events.append(("close", 0))


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def source(context: zmq.Context[Any]) -> Iterator[PlanReceiver]:
    source = PlanReceiver(context, "tcp://127.0.0.1:*")
    yield source
    source.close()


def _follow(source: PlanReceiver) -> RecordingEngine:
    engine = RecordingEngine()
    run_plans(engine, source, stop=threading.Event())
    return engine


def test_plans_are_executed_in_order_until_rank_0_stops(context: zmq.Context[Any], source: PlanReceiver) -> None:
    leader = RecordingEngine()
    engine: Engine = TensorParallelEngine(leader, PlanBroadcast(context, [source.address]))
    for step in range(5):
        engine.collect(engine.launch(make_plan(step, decode=[(0, step)], epoch=9 << 40)))
    engine.close()
    events = _follow(source).events
    assert [step for event, step in events if event == "launch"] == list(range(5))
    assert [step for event, step in events if event == "collect"] == list(range(5))
    launched = 0
    for event, _ in events:
        launched += 1 if event == "launch" else -1
        assert 0 <= launched <= 2
    assert leader.events[-1] == ("close", 0)
    assert engine.limits is leader.limits and engine.stats is leader.stats


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ([make_plan(1)], "expected plan 0 of epoch 0 but got plan 1 of epoch 0"),
        ([make_plan(0), make_plan(2)], "expected plan 1 of epoch 0 but got plan 2"),
        ([make_plan(0), make_plan(0)], "expected plan 1 of epoch 0 but got plan 0"),
        ([make_plan(0, epoch=5), make_plan(1, epoch=6)], "expected plan 1 of epoch 5 but got plan 1 of epoch 6"),
    ],
)
def test_a_gap_in_the_plans_is_an_error(
    context: zmq.Context[Any], source: PlanReceiver, plans: list[StepPlan], message: str
) -> None:
    broadcast = PlanBroadcast(context, [source.address])
    for plan in plans:
        broadcast.send(plan.encode())
    with pytest.raises(EngineError, match=message) as refused:
        _follow(source)
    assert refused.value.code == "plan_gap"
    broadcast.close()


def test_a_frame_that_is_not_a_plan_is_an_error(context: zmq.Context[Any], source: PlanReceiver) -> None:
    broadcast = PlanBroadcast(context, [source.address])
    broadcast.send(b"nonsense")
    with pytest.raises(PlanError):
        _follow(source)
    broadcast.close()


_TOKEN = "5e9f0a77c1"


@pytest.fixture
def reached_by_others(context: zmq.Context[Any]) -> Iterator[PlanReceiver]:
    """Port of a pod, to which any process that reaches it can connect."""
    source = PlanReceiver(context, "tcp://127.0.0.1:*", _TOKEN)
    yield source
    source.close()


@pytest.mark.parametrize("token", ["", _TOKEN[:-1], _TOKEN + "0"])
@pytest.mark.parametrize("kind", [zmq.PUSH, zmq.DEALER])
def test_others_than_rank_0_can_neither_stop_nor_confuse_a_worker_rank(
    context: zmq.Context[Any], reached_by_others: PlanReceiver, token: str, kind: int
) -> None:
    with context.socket(kind) as other:
        other.setsockopt(zmq.LINGER, 0)
        if token:
            show_token(other, token)
        monitor = other.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        other.connect(reached_by_others.address)
        for frame in (b"", b"nonsense", make_plan(0).encode()):
            # Its connection may have been closed already.
            try_send(other, [frame])
        while not monitor.poll(10):
            assert reached_by_others.receive(10) is None
        other.disable_monitor()
    # Its connection is closed; rank 0 still gets through, and may stop the rank.
    broadcast = PlanBroadcast(context, [reached_by_others.address], _TOKEN)
    for step in range(3):
        broadcast.send(make_plan(step, decode=[(0, step)]).encode())
    broadcast.close()
    assert [step for event, step in _follow(reached_by_others).events if event == "launch"] == [0, 1, 2]


def test_plans_arrive_when_rank_0_has_connected_again_before_the_rank_has_noticed(
    context: zmq.Context[Any], reached_by_others: PlanReceiver
) -> None:
    """A network that fails for a moment ends one side of a connection."""
    with OneSidedProxy(reached_by_others.address) as proxy:
        broadcast = PlanBroadcast(context, [proxy.address], _TOKEN)
        for step in range(3):
            broadcast.send(make_plan(step, decode=[(0, step)]).encode())
            while (frame := reached_by_others.receive(1000)) is None:
                pass
            assert StepPlan.decode(frame).step == step
            proxy.end_side_of_client()
        broadcast.close()


class OneSidedProxy:
    """Passes a connection on, and can end its side of the client alone."""

    def __init__(self, address: str) -> None:
        self._target = "127.0.0.1", int(address.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._clients: list[socket.socket] = []
        self._servers: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for connection in (self._listener, *self._clients, *self._servers):
            connection.close()

    def end_side_of_client(self) -> None:
        """Returns when the client has connected again."""
        ended = len(self._clients)
        self._clients[-1].shutdown(socket.SHUT_RDWR)
        while len(self._clients) == ended:
            threading.Event().wait(0.01)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, server = self._listener.accept()[0], socket.create_connection(self._target)
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()
                self._servers.append(server)
                self._clients.append(client)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)


def test_a_worker_rank_stops_on_request(source: PlanReceiver) -> None:
    stop = threading.Event()
    stop.set()
    engine = RecordingEngine()
    run_plans(engine, source, stop=stop)
    assert engine.events == []


def test_a_worker_rank_that_does_not_read_is_detected(context: zmq.Context[Any], source: PlanReceiver) -> None:
    broadcast = PlanBroadcast(context, [source.address])
    frame = b"x" * (1 << 20)
    with pytest.raises(EngineError, match="rank 1 does not receive plans") as refused:
        for _ in range(100 * QUEUE_PLANS):
            broadcast.send(frame)
    assert refused.value.code == "follower_stuck"
    source.close()
    broadcast.close()


def _plans() -> list[StepPlan]:
    rows = [
        new_row(0),
        new_row(1, temperature=1.0, seed=-5),
        new_row(2, temperature=0.8, top_k=9, top_p=0.9, seed=6),
        new_row(3, temperature=2.0, min_p=0.01, seed=1 << 40),
    ]
    pages = [(slot, index, slot * 8 + index) for slot in range(4) for index in range(8)]
    segments = [Segment(slot, 0, prompt) for slot, prompt in enumerate(PROMPTS)]
    # The first step samples nothing.
    plans = [make_plan(0, prefill=[Segment(0, 0, PROMPTS[0][:4], sample=False)], pages=pages, rows=rows[:2])]
    plans += [make_plan(1, prefill=[Segment(0, 4, PROMPTS[0][4:]), segments[1]])]
    plans += [make_plan(2, decode=[(0, 6), (1, 3)], prefill=segments[2:], rows=rows[2:])]
    for step in range(3, 17):
        plans.append(make_plan(step, decode=[(s, len(PROMPTS[s]) + step - (2 if s < 2 else 3)) for s in (3, 0, 2, 1)]))
    return plans


def _run(engine: Engine) -> list[list[int]]:
    tokens = []
    previous = None
    for plan in _plans():
        handle = engine.launch(plan)
        if previous is not None:
            tokens.append(engine.collect(previous).tokens.tolist())
        previous = handle
    tokens.append(engine.collect(previous).tokens.tolist())
    return tokens


@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks_sample_the_tokens_of_one(
    ranks: int, checkpoint: Path, tmp_path: Path, context: zmq.Context[Any]
) -> None:
    """With four ranks each KV head is on two of them."""
    torch.set_num_threads(1)
    alone = EngineConfig(model=str(checkpoint), page_size=4, num_pages=40, max_running=4, audit=True)
    group = msgspec.structs.replace(alone, tensor_parallel=ranks, rendezvous=f"file://{tmp_path}/rendezvous")
    followers = [
        start_worker_rank(msgspec.structs.replace(group, rank=rank), f"ipc://{tmp_path}/plans{rank}")
        for rank in range(1, ranks)
    ]
    rank_0 = create_engine(group)
    engine = TensorParallelEngine(rank_0, PlanBroadcast(context, [address for _, address in followers]))
    together = _run(engine)
    engine.close()
    for process, _ in followers:
        process.join(120)
        assert process.exitcode == 0
    single = create_engine(alone)
    assert _run(single) == together
    single.close()
    assert rank_0.stats.parameter_bytes <= 0.6 * single.stats.parameter_bytes


def test_the_audit_detects_ranks_that_sample_different_tokens(
    checkpoint: Path, tmp_path: Path, context: zmq.Context[Any]
) -> None:
    torch.set_num_threads(1)
    config = EngineConfig(
        model=str(checkpoint),
        page_size=4,
        num_pages=40,
        max_running=4,
        audit=True,
        tensor_parallel=2,
        rendezvous=f"file://{tmp_path}/rendezvous",
    )
    process, address = start_worker_rank(msgspec.structs.replace(config, rank=1), f"ipc://{tmp_path}/plans")
    engine = create_engine(config)
    assert isinstance(engine, CpuEngine)
    broadcast = PlanBroadcast(context, [address])
    plans = _plans()
    # The worker rank has other filters for row 2; all ranks compute filtered rows from the same logits.
    for plan in plans[:2]:
        broadcast.send(plan.encode())
        engine.collect(engine.launch(plan))
    other = StepPlan.decode(bytearray(plans[2].encode()))
    other.new_rows[2] = 1
    broadcast.send(plans[2].encode())
    handle = engine.launch(other)
    with pytest.raises(EngineError, match="different tokens in step 2") as refused:
        engine.collect(handle)
    assert refused.value.code == "ranks_diverged"
    process.join(120)
    assert process.exitcode not in (0, None)
    broadcast.close()
    engine.close()
