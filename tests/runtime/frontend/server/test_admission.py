"""Requests above a limit are rejected immediately, with the time to retry after."""

from __future__ import annotations

import select
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest

from minisgl.frontend.config import Access, RequestLimits
from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.admission import Admission
from minisgl.frontend.server.request_record import RequestRecord
from minisgl.tokenizer.prompt_encoder import PromptEncoder
from minisgl.wire.messages import Ack, Failed, Submit
from support.frontend.fake_scheduler import WAIT_SECONDS, answer_with, row
from support.frontend.retry_after import assert_has_retry_headers
from support.frontend.stack import FrontendStack, ids

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}

MakeStack = Callable[..., FrontendStack]


def in_background(stack: FrontendStack, **options: object) -> threading.Thread:
    """A request that the scheduler queues and does not answer."""

    def ask() -> None:
        url = str(stack.http.base_url.join("/v1/chat/completions"))
        try:
            httpx.post(url, json=CHAT, timeout=WAIT_SECONDS, **options)  # type: ignore[arg-type]
        except httpx.HTTPError:
            return

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def assert_rejected(response: httpx.Response, code: str) -> None:
    assert response.status_code == 429
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", code)
    assert_has_retry_headers(response.headers)


def test_requests_above_the_waiting_limit_are_rejected(make_stack: MakeStack) -> None:
    stack = make_stack(limits=RequestLimits(waiting=2))
    stack.scheduler.answer = lambda submit: [Ack(submit.id)]
    threads = [in_background(stack) for _ in range(2)]
    submits = stack.scheduler.wait_for(Submit, 2)
    assert_rejected(stack.http.post("/v1/chat/completions", json=CHAT), "queue_full")
    # Also for a stream: before any success headers.
    assert_rejected(stack.http.post("/v1/chat/completions", json=CHAT | {"stream": True}), "queue_full")
    for submit in submits:
        stack.scheduler.send(row(submit.id, 0, ids("a")[0], "length"), to=submit)
    for thread in threads:
        thread.join(WAIT_SECONDS)
    stack.scheduler.answer = answer_with(ids("ok"))
    assert stack.http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2}).status_code == 200
    assert 'minisgl:admission_rejections_total{model_name="org/tiny",engine="0",reason="waiting"} 2' in (
        stack.http.get("/metrics").text
    )


