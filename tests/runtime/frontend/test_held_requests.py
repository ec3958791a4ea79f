"""Requests that arrive while no engine is routable: they wait for one, within limits."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from minisgl.frontend.config import Access, FrontendConfig, RequestLimits
from minisgl.frontend.process import FrontendServer
from minisgl.router.config import EngineDiscovery, LocalEngine, TokenizerConfig
from minisgl.router.worker import Worker
from minisgl.tokenizer.file_hashes import hash_tokenizer_files
from minisgl.wire.messages import Ack, EndDrain, Submit
from minisgl.wire.status import SERVING_HEADER
from support.frontend.fake_scheduler import WAIT_SECONDS, FakeScheduler, answer_with, card, row
from support.frontend.stack import TEMPLATE, TOKENIZER, ids
from support.tiny_tokenizers import write_directory

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
RESPONSES: dict[str, Any] = {"input": "Hi", "max_output_tokens": 1}
MESSAGES: dict[str, Any] = {**CHAT, "model": "default"}
BAD_CHAT: dict[str, Any] = {**CHAT, "messages": [{"role": "user", "content": "bad"}]}
"""The model's template refuses it, which only its tokenizer knows."""


class Pod:
    """A frontend with a control port, whose engine comes later."""

    def __init__(self, path: Path, *, at_zero: bool = False, **config: Any) -> None:
        """`at_zero`: engines are looked up, and there is none."""
        self.model = write_directory(path / "model", TOKENIZER, chat_template=TEMPLATE)
        self._address = f"ipc://{path}/scheduler"
        local = LocalEngine(scheduler_address=self._address, model=str(self.model))
        tokenizer = TokenizerConfig(
            engines=EngineDiscovery(host="engines", cache=str(path / "cache")) if at_zero else local,
            frontend_address=f"ipc://{path}/text",
            names=config.get("names", ()),
        )
        self._worker = Worker(tokenizer, lambda _: frozenset()) if at_zero else None
        self._worker_thread = threading.Thread(target=self._worker.serve) if self._worker is not None else None
        if self._worker_thread is not None:
            self._worker_thread.start()
        self.server = FrontendServer(
            FrontendConfig(
                port=0,
                control_port=0,
                tokenizer_addresses=(tokenizer.frontend_address,),
                tokenizer=None if at_zero else tokenizer,
                **{"ready_before_engine": True, **config},
            )
        )
        listening = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(lambda _: listening.set(),))
        self._thread.start()
        assert listening.wait(WAIT_SECONDS)
        self.url = f"http://127.0.0.1:{self.server.port}"
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_SECONDS)
        self.control = httpx.Client(base_url=f"http://127.0.0.1:{self.server.control_port}", timeout=WAIT_SECONDS)
        self._pool = ThreadPoolExecutor(64)
        self.scheduler: FakeScheduler | None = None

    def start_engine(self, text: str = "z") -> FakeScheduler:
        model = card("org/tiny", tokenizer_hashes=hash_tokenizer_files(self.model))
        self.scheduler = FakeScheduler(self._address, model, answer_with(ids(text)))
        return self.scheduler

    def post(self, path: str, body: Any, **options: Any) -> Future[httpx.Response]:
        url = f"{self.url}{path}"
        if isinstance(body, bytes):
            options["content"] = body
            options["headers"] = {"content-type": "application/json", **options.get("headers", {})}
        else:
            options["json"] = body
        return self._pool.submit(lambda: httpx.post(url, timeout=WAIT_SECONDS, **options))

    def status(self, query: str = "", serving: str | None = None) -> dict[str, Any]:
        headers = {} if serving is None else {SERVING_HEADER: serving}
        answer: dict[str, Any] = self.control.get(f"/status{query}", headers=headers).json()
        return answer

    def wait_for_held(self, count: int) -> None:
        self.until(lambda: self.status()["held"] == count)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS / 4
        while not condition():
            assert time.monotonic() < deadline, self.status()
            time.sleep(0.01)

    def close(self) -> None:
        self.http.close()
        self.control.close()
        self.server.stop()
        self.server.stop()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()
        if self._worker is not None and self._worker_thread is not None:
            self._worker.stop()
            self._worker_thread.join(WAIT_SECONDS)
            assert not self._worker_thread.is_alive()
        self._pool.shutdown()
        if self.scheduler is not None:
            self.scheduler.close()


