"""The main loop of rank 0 on real sockets, with the hash model as the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from minisgl.config import EngineConfig
from minisgl.engine.interface import EngineLimits
from minisgl.scheduler import clients as clients_module
from minisgl.scheduler.process import SchedulerProcessConfig, run
from minisgl.wire.messages import (
    FEATURES,
    FINISH_REASONS,
    WIRE_VERSION,
    Abort,
    Ack,
    Failed,
    FromScheduler,
    Hello,
    ModelCard,
    Status,
    Tokens,
    Welcome,
)
from minisgl.wire.plan import StepPlan, StepResult
from minisgl.wire.sockets import Codec, open_socket
from support.constrained import ToyGrammar, ToyGrammars
from support.messages import submit_of
from support.numerics.kv_engine import KvEngine, reference
from support.scheduling import EOS, VOCAB

LIMITS = EngineLimits(
    num_pages=512, page_size=4, max_running=8, max_model_len=2000, vocab_size=VOCAB, eos_token_ids=EOS
)
LONG = 1900
"""Number of tokens of an answer that runs until it is aborted."""


class Client:
    """The frontend's side of the connection."""

    def __init__(self, context: zmq.Context[Any], address: str, version: int = WIRE_VERSION) -> None:
        self.socket = open_socket(context, zmq.DEALER)
        self.socket.connect(address)
        self.codec: Codec[FromScheduler] = Codec(FromScheduler)
        self.answers: dict[bytes, list[int]] = {}
        self.finish: dict[bytes, str] = {}
        self.last_status: Status | None = None
        self.send(Hello(version, "test"))

    def send(self, message: Any) -> None:
        self.socket.send(self.codec.encode(message))

    def receive(self, timeout_ms: int = 60_000) -> FromScheduler:
        assert self.socket.poll(timeout_ms), "the scheduler said nothing"
        return self.codec.decode(self.socket.recv())

    def wait_for(self, test: Callable[[FromScheduler], bool], timeout: float = 60) -> FromScheduler:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            message = self.receive()
            if isinstance(message, Tokens):
                rows = message.rows()
                for i, request_id in enumerate(rows.ids):
                    answer = self.answers.setdefault(request_id, [])
                    assert rows.index[i] == len(answer)
                    answer.append(int(rows.token[i]))
                    if rows.finish[i]:
                        self.finish[request_id] = str(FINISH_REASONS[rows.finish[i]])
            if test(message):
                return message
        raise AssertionError("the message did not come")

    def submit(self, number: int, prompt: list[int], max_tokens: int, **options: Any) -> bytes:
        request_id = number.to_bytes(16, "big")
        options.setdefault("seed", 0)
        self.send(submit_of(id=request_id, prompt=np.array(prompt, "<i4").tobytes(), max_tokens=max_tokens, **options))
        return request_id


@pytest.fixture(params=["ipc", "tcp"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, ModelCard]]:
    address = f"ipc://{tmp_path}/s" if request.param == "ipc" else "tcp://127.0.0.1:*"
    config = SchedulerProcessConfig(
        engine=EngineConfig(model="", max_step_tokens=32), address=address, model_name="tiny", epoch=(5, 1)
    )
    stop, listening = threading.Event(), threading.Event()
    found: list[tuple[str, ModelCard]] = []

    def ready(address: str, card: ModelCard) -> None:
        found.append((address, card))
        listening.set()

    thread = threading.Thread(target=lambda: run(config, lambda: KvEngine(LIMITS), ready=ready, stop=stop))
    thread.start()
    assert listening.wait(60)
    yield found[0]
    stop.set()
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_welcome_contains_the_model_card(server: tuple[str, ModelCard], context: zmq.Context[Any]) -> None:
    welcome = Client(context, server[0]).receive()
    assert welcome == Welcome(version=WIRE_VERSION, epoch=(5, 1), model=server[1], features=FEATURES)
    assert server[1].vocab_size == VOCAB


def test_a_client_of_the_version_before_is_welcomed_in_that_version(
    server: tuple[str, ModelCard], context: zmq.Context[Any]
) -> None:
    welcome = Client(context, server[0], version=WIRE_VERSION - 1).receive()
    assert isinstance(welcome, Welcome)
    assert welcome.version == WIRE_VERSION - 1


def test_another_wire_version_is_rejected_by_name(server: tuple[str, ModelCard], context: zmq.Context[Any]) -> None:
    message = Client(context, server[0], version=WIRE_VERSION + 7).receive()
    assert isinstance(message, Failed)
    assert message.code == "wire_version"


