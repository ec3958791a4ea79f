"""Web pages that its users visit cannot use the server, unless their origin is allowed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from starlette.applications import Starlette

from minisgl.frontend.config import Access
from minisgl.frontend.server.web_origins import OriginListError, OriginMiddleware
from support.frontend.stack import FrontendStack

MakeStack = Callable[..., FrontendStack]


def code(stack: FrontendStack, **headers: str) -> str:
    """Return the error code of a request that any page can send without asking first; empty for success. No page of
    another origin may read the response."""
    answer = stack.http.post("/tokenize", content=b'{"prompt": "a"}', headers=headers)
    assert "access-control-allow-origin" not in answer.headers
    if answer.status_code == 200:
        return ""
    assert answer.status_code == 403 and answer.json()["error"]["type"] == "permission_error"
    return str(answer.json()["error"]["code"])


@pytest.mark.parametrize(
    "origin", ["https://a.example", "http://127.0.0.1", "http://localhost:1", "null", "chrome-extension://abc", "", "x"]
)
def test_pages_of_other_origins_are_refused(stack: FrontendStack, origin: str) -> None:
    assert code(stack, origin=origin) == "origin_not_allowed"
    assert stack.http.get("/v1/models", headers={"origin": origin}).status_code == 403
    assert stack.http.get("/metrics", headers={"origin": origin}).status_code == 403


def test_the_servers_own_pages_and_clients_without_origin_are_served(stack: FrontendStack) -> None:
    port = stack.server.port
    assert code(stack) == ""
    assert code(stack, **{"content-type": "application/json"}) == ""
    assert code(stack, origin=f"http://127.0.0.1:{port}") == ""
    assert code(stack, origin=f"http://LOCALHOST:{port}", host=f"localhost:{port}") == ""
    # TLS ends in a proxy.
    assert code(stack, origin="https://localhost", host="localhost") == ""
    assert code(stack, origin="http://localhost:80", host="localhost") == ""


def test_one_foreign_origin_among_several_is_enough(stack: FrontendStack) -> None:
    own = f"http://127.0.0.1:{stack.server.port}"
    headers = [("origin", own), ("origin", "https://a.example")]
    assert stack.http.post("/tokenize", content=b'{"prompt": "a"}', headers=headers).status_code == 403


@pytest.mark.parametrize("host", ["a.example", "a.example:8000", "localhost.a.example", "127.0.0.1.a.example", "", "1"])
def test_a_name_that_points_to_a_loopback_address_is_refused(stack: FrontendStack, host: str) -> None:
    assert code(stack, host=host) == "host_not_allowed"
    assert code(stack, host=host, origin=f"http://{host}") == "host_not_allowed"


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:8000", "localhost.", "10.0.0.1:80", "[::1]:8000", "[fe80::1]"]
)
def test_localhost_and_addresses_are_no_foreign_names(stack: FrontendStack, host: str) -> None:
    assert code(stack, host=host) == ""


def test_origins_and_names_can_be_allowed(make_stack: MakeStack) -> None:
    access = Access(allowed_origins=("https://a.example:443/", "null"), allowed_hosts=("B.example",))
    stack = make_stack(access=access)
    assert code(stack, origin="https://a.example") == code(stack, origin="null") == ""
    assert code(stack, origin="http://a.example") == "origin_not_allowed"
    assert code(stack, host="b.example:8000") == code(stack, host="localhost") == ""
    assert code(stack, host="a.example") == "host_not_allowed"


def test_origins_of_cors_may_send_requests(make_stack: MakeStack) -> None:
    stack = make_stack(access=Access(cors_origins=("https://a.example",)))
    answer = stack.http.post("/tokenize", content=b'{"prompt": "a"}', headers={"origin": "https://a.example"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://a.example")
    assert code(stack, origin="https://b.example") == "origin_not_allowed"


def test_a_server_that_others_can_reach_has_any_name(make_stack: MakeStack) -> None:
    stack = make_stack(host="0.0.0.0")
    assert code(stack, host="a.example", origin="https://a.example") == ""
    assert code(stack, host="a.example", origin="https://b.example") == "origin_not_allowed"


def test_everything_can_be_allowed(make_stack: MakeStack) -> None:
    stack = make_stack(access=Access(allowed_origins=("*",), allowed_hosts=("*",)))
    assert code(stack, host="a.example", origin="https://b.example") == ""


@pytest.mark.parametrize("origin", ["a.example", "https://a.example/path", "https://", ""])
def test_a_text_that_is_no_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(OriginListError, match="is no origin"):
        OriginMiddleware(Starlette(), (origin,))
