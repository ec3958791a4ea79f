"""Web pages that its users visit cannot use the server, unless their origin is allowed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from starlette.applications import Starlette

from minisgl.frontend.config import Access
from minisgl.frontend.server.web_origins import OriginListError, OriginMiddleware
from support.frontend.stack import FrontendStack

MakeStack = Callable[..., FrontendStack]


def refusal(stack: FrontendStack, **headers: str) -> dict[str, str]:
    """Return the error of a request that any page can send without asking first; empty for success. No page of
    another origin may read the response."""
    answer = stack.http.post("/tokenize", content=b'{"prompt": "a"}', headers=headers)
    assert "access-control-allow-origin" not in answer.headers
    if answer.status_code == 200:
        return {}
    error: dict[str, str] = answer.json()["error"]
    assert answer.status_code == 403 and error["type"] == "permission_error"
    return error


def code(stack: FrontendStack, **headers: str) -> str:
    """Return the code of the same error."""
    return refusal(stack, **headers).get("code", "")


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


def test_the_error_names_the_origin_and_the_flag_that_allows_it(stack: FrontendStack) -> None:
    message = refusal(stack, origin="http://localhost:3000")["message"]
    assert "'http://localhost:3000'" in message and "--allowed-origins" in message and "proxy" not in message
    assert "''" in refusal(stack, origin="")["message"]


def test_the_error_quotes_headers_of_any_length_in_printable_characters(stack: FrontendStack) -> None:
    origin = b"http://\xe9\t\x85" + b"a" * 5_000
    headers = [(b"origin", origin), (b"host", b"[::1]:" + b"8" * 5_000), (b"sec-fetch-site", b"same-origin")]
    message = stack.http.post("/tokenize", content=b'{"prompt": "a"}', headers=headers).json()["error"]["message"]
    assert message.isascii() and message.isprintable() and len(message) < 800


@pytest.mark.parametrize(
    "proxied",
    [
        {"x-forwarded-host": "A.example"},
        {"x-forwarded-host": "b.example, a.example:8443"},
        {"sec-fetch-site": "same-origin"},
    ],
)
def test_the_error_names_the_header_that_a_proxy_has_replaced(stack: FrontendStack, proxied: dict[str, str]) -> None:
    host = f"127.0.0.1:{stack.server.port}"
    message = refusal(stack, origin="https://a.example", **proxied)["message"]
    assert "'https://a.example'" in message and "--allowed-origins" in message
    assert f"a proxy has replaced the header Host by '{host}'; have the proxy pass the client's Host" in message


@pytest.mark.parametrize(
    "other", [{"x-forwarded-host": "b.example"}, {"x-forwarded-host": ""}, {"sec-fetch-site": "cross-site"}]
)
def test_pages_of_other_servers_are_not_taken_for_those_of_a_proxy(stack: FrontendStack, other: dict[str, str]) -> None:
    assert "proxy" not in refusal(stack, origin="https://a.example", **other)["message"]
    assert "proxy" not in refusal(stack, origin="null", **other)["message"]


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