MakePod = Callable[..., Pod]


@pytest.fixture
def make_pod(tmp_path: Path) -> Iterator[MakePod]:
    made: list[Pod] = []

    def make(**config: Any) -> Pod:
        made.append(Pod(tmp_path / str(len(made)), **config))
        return made[-1]

    yield make
    for pod in made:
        pod.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
        ("/v1/responses", RESPONSES),
        ("/v1/messages", MESSAGES),
        ("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": 1}}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_held_request_is_answered_when_an_engine_comes(
    make_pod: MakePod, path: str, body: dict[str, Any], stream: bool
) -> None:
    pod = make_pod()
    answer = pod.post(path, {**body, "stream": stream})
    pod.wait_for_held(1)
    assert (pod.status()["running"], pod.status()["idle_seconds"]) == (0, 0)
    pod.start_engine()
    response = answer.result(WAIT_SECONDS)
    assert response.status_code == 200
    assert '"z"' in response.text
    assert not response.text.startswith(": ping")
    pod.until(lambda: pod.status()["idle_seconds"] > 0)
    assert (pod.status()["held"], pod.status()["running"]) == (0, 0)


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/chat/completions", CHAT, "data: [DONE]"),
        ("/v1/responses", RESPONSES, "event: response.incomplete"),
        ("/v1/messages", MESSAGES, "event: message_stop"),
    ],
)
def test_a_stream_gets_headers_and_pings_while_it_is_held(
    make_pod: MakePod, path: str, body: dict[str, Any], end: str
) -> None:
    pod = make_pod(header_seconds=0.1, ping_seconds=0.1)
    with pod.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = response.iter_lines()
        assert [next(lines) for _ in range(4)] == [": ping", "", ": ping", ""]
        pod.start_engine()
        rest = "\n".join(lines)
    assert end in rest


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/v1/chat/completions", CHAT, 'data: {"error":{"message":"no engine could take the request'),
        ("/v1/responses", RESPONSES, 'event: error\ndata: {"type":"error","sequence_number":0,'),
        ("/v1/messages", MESSAGES, 'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"'),
    ],
)
def test_a_stream_with_headers_that_no_engine_takes_ends_in_an_error_event(
    make_pod: MakePod, path: str, body: dict[str, Any], error: str
) -> None:
    pod = make_pod(header_seconds=0.1, limits=RequestLimits(queue_seconds=1.0))
    text = ""
    with pod.http.stream("POST", path, json={**body, "stream": True}) as response, pytest.raises(httpx.TransportError):
        for piece in response.iter_text():
            text += piece
    assert text.startswith(": ping\n\n")
    assert error in text and '"code":"engine_unavailable"' in text
    counted = re.compile(r'request_errors_total\S*code="engine_unavailable"\S* 1$', re.MULTILINE)
    pod.until(lambda: counted.search(pod.http.get("/metrics").text) is not None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", BAD_CHAT),
        ("/v1/responses", {**RESPONSES, "input": "bad"}),
        ("/v1/messages", {**BAD_CHAT, "model": "default"}),
    ],
)
def test_an_error_of_a_held_stream_without_headers_has_a_status(
    make_pod: MakePod, path: str, body: dict[str, Any]
) -> None:
    pod = make_pod(header_seconds=WAIT_SECONDS)
    refused = pod.post(path, {**body, "stream": True})
    pod.wait_for_held(1)
    pod.start_engine()
    response = refused.result(WAIT_SECONDS)
    assert (response.status_code, response.headers["content-type"]) == (400, "application/json")
    assert response.json()["error"]["message"]


