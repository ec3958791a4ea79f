"""Processes that crash, stall or stop: never a truncated success, and /ready reports the state."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from minisgl.frontend.config import FrontendConfig, RequestLimits
from minisgl.frontend.errors import ApiError
from minisgl.frontend.process import FrontendServer
from minisgl.frontend.server.listeners import ServerError
from minisgl.wire.messages import Abort, Ack, Failed, FromScheduler, Submit
from support.frontend.fake_scheduler import WAIT_SECONDS, FakeScheduler, answer_with, row
from support.frontend.served import metric_sum
from support.frontend.stack import EOS, FrontendStack, ids

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
PING_SECONDS = 0.05

MakeStack = Callable[..., FrontendStack]


class Answer:
    """A request in a thread: a stream whose text is read as it arrives, or a full response."""

    def __init__(self, stack: FrontendStack, stream: bool) -> None:
        self.text = ""
        self.response: httpx.Response | None = None
        self.error: Exception | None = None
        self._started = threading.Event()
        self._url = str(stack.http.base_url.join("/v1/chat/completions"))
        self._thread = threading.Thread(target=self._run, args=(stream,))
        self._thread.start()

    def wait_for_start(self) -> None:
        assert self._started.wait(WAIT_SECONDS)

    def result(self) -> None:
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()

    def _run(self, stream: bool) -> None:
        try:
            with httpx.stream("POST", self._url, json=CHAT | {"stream": stream}, timeout=WAIT_SECONDS) as response:
                self.response = response
                for piece in response.iter_text():
                    self.text += piece
                    self._started.set()
        except httpx.HTTPError as error:
            self.error = error


def assert_broken(streamed: Answer, whole: Answer, code: str) -> None:
    streamed.result()
    whole.result()
    assert isinstance(streamed.error, httpx.RemoteProtocolError), "the connection is closed without an end"
    assert f'"code":"{code}"' in streamed.text
    assert "[DONE]" not in streamed.text
    assert whole.response is not None
    assert whole.response.status_code == 503
    assert whole.response.headers["retry-after"]
    assert f'"code":"{code}"' in whole.text


def assert_continued(streamed: Answer, whole: Answer) -> None:
    streamed.result()
    whole.result()
    assert streamed.error is None
    assert streamed.text.count("\n: continued\n") == 1 and streamed.text.endswith("data: [DONE]\n\n")
    assert '"code"' not in streamed.text
    assert whole.response is not None
    assert (whole.response.status_code, whole.response.headers["x-minisgl-continued"]) == (200, "1")


def two_answers(stack: FrontendStack) -> tuple[Answer, Answer]:
    """A stream that has begun, and a request for a full response that the engine has queued."""
    stack.scheduler.answer = lambda submit: [Ack(submit.id), row(submit.id, 0, ids("a")[0])]
    streamed, whole = Answer(stack, True), Answer(stack, False)
    streamed.wait_for_start()
    stack.scheduler.wait_for(Submit, 2)
    return streamed, whole


@pytest.mark.parametrize("workers", [0, 1])
def test_answers_go_on_at_the_next_start_of_a_lost_scheduler(make_stack: MakeStack, workers: int) -> None:
    stack = make_stack(workers=workers, limits=RequestLimits(queue_seconds=0.5))
    streamed, whole = two_answers(stack)
    stack.scheduler.close()
    stack.wait_until_served(False)
    assert stack.http.get("/ready").status_code == 200
    early = stack.http.post("/v1/chat/completions", json=CHAT)
    assert (early.status_code, early.json()["error"]["code"]) == (503, "engine_unavailable")
    assert stack.http.get("/v1/models").status_code == 503
    assert stack.http.get("/health").status_code == 200
    stack.scheduler = FakeScheduler(stack.scheduler_address, stack.card("org/next"), answer_with(ids("ok")))
    stack.wait_until_served()
    assert stack.http.get("/ready").json() == {"status": "ready", "model": "org/next"}
    after = stack.http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2})
    assert after.json()["choices"][0]["message"]["content"] == "ok"
    assert_continued(streamed, whole)


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/chat/completions", {**CHAT, "max_tokens": 2}, "data: [DONE]"),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}, "data: [DONE]"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}, "event: response.incomplete"),
        ("/v1/messages", {**CHAT, "model": "default", "max_tokens": 2}, "event: message_stop"),
        ("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": 2}}, "data: [DONE]"),
    ],
)
def test_a_stream_without_an_engine_gets_pings_until_its_answer_goes_on(
    make_stack: MakeStack, path: str, body: dict[str, Any], end: str
) -> None:
    stack = make_stack(ping_seconds=PING_SECONDS)
    stack.scheduler.answer = lambda submit: [Ack(submit.id), row(submit.id, 0, ids("a")[0])]
    began = time.monotonic()
    with stack.http.stream("POST", path, json={**body, "stream": True}) as response:
        lines = response.iter_lines()
        next(line for line in lines if '"a"' in line)
        stack.scheduler.close()
        stack.wait_until_served(False)
        # More than can have been sent before the loss was noticed.
        pings = (time.monotonic() - began) / PING_SECONDS + 2
        while pings > 0:
            pings -= next(lines) in (": ping", "event: ping")
        stack.scheduler = FakeScheduler(stack.scheduler_address, stack.card("org/tiny"), answer_with(ids("az")))
        rest = list(lines)
    goes_on = rest.index(": continued")
    assert rest.count(": continued") == 1
    assert {number > goes_on for number, line in enumerate(rest) if 'z"' in line} == {True}, rest
    assert end in rest


def test_the_header_of_a_whole_answer_counts_the_choices_that_went_on(make_stack: MakeStack) -> None:
    stack = make_stack()
    numbers = itertools.count()

    def answer(submit: Submit) -> list[FromScheduler]:
        return [Ack(submit.id), row(submit.id, 0, ids("a")[0], None if next(numbers) else "length")]

    stack.scheduler.answer = answer
    with ThreadPoolExecutor(1) as pool:
        body = {**CHAT, "n": 3, "max_tokens": 2}
        whole = pool.submit(stack.http.post, "/v1/chat/completions", json=body)
        stack.scheduler.wait_for(Submit, 3)
        stack.scheduler.close(linger_ms=int(WAIT_SECONDS * 1000))
        stack.scheduler = FakeScheduler(stack.scheduler_address, stack.card("org/tiny"), answer_with(ids("az")))
        response = whole.result(WAIT_SECONDS)
    assert sorted(choice["message"]["content"] for choice in response.json()["choices"]) == ["a", "az", "az"]
    assert response.headers["x-minisgl-continued"] == "2"


def test_a_killed_tokenizer_worker_fails_its_requests(make_stack: MakeStack) -> None:
    stack = make_stack(workers=1)
    streamed, whole = two_answers(stack)
    pid = stack.workers[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert_broken(streamed, whole, "engine_unavailable")
    stack.wait_until_ready(False)
    stack.start_worker(0)
    stack.wait_until_ready()


def test_an_engine_that_drops_this_client_counts_as_lost(make_stack: MakeStack) -> None:
    stack = make_stack()
    streamed, whole = two_answers(stack)
    stack.scheduler.answer = answer_with(ids("ok"))
    stack.scheduler.send(Failed(b"", "client_dropped", "the client does not read"))
    assert_continued(streamed, whole)
    page = stack.http.get("/metrics").text
    assert metric_sum(page, "minisgl:requests_continued_total") == 2
    assert metric_sum(page, "minisgl:request_continue_gap_seconds_count") == 2


@pytest.mark.parametrize("code", ["engine_stalled", "draining", "wire_version"])
def test_errors_of_lost_engines_are_retryable(code: str) -> None:
    error = ApiError.from_code(code, "the engine is lost")
    assert (error.status, error.headers["retry-after"]) == (503, "1")


def test_fail_all_ends_all_requests_with_its_message(make_stack: MakeStack) -> None:
    stack = make_stack()
    streamed, whole = two_answers(stack)
    stack.server.fail_all("rank1 has died")
    assert_broken(streamed, whole, "engine_unavailable")
    assert "rank1 has died" in whole.text
    assert "rank1 has died" in stack.http.get("/ready").text
    assert len(stack.scheduler.wait_for(Abort, 2)) == 2


def test_a_request_too_large_for_a_message_fails_alone(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("wire.sockets", "frontend.tokenizers", "router.worker"):
        monkeypatch.setattr(f"minisgl.{module}.MAX_MESSAGE_BYTES", 16_000)
    stack = make_stack(max_model_len=20_000)
    admission = stack.server._tokenizers.requests.admission
    stack.scheduler.answer = lambda submit: [Ack(submit.id), row(submit.id, 0, ids("a")[0])]
    with stack.http.stream(
        "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 2, "stream": True}
    ) as response:
        lines = response.iter_lines()
        next(line for line in lines if '"text":"a"' in line)
        for path, body in (
            # The request fits, and its reply does not.
            ("/tokenize", {"prompt": "é" * 4_000}),
            ("/detokenize", {"tokens": [EOS] * 3_900}),
            # The request does not.
            ("/detokenize", {"tokens": [1] * 5_000}),
            ("/tokenize", {"prompt": "a" * 17_000}),
            ("/v1/completions", {"prompt": [1] * 5_000, "n": 2}),
            ("/v1/completions", {"prompt": "a" * 17_000}),
            # The first of its choices would fit.
            ("/v1/completions", {"prompt": ["a", "a" * 17_000]}),
        ):
            refused = stack.http.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request"), path
            assert (admission.waiting, admission.waiting_tokens) == (0, 0)
        (submit,) = stack.scheduler.received(Submit)
        stack.scheduler.send(row(submit.id, 1, ids("b")[0], "length"), to=submit)
        assert "data: [DONE]" in list(lines)


def test_not_ready_before_the_scheduler_has_answered(make_stack: MakeStack) -> None:
    stack = make_stack(wait=False, limits=RequestLimits(queue_seconds=0.5))
    stack.scheduler.close()
    response = stack.wait_until_ready(False)
    assert response.json()["error"]["message"]
    assert stack.http.get("/health").json() == {"status": "ok"}
    assert stack.http.post("/v1/completions", json={"prompt": "a"}).status_code == 503


def test_not_ready_without_recent_status_of_the_engine(make_stack: MakeStack) -> None:
    stack = make_stack(stale_seconds=0.3)
    stack.scheduler.sends_status = False
    assert "no status from the engine" in stack.wait_until_ready(False).text
    stack.scheduler.sends_status = True
    stack.wait_until_ready()


def test_a_request_that_is_not_queued_in_time_fails(make_stack: MakeStack) -> None:
    # Long enough for the request to be on its way to the scheduler.
    stack = make_stack(accept_seconds=2.0)
    response = stack.http.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
    assert stack.scheduler.wait_for(Abort)[0].id == stack.scheduler.received(Submit)[0].id


def test_a_silent_stream_gets_keepalive_comments(make_stack: MakeStack) -> None:
    stack = make_stack(ping_seconds=0.05)
    stack.scheduler.answer = lambda submit: [Ack(submit.id)]
    with stack.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True, "max_tokens": 1}) as response:
        lines = response.iter_lines()
        while next(lines) != ": ping":
            continue
        (submit,) = stack.scheduler.received(Submit)
        stack.scheduler.send(row(submit.id, 0, ids("a")[0], "length"), to=submit)
        rest = [line for line in lines if line.startswith("data:")]
    assert rest[-1] == "data: [DONE]"
    assert '"content":"a"' in rest[-3]


def test_running_requests_complete_during_shutdown(make_stack: MakeStack) -> None:
    stack = make_stack()
    streamed, whole = two_answers(stack)
    stack.server.stop()
    assert_listener_closes(stack)
    for submit in stack.scheduler.received(Submit):
        stack.scheduler.send(row(submit.id, 1, ids("b")[0], "length"), to=submit)
    streamed.result()
    whole.result()
    assert streamed.error is None
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert '"content":"ab"' in whole.text
    stack.join()


def assert_listener_closes(stack: FrontendStack) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", stack.server.port), WAIT_SECONDS).close()
        except OSError:
            return


def test_requests_that_exceed_the_drain_time_end_in_an_error(make_stack: MakeStack) -> None:
    stack = make_stack(drain_seconds=0.2)
    streamed, whole = two_answers(stack)
    stack.server.stop()
    assert_broken(streamed, whole, "shutting_down")
    stack.join()


def test_a_second_signal_ends_running_requests_immediately(make_stack: MakeStack) -> None:
    stack = make_stack(drain_seconds=600)
    streamed, whole = two_answers(stack)
    stack.server.stop()
    stack.server.stop()
    assert_broken(streamed, whole, "shutting_down")
    stack.join()


SERVE = """
import sys, msgspec
from minisgl.frontend.config import FrontendConfig, RequestLimits
from minisgl.frontend.process import FrontendServer
config = msgspec.json.decode(sys.argv[1], type=FrontendConfig)
FrontendServer(config).run(lambda port: print(port, flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_with_exit_code_0(tmp_path: Path, number: signal.Signals) -> None:
    config = FrontendConfig(port=0, tokenizer_addresses=(f"ipc://{tmp_path}/text",))
    command = [sys.executable, "-c", SERVE, msgspec.json.encode(config).decode()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=WAIT_SECONDS).status_code == 200
        process.send_signal(number)
        assert process.wait(WAIT_SECONDS) == 0


def config(**changes: Any) -> FrontendConfig:
    return FrontendConfig(tokenizer_addresses=("ipc:///nowhere",), **changes)


def test_the_error_names_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=rf"127\.0\.0\.1:{port}: another process .* --port") as raised:
            FrontendServer(config(port=port))
    assert raised.value.code == "cannot_listen"
    assert "\n" not in str(raised.value)


def test_the_error_names_the_flag_for_a_host_that_is_not_local() -> None:
    with pytest.raises(ServerError, match="--host"):
        FrontendServer(config(host="203.0.113.1", port=0))
    with pytest.raises(ServerError, match="--host") as raised:
        FrontendServer(config(host="no such host", port=0))
    assert raised.value.code == "bad_host"


def test_an_inherited_socket_is_served(make_stack: MakeStack) -> None:
    inherited = socket.socket()
    inherited.bind(("127.0.0.1", 0))
    port = inherited.getsockname()[1]
    stack = make_stack(socket_fd=inherited.detach())
    assert stack.server.port == port
    assert stack.http.get("/health").status_code == 200
