"""The admin API on its own port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl.frontend.config import Access, FrontendConfig
from minisgl.frontend.process import FrontendServer
from minisgl.frontend.server.auth import KeyFileError
from minisgl.frontend.server.listeners import ServerError
from minisgl.wire.messages import Abort, Ack, Flush, Flushed, Submit
from support.frontend.fake_scheduler import WAIT_SECONDS, row
from support.frontend.stack import FrontendStack, ids

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}

MakeStack = Callable[..., FrontendStack]


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "admin-keys"
    path.write_text("root-key operator\n")
    return str(path)


@pytest.fixture
def stack(make_stack: MakeStack, keys: str) -> FrontendStack:
    return make_stack(access=Access(admin_port=0, admin_keys=keys))


@pytest.fixture
def admin(stack: FrontendStack) -> httpx.Client:
    return httpx.Client(
        base_url=f"http://127.0.0.1:{stack.server.admin_port}",
        headers={"authorization": "Bearer root-key"},
        timeout=WAIT_SECONDS,
    )


def stream(
    stack: FrontendStack,
    request_id: str,
    path: str = "/v1/chat/completions",
    body: Any = CHAT,
    begin: str = '"content"',
) -> tuple[threading.Thread, list[str]]:
    """Start a stream with one token; a thread reads it until it ends. `begin`: the field of an event with the token."""
    seen: list[str] = []
    begun = threading.Event()

    def read() -> None:
        url = str(stack.http.base_url.join(path))
        headers = {"x-request-id": request_id}
        try:
            with httpx.stream("POST", url, json=body | {"stream": True}, headers=headers, timeout=WAIT_SECONDS) as got:
                for line in got.iter_lines():
                    seen.append(line)
                    if f'{begin}:"a"' in line:
                        begun.set()
        except httpx.RemoteProtocolError:
            seen.append("broken")

    stack.scheduler.answer = lambda submit: [Ack(submit.id), row(submit.id, 0, ids("a")[0])]
    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(WAIT_SECONDS)
    return thread, seen


@pytest.mark.parametrize("by", ["request id", "answer id", "all"])
def test_an_aborted_stream_ends_in_an_error(stack: FrontendStack, admin: httpx.Client, by: str) -> None:
    thread, seen = stream(stack, "mine")
    answer_id = next(line for line in seen if '"id":"' in line).split('"id":"')[1].split('"')[0]
    body = {"request id": {"request_id": "mine"}, "answer id": {"request_id": answer_id}, "all": {"all": True}}[by]
    assert admin.post("/abort", json=body).json() == {"aborted": ["mine"]}
    thread.join(WAIT_SECONDS)
    assert seen[-1] == "broken"
    assert any('"code":"aborted"' in line for line in seen)
    assert "data: [DONE]" not in seen
    assert stack.scheduler.wait_for(Abort)[0].id == stack.scheduler.received(Submit)[0].id
    assert admin.post("/abort", json={"all": True}).json() == {"aborted": []}


@pytest.mark.parametrize(
    ("path", "body", "begin", "last"),
    [
        ("/v1/responses", {"input": "Hi"}, '"delta"', "response.failed"),
        ("/v1/messages", CHAT | {"max_tokens": 9}, '"text"', "error"),
    ],
)
def test_streams_of_the_agent_apis_are_aborted_by_their_ids(
    stack: FrontendStack, admin: httpx.Client, path: str, body: Any, begin: str, last: str
) -> None:
    thread, seen = stream(stack, "mine", path, body, begin)
    answer_id = next(line for line in seen if '"id":"' in line).split('"id":"')[1].split('"')[0]
    assert admin.post("/abort", json={"request_id": answer_id}).json() == {"aborted": ["mine"]}
    thread.join(WAIT_SECONDS)
    assert seen[-1] == "broken"
    assert [line for line in seen if line.startswith("event: ")][-1] == f"event: {last}"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"request_id": "unknown"}', 404, "request_not_found"),
        (b"{}", 400, "invalid_request"),
        (b'{"all": true, "request_id": "a"}', 400, "invalid_request"),
        (b'{"everything": true}', 400, "invalid_request"),
        (b"\xff", 400, "invalid_request"),
    ],
)
def test_an_abort_that_matches_no_request_is_an_error(admin: httpx.Client, body: bytes, status: int, code: str) -> None:
    answer = admin.post("/abort", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_flush_cache_returns_the_freed_pages(stack: FrontendStack, admin: httpx.Client) -> None:
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(admin.post("/flush_cache")))
    thread.start()
    (flush,) = stack.scheduler.wait_for(Flush)
    stack.scheduler.send(Flushed(flush.id, 12))
    thread.join(WAIT_SECONDS)
    assert answers[0].json() == {"freed_pages": 12}
    stack.scheduler.close()
    stack.wait_until_served(False)
    lost = admin.post("/flush_cache")
    assert (lost.status_code, lost.json()["error"]["code"]) == (503, "engine_unavailable")
    assert lost.headers["retry-after"]


def test_state_lists_the_requests_in_progress(stack: FrontendStack, admin: httpx.Client) -> None:
    thread, _ = stream(stack, "mine")
    state = admin.get("/state").json()
    assert (state["model"], state["not_ready"]) == ("org/tiny", None)
    assert state["scheduler"]["num_pages"] == 64
    (request,) = state["requests"]
    assert (request["request_id"], request["phase"]) == ("mine", "generating")
    admin.post("/abort", json={"all": True})
    thread.join(WAIT_SECONDS)


def test_the_admin_api_requires_an_admin_key(stack: FrontendStack, admin: httpx.Client) -> None:
    for headers in ({"authorization": ""}, {"authorization": "Bearer sk-user"}):
        for method, path in (("POST", "/abort"), ("POST", "/flush_cache"), ("GET", "/state"), ("GET", "/metrics")):
            assert admin.request(method, path, headers=headers).status_code == 401
    assert admin.get("/nowhere").json()["error"]["code"] == "not_found"
    assert admin.get("/abort").json()["error"]["code"] == "method_not_allowed"
    for path in ("/abort", "/flush_cache", "/state"):
        assert stack.http.post(path, headers=admin.headers).status_code == 404, "not on the port of the API"


def test_web_pages_are_refused_as_on_the_port_of_the_api(admin: httpx.Client) -> None:
    for headers, code in (
        ({"origin": "https://a.example"}, "origin_not_allowed"),
        ({"host": "a.example"}, "host_not_allowed"),
    ):
        for method, path in (("POST", "/abort"), ("POST", "/flush_cache"), ("GET", "/state")):
            answer = admin.request(method, path, headers={**headers, "authorization": ""})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, code), "before keys are looked at"
    assert admin.get("/state", headers={"origin": str(admin.base_url).rstrip("/")}).status_code == 200


def test_pages_that_may_use_the_api_may_use_the_admin_api(make_stack: MakeStack, keys: str) -> None:
    access = Access(admin_port=0, admin_keys=keys, allowed_origins=("https://a.example",), allowed_hosts=("b.example",))
    url = f"http://127.0.0.1:{make_stack(access=access).server.admin_port}/state"
    headers = {"origin": "https://a.example", "host": "b.example", "authorization": "Bearer root-key"}
    assert httpx.get(url, headers=headers, timeout=WAIT_SECONDS).status_code == 200


def test_the_admin_api_needs_a_key_file_and_a_free_port(keys: str, tmp_path: Path) -> None:
    def server(**options: Any) -> FrontendServer:
        return FrontendServer(FrontendConfig(port=0, tokenizer_addresses=("ipc:///nowhere",), access=Access(**options)))

    with pytest.raises(ServerError, match="--admin-keys"):
        server(admin_port=0)
    with pytest.raises(KeyFileError, match="nowhere"):
        server(admin_port=0, admin_keys=str(tmp_path / "nowhere"))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ServerError, match="--admin-port"):
        server(admin_port=taken.getsockname()[1], admin_keys=keys)