def test_two_clients_receive_their_own_answers(server: tuple[str, ModelCard], context: zmq.Context[Any]) -> None:
    one, two = Client(context, server[0]), Client(context, server[0])
    ids = [client.submit(i, [i, 3], 12, ignore_eos=True) for i, client in enumerate((one, two, one, two))]
    for client, mine in ((one, ids[::2]), (two, ids[1::2])):
        client.wait_for(lambda _, c=client, m=mine: set(c.finish) == set(m))  # type: ignore[misc]
        for request_id in mine:
            number = int.from_bytes(request_id, "big")
            assert client.answers[request_id] == reference([number, 3], 0, 12, VOCAB, set())
            assert client.finish[request_id] == "length"


def test_ack_precedes_tokens_and_invalid_requests_are_rejected(
    server: tuple[str, ModelCard], context: zmq.Context[Any]
) -> None:
    client = Client(context, server[0])
    bad = client.submit(1, [VOCAB + 5], 3)
    good = client.submit(2, [1], 3, ignore_eos=True)
    seen: list[FromScheduler] = []
    client.wait_for(lambda m: bool(seen.append(m)) or good in client.finish)  # type: ignore[func-returns-value]
    kinds = [m for m in seen if isinstance(m, Ack | Failed | Tokens)]
    assert isinstance(kinds[0], Failed)
    assert (kinds[0].id, kinds[0].code) == (bad, "invalid_token")
    assert kinds[1] == Ack(good)
    assert all(isinstance(m, Tokens) for m in kinds[2:])


def test_abort_frees_pages_and_status_reports_it(server: tuple[str, ModelCard], context: zmq.Context[Any]) -> None:
    client = Client(context, server[0])
    request_id = client.submit(1, [1, 2], LONG, ignore_eos=True)
    client.wait_for(lambda m: isinstance(m, Tokens))
    client.send(Abort(request_id))
    status = client.wait_for(lambda m: isinstance(m, Status) and not m.running and m.counters.prompt_tokens > 0)
    assert isinstance(status, Status)
    assert (status.running, status.waiting, status.used_pages) == (0, 0, 0)
    assert request_id not in client.finish


def test_requests_of_a_disconnected_client_end(server: tuple[str, ModelCard], context: zmq.Context[Any]) -> None:
    leaving, staying = Client(context, server[0]), Client(context, server[0])
    for number in range(8):
        leaving.submit(number, [number], LONG, ignore_eos=True)
    # Messages in transit when it disconnects may never arrive.
    for _ in range(8):
        leaving.wait_for(lambda m: isinstance(m, Ack))
    leaving.wait_for(lambda m: isinstance(m, Tokens))
    leaving.socket.close(linger=0)
    staying.wait_for(
        lambda m: isinstance(m, Status) and not m.running and not m.waiting and m.counters.prompt_tokens > 0
    )


def test_an_invalid_message_drops_only_its_sender(server: tuple[str, ModelCard], context: zmq.Context[Any]) -> None:
    vandal, client = Client(context, server[0]), Client(context, server[0])
    assert isinstance(vandal.receive(), Welcome)
    vandal.socket.send(b"\x80\x04pickle")
    vandal.socket.send_multipart([b"", b"", b""])
    stranger = open_socket(context, zmq.DEALER)
    stranger.connect(server[0])
    stranger.send(client.codec.encode(Abort(bytes(16))))
    request_id = client.submit(1, [1], 3, ignore_eos=True)
    client.wait_for(lambda _: request_id in client.finish)
    assert client.answers[request_id] == reference([1], 0, 3, VOCAB, set())


class FailingEngine(KvEngine):
    """Fails in its second step, and never closes."""

    def collect(self, handle: StepPlan) -> StepResult:
        if handle.step == 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")
        return super().collect(handle)

    def close(self) -> None:
        raise AssertionError("a broken device may not return")


def test_a_step_that_fails_is_reported_to_every_client(tmp_path: Path, context: zmq.Context[Any]) -> None:
    config = SchedulerProcessConfig(engine=EngineConfig(model=""), address=f"ipc://{tmp_path}/s", model_name="tiny")
    listening = threading.Event()

    def serve() -> None:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            run(config, lambda: FailingEngine(LIMITS), ready=lambda *_: listening.set(), stop=threading.Event())

    thread = threading.Thread(target=serve)
    thread.start()
    assert listening.wait(60)
    clients = [Client(context, config.address) for _ in range(2)]
    for client in clients:
        assert isinstance(client.receive(), Welcome)
    clients[0].submit(1, [1], LONG, ignore_eos=True)
    reason = "the engine failed in a step: RuntimeError: CUDA error: an illegal memory access was encountered"
    for client in clients:
        assert client.wait_for(lambda m: isinstance(m, Failed)) == Failed(b"", "engine_unavailable", reason)
    thread.join(60)
    assert not thread.is_alive()