def test_a_stream_that_no_engine_takes_before_its_headers_has_a_status(make_pod: MakePod) -> None:
    pod = make_pod(limits=RequestLimits(queue_seconds=0.5))
    response = pod.post("/v1/chat/completions", {**CHAT, "stream": True}).result(WAIT_SECONDS)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/v1/chat/completions", BAD_CHAT, 'data: {"error":{"message":"'),
        (
            "/v1/responses",
            {**RESPONSES, "input": "bad"},
            'event: error\ndata: {"type":"error","sequence_number":0,',
        ),
        (
            "/v1/messages",
            {**BAD_CHAT, "model": "default"},
            'event: error\ndata: {"type":"error","error":{"type":"invalid_request_error"',
        ),
    ],
)
def test_an_error_in_the_body_of_a_held_stream_with_headers_is_an_event(
    make_pod: MakePod, path: str, body: dict[str, Any], error: str
) -> None:
    pod = make_pod(header_seconds=0.1)
    text = ""
    with pod.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        pieces = response.iter_text()
        text += next(pieces)
        scheduler = pod.start_engine()
        with pytest.raises(httpx.RemoteProtocolError):
            for piece in pieces:
                text += piece
    assert text.startswith(": ping\n\n")
    assert error in text and '"code":"chat_template_error"' in text
    assert not scheduler.received(Submit)
    counted = re.compile(r'request_errors_total\S*code="chat_template_error"\S* 1$', re.MULTILINE)
    pod.until(lambda: counted.search(pod.http.get("/metrics").text) is not None)


def test_an_answer_in_one_piece_keeps_its_status_however_long_it_is_held(make_pod: MakePod) -> None:
    pod = make_pod(header_seconds=0.1, limits=RequestLimits(queue_seconds=0.5))
    response = pod.post("/v1/chat/completions", CHAT).result(WAIT_SECONDS)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
    assert int(response.headers["retry-after"]) >= 1
    assert pod.status()["held"] == 0


KEY = {"authorization": "Bearer sk-one"}


