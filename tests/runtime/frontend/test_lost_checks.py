"""Tokenizer workers that are lost while a request with a constraint is checked, before it is held."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from minisgl.frontend.config import FrontendConfig
from minisgl.frontend.process import FrontendServer
from minisgl.wire.sockets import Codec, open_socket
from minisgl.wire.text import (
    TEXT_WIRE_VERSION,
    CheckConstraints,
    CheckedConstraints,
    ConstraintProblem,
    ToTokenizer,
    WorkerState,
)
from support.frontend.fake_scheduler import WAIT_SECONDS
from support.frontend.served import eventually

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


class Frontend:
    """A frontend of a model at zero. The test is its tokenizer worker."""

    def __init__(self, path: Path, accept_seconds: float) -> None:
        self._address = f"ipc://{path}/text"
        config = FrontendConfig(
            port=0, tokenizer_addresses=(self._address,), ready_before_engine=True, accept_seconds=accept_seconds
        )
        self._server = FrontendServer(config)
        listening = threading.Event()
        self._thread = threading.Thread(target=self._server.run, args=(lambda _: listening.set(),))
        self._thread.start()
        assert listening.wait(WAIT_SECONDS)
        self._url = f"http://127.0.0.1:{self._server.port}"
        self._pool = ThreadPoolExecutor(4)
        self._context: zmq.Context[Any] = zmq.Context()
        self._codec: Codec[ToTokenizer] = Codec(ToTokenizer)
        self._worker: zmq.Socket[Any] | None = None

    def connect_worker(self) -> None:
        self._worker = open_socket(self._context, zmq.DEALER)
        self._worker.connect(self._address)
        state = WorkerState(
            version=TEXT_WIRE_VERSION, at=time.monotonic(), model=None, status=None, reason="at zero"
        )
        self._worker.send(self._codec.encode(state))
        eventually(lambda: httpx.get(f"{self._url}/ready").status_code == 200)

    def lose_worker(self) -> None:
        assert self._worker is not None
        self._worker.close(linger=0)
        self._worker = None

    def ask(self, regex: str, **fields: Any) -> Future[httpx.Response]:
        url = f"{self._url}/v1/chat/completions"
        return self._pool.submit(lambda: httpx.post(url, json={**CHAT, "regex": regex, **fields}, timeout=WAIT_SECONDS))

    def question(self) -> CheckConstraints:
        """The next check that the worker is asked for."""
        assert self._worker is not None and self._worker.poll(WAIT_SECONDS * 1000)
        message = self._codec.decode(self._worker.recv())
        assert isinstance(message, CheckConstraints)
        return message

    def refuse(self, question: CheckConstraints) -> None:
        assert self._worker is not None
        problem = ConstraintProblem("invalid_grammar", "missing )")
        self._worker.send(self._codec.encode(CheckedConstraints(id=question.id, problems=(problem,))))

    def close(self) -> None:
        self._server.stop()
        self._server.stop()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()
        if self._worker is not None:
            self.lose_worker()
        self._context.term()
        self._pool.shutdown()


MakeFrontend = Callable[..., Frontend]


@pytest.fixture
def make_frontend(tmp_path: Path) -> Iterator[MakeFrontend]:
    made: list[Frontend] = []

    def make(accept_seconds: float = WAIT_SECONDS) -> Frontend:
        made.append(Frontend(tmp_path, accept_seconds))
        return made[-1]

    yield make
    for frontend in made:
        frontend.close()


def assert_to_be_tried_again(response: httpx.Response) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable"), response.text
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_check_loses_its_worker_is_to_be_tried_again(make_frontend: MakeFrontend, stream: bool) -> None:
    frontend = make_frontend()
    frontend.connect_worker()
    response = frontend.ask("a+", stream=stream)
    frontend.question()
    frontend.lose_worker()
    assert_to_be_tried_again(response.result(WAIT_SECONDS))


def test_a_request_whose_check_finds_no_worker_is_to_be_tried_again_and_then_checked(
    make_frontend: MakeFrontend,
) -> None:
    frontend = make_frontend()
    assert_to_be_tried_again(frontend.ask("(((").result(WAIT_SECONDS))
    frontend.connect_worker()
    response = frontend.ask("(((")
    frontend.refuse(frontend.question())
    assert response.result(WAIT_SECONDS).json()["error"]["code"] == "invalid_grammar"


def test_a_worker_that_does_not_answer_holds_up_no_check_for_ever(make_frontend: MakeFrontend) -> None:
    frontend = make_frontend(accept_seconds=0.5)
    frontend.connect_worker()
    assert_to_be_tried_again(frontend.ask("a+").result(WAIT_SECONDS))