class IdleEngine(KvEngine):
    """Notes that it may use idle time, and that no step is in flight then."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.was_idle = threading.Event()

    def use_idle_time(self) -> bool:
        assert not self._queue
        self.was_idle.set()
        return True


def test_an_engine_may_use_the_time_without_requests(tmp_path: Path, context: zmq.Context[Any]) -> None:
    config = SchedulerProcessConfig(engine=EngineConfig(model=""), address=f"ipc://{tmp_path}/s", model_name="tiny")
    engine, stop, listening = IdleEngine(), threading.Event(), threading.Event()
    arguments: dict[str, Any] = {"ready": lambda *_: listening.set(), "stop": stop}
    thread = threading.Thread(target=lambda: run(config, lambda: engine, **arguments))
    thread.start()
    try:
        assert listening.wait(60)
        client = Client(context, config.address)
        for number in range(2):
            assert engine.was_idle.wait(60)
            request_id = client.submit(number, [1], 50, ignore_eos=True)
            client.wait_for(lambda _, wanted=request_id: wanted in client.finish)
            engine.was_idle.clear()
        assert engine.was_idle.wait(60)
    finally:
        stop.set()
        thread.join(60)


def test_a_deadline_is_enforced_by_the_server(server: tuple[str, ModelCard], context: zmq.Context[Any]) -> None:
    client = Client(context, server[0])
    request_id = client.submit(1, [1], LONG, ignore_eos=True, remaining_ms=1)
    message = client.wait_for(lambda m: isinstance(m, Failed))
    assert message == Failed(request_id, "deadline_exceeded", message.message)  # type: ignore[union-attr]


def test_a_client_that_does_not_read_is_dropped_without_blocking_others(
    tmp_path: Path, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients_module, "MAX_BACKLOG_BYTES", 1000)
    card = ModelCard(name="m", revision="", max_model_len=1, vocab_size=1, eos_token_ids=(), tokenizer_hashes={})
    clients = clients_module.Clients(context, f"ipc://{tmp_path}/c", card, (0, 0))
    lazy = Client(context, clients.address)
    while 0 not in clients._by_number:
        assert list(clients.receive(1000)) == []
    reader = Client(context, clients.address)
    while 1 not in clients._by_number:
        assert list(clients.receive(1000)) == []
    gone: list[int] = []
    message = Failed(bytes(16), "code", "x" * 100_000)
    for _ in range(10_000):
        clients.send(0, message)
        gone += clients.take_disconnected()
        if gone:
            break
    assert gone == [0]
    clients.send(0, message)
    clients.send(1, Ack(bytes(16)))
    assert isinstance(reader.receive(), Welcome)
    assert reader.receive() == Ack(bytes(16))
    lazy.socket.close(linger=0)
    clients.close()


def test_requests_with_a_grammar_are_accepted_when_it_is_compiled(tmp_path: Path, context: zmq.Context[Any]) -> None:
    grammars: Any = ToyGrammars(VOCAB)
    config = SchedulerProcessConfig(
        engine=EngineConfig(model=""), address=f"ipc://{tmp_path}/s", model_name="tiny", epoch=(5, 1)
    )
    stop, listening = threading.Event(), threading.Event()
    arguments: dict[str, Any] = {"ready": lambda address, card: listening.set(), "stop": stop, "compiler": grammars}
    thread = threading.Thread(target=lambda: run(config, lambda: KvEngine(LIMITS), **arguments))
    thread.start()
    try:
        assert listening.wait(60)
        client = Client(context, config.address)
        welcome = client.receive()
        assert isinstance(welcome, Welcome) and welcome.features == FEATURES
        grammar = ToyGrammar(factor=3, length=5, least=5)
        good = client.submit(1, [1, 2], 9, grammar=grammar.text)
        client.wait_for(lambda message: message == Ack(good))
        client.wait_for(lambda message: good in client.finish)
        assert client.finish[good] == "stop" and len(client.answers[good]) == 6
        wrong = client.submit(2, [1, 2], 9, grammar=ToyGrammar(factor=1, length=1, least=1, valid=False).text)
        answer = client.wait_for(lambda message: isinstance(message, Ack | Failed) and message.id == wrong)
        assert isinstance(answer, Failed) and answer.code == "invalid_grammar"
    finally:
        stop.set()
        thread.join(60)