@pytest.fixture(scope="module")
def idle_pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    """A frontend with keys and a known model, for requests that must not start an engine."""
    path = tmp_path_factory.mktemp("idle")
    (path / "keys").write_text("sk-one\n")
    access = Access(api_keys=str(path / "keys"))
    pod = Pod(path, at_zero=True, names=("tiny", "other"), access=access, max_body_bytes=1 << 20)
    pod.until(lambda: pod.status()["ready"])
    yield pod
    pod.close()


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "code"),
    [
        ("/v1/chat/completions", b"not json at all", KEY, 400, "invalid_json"),
        ("/v1/chat/completions", b'{"stream": true, broken', KEY, 400, "invalid_json"),
        ("/v1/chat/completions", b"", KEY, 400, "invalid_json"),
        ("/v1/chat/completions", b"[]", KEY, 400, "invalid_value"),
        ("/v1/chat/completions", b"{}", KEY, 400, "missing_required_parameter"),
        ("/v1/completions", b"{}", KEY, 400, "missing_required_parameter"),
        ("/v1/responses", b"{}", KEY, 400, "missing_required_parameter"),
        ("/v1/messages", b"{}", KEY, 400, "missing_required_parameter"),
        ("/generate", b"{}", KEY, 400, "invalid_value"),
        ("/v1/chat/completions", {**CHAT, "n": -1}, KEY, 400, "invalid_value"),
        ("/v1/chat/completions", {**CHAT, "model": "gpt-4o"}, KEY, 404, "model_not_found"),
        ("/v1/completions", {"prompt": "Hi", "model": "gpt-4o"}, KEY, 404, "model_not_found"),
        ("/v1/messages", {**CHAT, "model": "claude"}, KEY, 404, "model_not_found"),
        ("/v1/completions", {"prompt": ["Hi"] * 4096}, KEY, 400, "invalid_value"),
        ("/v1/completions", {"prompt": "x" * (1 << 20)}, KEY, 413, "body_too_large"),
        ("/v1/completions", {"prompt": "Hi", "regex": "(" * 3}, KEY, 400, "invalid_grammar"),
        ("/v1/completions", {"prompt": "Hi"}, KEY | {"x-request-timeout-ms": "soon"}, 400, "invalid_value"),
        ("/v1/chat/completions", CHAT, {}, 401, "missing_api_key"),
        ("/v1/chat/completions", CHAT, {"authorization": "Bearer sk-guess"}, 401, "invalid_api_key"),
        ("/v1/chat/completion", CHAT, KEY, 404, "not_found"),
        ("/wp-login.php", b"log=admin", KEY, 404, "not_found"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_at_once_and_starts_no_engine(
    idle_pod: Pod, path: str, body: Any, headers: dict[str, str], status: int, code: str
) -> None:
    idle = idle_pod.status()["idle_seconds"]
    response = idle_pod.post(path, body, headers=headers).result(WAIT_SECONDS)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    now = idle_pod.status()
    assert (now["held"], now["running"]) == (0, 0)
    assert now["idle_seconds"] >= idle, "the model is as idle as before"


@pytest.mark.parametrize("model", ["tiny", "other", "default", None])
def test_a_valid_request_with_a_key_is_held(idle_pod: Pod, model: str | None) -> None:
    body = CHAT if model is None else {**CHAT, "model": model}
    request = httpx.Request("POST", f"{idle_pod.url}/v1/chat/completions", json=body, headers=KEY)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with socket.create_connection((request.url.host, request.url.port), WAIT_SECONDS) as client:
        client.sendall(f"POST {request.url.path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
        idle_pod.wait_for_held(1)
        load = httpx.get(f"{idle_pod.url}/load", headers=KEY).json()
        assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 1)
    idle_pod.wait_for_held(0)


def test_an_invalid_request_does_not_keep_a_model_awake(make_pod: MakePod) -> None:
    pod = make_pod()
    pod.start_engine()
    pod.until(lambda: pod.http.get("/v1/models").status_code == 200)
    pod.until(lambda: pod.status()["idle_seconds"] > 0)
    before = pod.status()["idle_seconds"]
    for body in (b"", b"{}", {**CHAT, "model": "gpt-4o"}, {**CHAT, "regex": "((("}):
        assert pod.post("/v1/chat/completions", body).result(WAIT_SECONDS).status_code in (400, 404)
    assert pod.status()["idle_seconds"] >= before
    assert pod.post("/v1/chat/completions", CHAT).result(WAIT_SECONDS).status_code == 200


def test_a_model_at_zero_is_listed_and_measured(idle_pod: Pod) -> None:
    models = httpx.get(f"{idle_pod.url}/v1/models", headers=KEY).json()["data"]
    assert [(model["id"], model["root"], model["max_model_len"]) for model in models] == [
        ("tiny", "tiny", None),
        ("other", "tiny", None),
    ]
    assert all(model["created"] > 1_700_000_000 for model in models)
    assert httpx.get(f"{idle_pod.url}/v1/models/other", headers=KEY).json()["id"] == "other"
    assert httpx.get(f"{idle_pod.url}/v1/models/gpt-4o", headers=KEY).status_code == 404
    page = httpx.get(f"{idle_pod.url}/metrics").text
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert re.search(rf'^vllm:{gauge}{{model_name="tiny",engine="0"}} 0(\.0)?$', page, re.MULTILINE), gauge
    assert idle_pod.status()["held"] == 0


def test_a_frontend_that_has_not_reached_its_engine_yet_reports_no_load(make_pod: MakePod) -> None:
    pod = make_pod(names=("tiny",))
    pod.until(lambda: pod.status()["ready"])
    assert "vllm:num_requests_waiting" not in pod.http.get("/metrics").text
    assert (pod.http.get("/load").json(), pod.http.get("/get_load").json()) == ({"server_load": 0}, [])
    pod.start_engine()
    pod.until(lambda: "vllm:num_requests_waiting" in pod.http.get("/metrics").text)


def test_a_suspended_model_is_not_listed(make_pod: MakePod) -> None:
    pod = make_pod(names=("tiny",))
    pod.status(serving="false")
    response = pod.http.get("/v1/models")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_serving")


def test_a_model_that_goes_to_zero_is_listed_as_it_was_served(make_pod: MakePod) -> None:
    pod = make_pod(names=("tiny",))
    pod.start_engine()
    pod.until(lambda: any(replica["routable"] for replica in pod.status()["replicas"]))
    served = pod.http.get("/v1/models").json()
    assert served["data"][0]["max_model_len"]
    assert pod.scheduler is not None
    pod.scheduler.close()
    pod.until(lambda: not any(replica["routable"] for replica in pod.status()["replicas"]))
    assert pod.http.get("/v1/models").json() == served


def test_held_requests_leave_in_the_order_of_their_arrival(make_pod: MakePod) -> None:
    pod = make_pod()
    answers = []
    for number in range(40):
        answers.append(pod.post("/v1/completions", {"prompt": f"{number:02}", "max_tokens": 1}))
        pod.wait_for_held(number + 1)
    scheduler = pod.start_engine()
    assert all(answer.result(WAIT_SECONDS).status_code == 200 for answer in answers)
    prompts = [TOKENIZER.decode([*memoryview(submit.prompt).cast("i")]) for submit in scheduler.received(Submit)]
    assert prompts == [f"{number:02}" for number in range(40)]


def test_bodies_beyond_the_limit_are_rejected_and_others_are_not_affected(make_pod: MakePod) -> None:
    pod = make_pod(limits=RequestLimits(held_bytes=20_000))
    large = pod.post("/v1/completions", {"prompt": "x" * 15_000, "truncate_prompt_tokens": 1, "max_tokens": 1})
    pod.wait_for_held(1)
    rejected = pod.post("/v1/completions", {"prompt": "x" * 15_000}).result(WAIT_SECONDS)
    assert (rejected.status_code, rejected.json()["error"]["code"]) == (429, "queue_full")
    assert rejected.headers["retry-after"]
    small = pod.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    pod.wait_for_held(2)
    pod.start_engine()
    assert (large.result(WAIT_SECONDS).status_code, small.result(WAIT_SECONDS).status_code) == (200, 200)
    assert pod.server._tokenizers.requests.held.bytes == 0


def test_as_many_requests_are_held_as_may_wait(make_pod: MakePod) -> None:
    pod = make_pod(limits=RequestLimits(waiting=2))
    answers = [pod.post("/v1/completions", {"prompt": "x", "max_tokens": 1}) for _ in range(2)]
    pod.wait_for_held(2)
    assert pod.post("/v1/completions", {"prompt": "x"}).result(WAIT_SECONDS).status_code == 429
    pod.start_engine()
    assert [answer.result(WAIT_SECONDS).status_code for answer in answers] == [200, 200]


def test_many_held_requests_with_long_prompts_are_all_answered(make_pod: MakePod) -> None:
    # All together are more than may wait at a time: they leave one after the other.
    pod = make_pod(limits=RequestLimits(waiting_tokens=1500))
    body = {"prompt": "x" * 4000, "truncate_prompt_tokens": 4, "max_tokens": 1}
    answers = [pod.post("/v1/completions", body) for _ in range(20)]
    pod.wait_for_held(20)
    pod.start_engine()
    assert {answer.result(WAIT_SECONDS).status_code for answer in answers} == {200}
    admission = pod.server._tokenizers.requests.admission
    pod.until(lambda: (admission.waiting, admission.waiting_tokens) == (0, 0))


def test_a_client_that_leaves_frees_its_place(make_pod: MakePod) -> None:
    pod = make_pod()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{pod.url}/v1/chat/completions", json=CHAT, timeout=0.3)
    pod.wait_for_held(0)
    assert pod.server._tokenizers.requests.held.bytes == 0
    scheduler = pod.start_engine()
    assert pod.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).result(WAIT_SECONDS).status_code == 200
    assert len(scheduler.received(Submit)) == 1, "the request of the client that left was not submitted"


def test_requests_are_held_again_after_the_engine_is_lost(make_pod: MakePod) -> None:
    pod = make_pod(ready_before_engine=False)
    assert pod.control.get("/ready").status_code == 503, "the model of this server is not loaded yet"
    pod.start_engine()
    pod.until(lambda: pod.control.get("/ready").status_code == 200)
    assert pod.scheduler is not None
    pod.scheduler.close()
    pod.until(lambda: pod.http.get("/v1/models").status_code == 503)
    assert pod.control.get("/ready").status_code == 200
    answer = pod.post("/v1/chat/completions", CHAT)
    pod.wait_for_held(1)
    pod.start_engine("n")
    assert '"n"' in answer.result(WAIT_SECONDS).text


def test_a_long_poll_ends_with_the_first_held_request(make_pod: MakePod) -> None:
    pod = make_pod()
    poll = ThreadPoolExecutor(1).submit(pod.status, "?wait=30")
    pod.until(lambda: bool(pod.server._tokenizers.requests.held._arrivals))
    answer = pod.post("/v1/chat/completions", CHAT)
    assert poll.result(WAIT_SECONDS)["held"] == 1
    # While one is held there is nothing to wait for.
    assert pod.status("?wait=30")["held"] == 1
    pod.start_engine()
    answer.result(WAIT_SECONDS)
    assert pod.status("?wait=0.01")["held"] == 0
    assert pod.status("?wait=soon")["held"] == 0
    assert pod.status("?wait=-1")["held"] == 0


def test_only_a_few_polls_wait_at_a_time(make_pod: MakePod) -> None:
    pod = make_pod()
    arrivals = pod.server._tokenizers.requests.held._arrivals
    with ThreadPoolExecutor(16) as pool:
        polls = [
            pool.submit(httpx.get, f"{pod.control.base_url}/status?wait=30", timeout=WAIT_SECONDS) for _ in range(16)
        ]
        pod.until(lambda: len(arrivals) == 16)
        assert pod.status("?wait=30")["held"] == 0, "it is answered at once"
        answer = pod.post("/v1/chat/completions", CHAT)
        assert {poll.result(WAIT_SECONDS).json()["held"] for poll in polls} == {1}
    pod.start_engine()
    assert answer.result(WAIT_SECONDS).status_code == 200


def test_a_long_poll_ends_when_the_frontend_drains(make_pod: MakePod) -> None:
    pod = make_pod()
    poll = ThreadPoolExecutor(1).submit(pod.status, "?wait=30")
    pod.until(lambda: bool(pod.server._tokenizers.requests.held._arrivals))
    pod.server.stop()
    assert poll.result(WAIT_SECONDS)["draining"] is True


def test_a_held_request_ends_the_drain_of_the_only_engine(make_pod: MakePod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.router.drain_ends.END_DRAIN_SECONDS", 0.1)
    pod = make_pod()
    scheduler = pod.start_engine()
    scheduler.answer = lambda submit: [Ack(submit.id), row(submit.id, 0, ids("a")[0])]
    stream = pod.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2, "stream": True})
    scheduler.wait_for(Submit)
    scheduler.status = msgspec.structs.replace(scheduler.status, draining=True)
    pod.until(lambda: pod.http.get("/v1/models").status_code == 503)
    assert not scheduler.received(EndDrain), "the stream may finish"
    held = pod.post("/v1/chat/completions", CHAT)
    scheduler.wait_for(EndDrain)
    scheduler.close()
    submits = pod.start_engine()
    assert '"z"' in held.result(WAIT_SECONDS).text
    text = stream.result(WAIT_SECONDS).text
    assert text.index('"text":"a"') < text.index(": continued") < text.index('"text":"z"') < text.index("[DONE]")
    assert [bool(submit.output) for submit in submits.received(Submit)] == [True, False], "the stream goes first"