def test_a_request_is_rejected_before_it_is_encoded(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoded for a tokenizer worker: a prompt that is too large would get another error then."""
    monkeypatch.setattr("minisgl.frontend.tokenizers.MAX_MESSAGE_BYTES", 16_000)
    stack = make_stack(limits=RequestLimits(waiting=1), max_model_len=1 << 20)
    stack.scheduler.answer = lambda submit: [Ack(submit.id)]
    thread = in_background(stack)
    (submit,) = stack.scheduler.wait_for(Submit)
    large = {"prompt": "a" * 17_000, "n": 2}
    assert_rejected(stack.http.post("/v1/completions", json=large), "queue_full")
    stack.scheduler.send(row(submit.id, 0, ids("a")[0], "length"), to=submit)
    thread.join(WAIT_SECONDS)
    assert stack.http.post("/v1/completions", json=large).status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a" * 100_000}),
        ("/v1/completions", {"prompt": ["a", "é" * 50_000]}),
        ("/v1/completions", {"prompt": [5] * 257}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 50_000}] * 2}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "a" * 100_000}]}),
        ("/v1/responses", {"input": "a" * 100_000}),
        ("/generate", {"text": "a" * 100_000}),
    ],
    ids=["text", "list", "tokens", "chat", "Anthropic", "Responses", "native"],
)
def test_a_prompt_that_certainly_exceeds_the_context_takes_no_place_in_the_queue(
    make_stack: MakeStack, path: str, body: dict[str, object]
) -> None:
    stack = make_stack(limits=RequestLimits(waiting=1, waiting_tokens=100))
    stack.scheduler.answer = lambda submit: [Ack(submit.id)]
    thread = in_background(stack)
    (submit,) = stack.scheduler.wait_for(Submit)
    refused = stack.http.post(path, json=body)
    assert refused.status_code == 400
    assert "context_length_exceeded" in refused.text and "maximum context length is 256 tokens" in refused.text
    stack.scheduler.send(row(submit.id, 0, ids("a")[0], "length"), to=submit)
    thread.join(WAIT_SECONDS)
    assert stack.scheduler.received(Submit) == [submit]


def test_a_tenant_that_fills_the_queue_does_not_keep_out_another() -> None:
    admission = Admission(RequestLimits(waiting=100, waiting_tokens=1000), Counter())
    admission.admit(100, 10, "a")
    for tenant in ("a", "b"):
        with pytest.raises(ApiError) as full:
            admission.admit(51, 10, tenant)
        assert full.value.code == "queue_full"
    admission.admit(50, 10, "b")
    admission.admit(33, 10, "c")
    with pytest.raises(ApiError):
        admission.admit(18, 10, "d")
    for tenant, choices, tokens in (("a", 100, 10), ("b", 50, 10), ("c", 33, 10)):
        for choice in range(choices):
            admission.leave_queue(0 if choice else tokens, tenant)
    admission.admit(1, 1000, "a")
    with pytest.raises(ApiError):
        admission.admit(1, 501, "b")
    admission.admit(1, 500, "b")
    admission.correct_tokens(-400, "b")
    admission.admit(1, 300, "b")


def test_the_limit_of_a_key_counts_choices(make_stack: MakeStack, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-a a\nsk-b b\n")
    access = Access(api_keys=str(tmp_path / "keys"))
    stack = make_stack(limits=RequestLimits(in_flight_per_key=4), access=access)
    stack.scheduler.answer = lambda submit: [Ack(submit.id)]
    key = {"authorization": "Bearer sk-a"}
    thread = in_background(stack, headers=key)
    (submit,) = stack.scheduler.wait_for(Submit)
    assert_rejected(stack.http.post("/v1/completions", json={"prompt": ["a"] * 4}, headers=key), "too_many_requests")
    assert_rejected(stack.http.post("/v1/completions", json={"prompt": "a", "n": 4}, headers=key), "too_many_requests")
    stack.scheduler.send(row(submit.id, 0, ids("a")[0], "length"), to=submit)
    thread.join(WAIT_SECONDS)
    stack.scheduler.answer = answer_with(ids("ok"))
    body = {"prompt": ["a"] * 6, "max_tokens": 2}
    # Alone it is accepted, and counts no longer when it has ended.
    for _ in range(2):
        assert stack.http.post("/v1/completions", json=body, headers=key).status_code == 200
    of_keys = {submit.tenant for submit in stack.scheduler.received(Submit)}
    stack.http.post("/v1/completions", json=body, headers={"authorization": "Bearer sk-b"})
    assert len(of_keys) == 1 and len({submit.tenant for submit in stack.scheduler.received(Submit)}) == 2


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"address": "10.0.0.1"}, {"address": "10.0.0.1"}, True),
        ({"address": "10.0.0.1"}, {"address": "10.0.0.2"}, False),
        ({"address": "::ffff:10.0.0.1"}, {"address": "::ffff:10.0.0.2"}, False),
        ({"address": "fd00::1"}, {"address": "fd00::2:0:0:1"}, True),
        ({"address": "fd00::1"}, {"address": "fd00:0:0:1::1"}, False),
        ({"address": "fe80::1%eth0"}, {"address": "fe80::2%eth0"}, True),
        ({"address": "10.0.0.1", "key_name": "a"}, {"address": "10.0.0.2", "key_name": "a"}, True),
        ({"address": "10.0.0.1", "key_name": "a"}, {"address": "10.0.0.1", "key_name": "b"}, False),
        ({"address": "10.0.0.1", "key_name": "10.0.0.1"}, {"address": "10.0.0.1"}, False),
    ],
)
def test_a_tenant_is_a_key_or_else_an_address(one: dict[str, str], other: dict[str, str], same: bool) -> None:
    records = [
        RequestRecord(request_id="r", method="POST", path="/", started_at=0.0, **fields) for fields in (one, other)
    ]
    assert (records[0].tenant == records[1].tenant) == same


def test_a_prompt_that_is_only_scored_leaves_the_queue(make_stack: MakeStack) -> None:
    stack = make_stack(limits=RequestLimits(waiting=2))
    stack.scheduler.answer = answer_with(ids("ok"))
    for _ in range(3):
        scored = stack.http.post("/v1/completions", json={"prompt": "Hi", "echo": True, "max_tokens": 0, "n": 2})
        assert scored.status_code == 200
    admission = stack.server._tokenizers.requests.admission
    assert (admission.waiting, admission.waiting_tokens) == (0, 0)
    metrics = stack.server._tokenizers.requests.metrics
    assert metrics.decode_time.sum == 0
    assert sum(metrics.time_to_first_token.counts) == 0, "there was no token"


def test_a_rejection_by_the_scheduler_has_retry_headers(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.scheduler.answer = lambda submit: [Failed(submit.id, "queue_full", "5 requests are waiting already")]
    assert_rejected(stack.http.post("/v1/chat/completions", json=CHAT | {"stream": True}), "queue_full")
    client = openai.OpenAI(base_url=stack.openai_url, api_key="x", max_retries=1)
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="org/tiny", prompt="a")
    assert len(stack.scheduler.received(Submit)) == 3, "the client has retried"


def test_requests_above_the_limit_of_a_key_are_rejected(make_stack: MakeStack) -> None:
    stack = make_stack(limits=RequestLimits(in_flight_per_key=1))
    stack.scheduler.answer = lambda submit: [Ack(submit.id)]
    thread = in_background(stack)
    (submit,) = stack.scheduler.wait_for(Submit)
    assert_rejected(stack.http.post("/v1/chat/completions", json=CHAT), "too_many_requests")
    assert stack.http.get("/v1/models").status_code == 200
    stack.scheduler.send(row(submit.id, 0, ids("a")[0], "length"), to=submit)
    thread.join(WAIT_SECONDS)
    stack.scheduler.answer = answer_with(ids("ok"))
    assert stack.http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2}).status_code == 200


def test_waiting_prompt_tokens_are_limited() -> None:
    admission = Admission(RequestLimits(waiting_tokens=100), Counter())
    admission.admit(1, 500)
    with pytest.raises(ApiError, match="500 tokens are waiting"):
        admission.admit(1, 1)
    admission.correct_tokens(-450)
    admission.admit(1, 50)
    admission.start(50)
    admission.leave_queue(50)
    assert (admission.waiting, admission.waiting_tokens) == (0, 0)


def test_a_request_of_many_choices_is_admitted_to_an_empty_queue() -> None:
    admission = Admission(RequestLimits(waiting=2), Counter())
    admission.admit(8, 80)
    with pytest.raises(ApiError, match="8 requests are waiting"):
        admission.admit(1, 1)


def test_requests_in_flight_are_limited_in_total_and_by_key() -> None:
    admission = Admission(RequestLimits(in_flight=2, in_flight_per_key=2), Counter())
    admission.begin_request("a", "a")
    admission.begin_request("b", "b")
    with pytest.raises(ApiError) as raised:
        admission.begin_request("c", "c")
    assert (raised.value.status, raised.value.code) == (429, "too_many_requests")
    admission.end_request("a", "a")
    admission.begin_request("b", "b")
    with pytest.raises(ApiError, match="this key"):
        admission.begin_request("b", "b")


def test_a_tenant_that_has_all_places_in_flight_keeps_no_other_one_out() -> None:
    admission = Admission(RequestLimits(in_flight=6), Counter())
    for _ in range(6):
        admission.begin_request("", "many")
    with pytest.raises(ApiError, match="too many concurrent"):
        admission.begin_request("", "many")
    for tenant, share in (("one", 3), ("two", 2)):
        for _ in range(share):
            admission.begin_request("", tenant)
        with pytest.raises(ApiError, match="too many concurrent"):
            admission.begin_request("", tenant)
    admission.begin_request("", "three")
    with pytest.raises(ApiError, match="too many concurrent"):
        admission.begin_request("", "four")
    for _ in range(6):
        admission.end_request("", "many")
    admission.begin_request("", "four")


def test_a_request_that_no_worker_has_taken_counts_once_when_it_is_tried_again() -> None:
    admission = Admission(RequestLimits(in_flight_per_key=4), Counter())
    admission.begin_request("a", "a")
    admission.recount("a", 1, 8)
    admission.recount("a", 8, 8)
    with pytest.raises(ApiError):
        admission.begin_request("a", "a")
    admission.end_request("a", "a", 8)
    admission.begin_request("a", "a")
    admission.begin_request("a", "a")
    admission.recount("a", 1, 3)
    with pytest.raises(ApiError, match="3 of 4 choices in progress, and the request has 2"):
        admission.recount("a", 1, 2)


def test_requests_of_one_tenant_that_wait_for_an_engine_do_not_keep_out_another() -> None:
    admission = Admission(RequestLimits(waiting=4), Counter())
    for _ in range(4):
        admission.hold(True, "flood")
    with pytest.raises(ApiError, match="4 requests are waiting"):
        admission.hold(True, "flood")
    admission.hold(True, "other")
    for tenant in ("flood", "flood", "flood", "flood", "other"):
        admission.leave_queue(0, tenant)
    assert admission.waiting == 0


def test_retry_after_is_estimated_from_recent_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    # Not time.monotonic itself, which all of this process uses.
    monkeypatch.setattr("minisgl.frontend.server.admission.time", SimpleNamespace(monotonic=lambda: now))
    admission = Admission(RequestLimits(waiting=64), Counter())
    admission.admit(64, 64)
    for _ in range(32):
        now += 0.5
        admission.start(1)
    # Two start each second, 32 wait: 16 seconds, plus or minus 20%.
    for _ in range(20):
        with pytest.raises(ApiError) as raised:
            admission.admit(40, 1)
        assert 12_500 <= int(raised.value.headers["retry-after-ms"]) <= 19_500


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a" * 900}),
        ("/detokenize", {"tokens": [5] * 300}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a" * 900}]}),
        ("/v1/responses/input_tokens", {"input": "a" * 900}),
    ],
)
def test_the_texts_that_wait_for_their_tokens_are_limited(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, object]
) -> None:
    goes_on, begun = threading.Event(), threading.Event()

    def slow(original: Callable[..., object]) -> Callable[..., object]:
        def wait(*args: object) -> object:
            begun.set()
            assert goes_on.wait(WAIT_SECONDS)
            return original(*args)

        return wait

    stack = make_stack(limits=RequestLimits(asked_bytes=1500))
    for name in ("encoded", "decoded"):
        monkeypatch.setattr(PromptEncoder, name, slow(getattr(PromptEncoder, name)))
    answers: list[int] = []
    url = str(stack.http.base_url.join(path))
    thread = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, timeout=60).status_code))
    thread.start()
    assert begun.wait(WAIT_SECONDS)
    assert_rejected(stack.http.post(path, json=body), "queue_full")
    assert_rejected(stack.http.post("/tokenize", json={"prompt": "a" * 900}), "queue_full")
    goes_on.set()
    thread.join(WAIT_SECONDS)
    assert answers == [200]
    assert stack.http.post(path, json=body).status_code == 200, "it leaves its place"


def test_a_tenant_whose_texts_wait_does_not_keep_out_another() -> None:
    admission = Admission(RequestLimits(asked_bytes=100), Counter())
    with admission.asking(90, "a"), admission.asking(5, "a"):
        with pytest.raises(ApiError), admission.asking(10, "a"):
            pass
        with admission.asking(50, "b"):
            pass
    with admission.asking(1000, "a"):
        pass


def _until(client: socket.socket, text: bytes) -> bytes:
    """What has been received when it contains `text`, which may come in several parts."""
    received = b""
    while text not in received:
        data = client.recv(65536)
        assert data, received
        received += data
    return received


def test_bodies_that_have_arrived_in_part_are_limited(make_stack: MakeStack) -> None:
    stack = make_stack(limits=RequestLimits(reading_bytes=300_000))
    stack.scheduler.answer = answer_with(ids("ok"))
    part = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 200000\r\n\r\n" + b" " * 190_000
    with ExitStack() as clients:
        sent = [
            clients.enter_context(socket.create_connection(("127.0.0.1", stack.server.port), WAIT_SECONDS))
            for _ in range(2)
        ]
        for client in sent:
            client.sendall(part)
        ready, _, _ = select.select(sent, (), (), WAIT_SECONDS)
        (refused,) = ready
        answer = _until(refused, b"queue_full")
        assert answer.startswith(b"HTTP/1.1 429 ") and b"connection: close" in answer
        # A body that arrives at once takes no place.
        assert stack.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        (other,) = set(sent) - {refused}
        other.sendall(b" " * 10_000)
        _until(other, b"invalid_json")
    rejected = 'minisgl:admission_rejections_total{model_name="org/tiny",engine="0",reason="reading_bytes"} 1'
    assert rejected in stack.http.get("/metrics").text


def test_bodies_of_one_address_do_not_keep_out_those_of_another() -> None:
    admission = Admission(RequestLimits(reading_bytes=100), Counter())
    admission.read(100, "a")
    with pytest.raises(ApiError):
        admission.read(1, "a")
    admission.read(50, "b")
    for size, tenant in ((100, "a"), (50, "b")):
        admission.forget(size, tenant)
    admission.read(100, "b")