def test_a_model_that_shall_not_serve_refuses_at_once(make_pod: MakePod) -> None:
    pod = make_pod()
    held = pod.post("/v1/chat/completions", CHAT)
    pod.wait_for_held(1)
    pod.until(lambda: pod.status()["ready"])
    assert pod.status(serving="perhaps")["ready"], "words of another version are no news"
    assert not pod.status(serving="false")["ready"]
    refused = [held.result(WAIT_SECONDS), pod.post("/v1/chat/completions", CHAT).result(WAIT_SECONDS)]
    for response in refused:
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_serving")
        assert response.headers["retry-after"] == "30"
    assert pod.control.get("/ready").status_code == 503
    assert pod.status()["ready"] is False, "a poll without the word changes nothing"
    assert pod.status(serving="true")["ready"]
    answer = pod.post("/v1/chat/completions", CHAT)
    pod.wait_for_held(1)
    pod.start_engine()
    assert answer.result(WAIT_SECONDS).status_code == 200


def test_a_silent_operator_lets_requests_be_held(make_pod: MakePod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.frontend.tokenizers.OPERATOR_SILENCE_SECONDS", 0.2)
    pod = make_pod()
    assert not pod.status(serving="false")["ready"]
    pod.until(lambda: pod.status()["ready"])
    pod.post("/v1/chat/completions", CHAT)
    pod.wait_for_held(1)


def test_a_frontend_that_stops_serves_what_it_holds(make_pod: MakePod) -> None:
    pod = make_pod()
    answer = pod.post("/v1/chat/completions", CHAT)
    pod.wait_for_held(1)
    pod.server.stop()
    pod.until(lambda: pod.server._tokenizers.is_draining)
    pod.start_engine()
    assert answer.result(WAIT_SECONDS).status_code == 200


def test_a_frontend_that_ends_fails_what_it_holds(make_pod: MakePod) -> None:
    pod = make_pod(drain_seconds=0.2)
    answer = pod.post("/v1/chat/completions", CHAT)
    pod.wait_for_held(1)
    pod.server.stop()
    response = answer.result(WAIT_SECONDS)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")


def test_the_client_library_of_openai_waits_for_a_held_request(make_pod: MakePod) -> None:
    pod = make_pod(header_seconds=0.1, ping_seconds=0.1)
    client = openai.OpenAI(base_url=f"{pod.url}/v1", api_key="-", timeout=WAIT_SECONDS, max_retries=0)
    with ThreadPoolExecutor(2) as pool:
        create = client.chat.completions.create
        whole = pool.submit(lambda: create(model="default", **CHAT))
        streamed = pool.submit(lambda: list(create(model="default", stream=True, **CHAT)))
        pod.wait_for_held(2)
        pod.start_engine()
        assert whole.result(WAIT_SECONDS).choices[0].message.content == "z"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed.result(WAIT_SECONDS)) == "z"


def test_a_deadline_counts_the_time_for_which_a_request_was_held(make_pod: MakePod) -> None:
    pod = make_pod()
    url = f"{pod.url}/v1/chat/completions"
    with ThreadPoolExecutor(1) as pool:
        headers = {"x-request-timeout-ms": "300"}
        answer = pool.submit(lambda: httpx.post(url, json=CHAT, headers=headers, timeout=WAIT_SECONDS))
        pod.wait_for_held(1)
        held_at = time.monotonic()
        pod.until(lambda: time.monotonic() - held_at > 0.3)
        scheduler = pod.start_engine()
        answer.result(WAIT_SECONDS)
    (submit,) = scheduler.received(Submit)
    assert submit.remaining_ms == 1, "the scheduler refuses it"
