"""A control port refuses requests of web pages, and nothing that belongs to a cluster."""

from __future__ import annotations

import pytest

from minisgl.wire.web_pages import WebPageError, check_control_request, is_loopback

LOOPBACK = "::ffff:127.0.0.1"
POD = "::ffff:10.1.2.3"


def refusal(address: str = POD, **headers: list[str]) -> str:
    """Return the code with which a request is refused; empty for none. Names of headers have _ for -."""
    by_name = {name.replace("_", "-"): values for name, values in headers.items()}
    try:
        check_control_request(lambda name: by_name.get(name, []), address)
    except WebPageError as error:
        return error.code
    return ""


@pytest.mark.parametrize("address", [POD, LOOPBACK])
@pytest.mark.parametrize("origin", ["http://10.1.2.3:8080", "http://127.0.0.1:8080", "https://a.example", "null", ""])
def test_every_origin_is_refused(address: str, origin: str) -> None:
    assert refusal(address, origin=[origin], host=["127.0.0.1:8080"]) == "origin_not_allowed"


@pytest.mark.parametrize("relation", ["cross-site", "same-site", "same-origin", ""])
def test_requests_without_origin_are_refused_if_a_page_sent_them(relation: str) -> None:
    assert refusal(LOOPBACK, sec_fetch_site=[relation]) == "origin_not_allowed"
    assert refusal(LOOPBACK, sec_fetch_site=["none", relation]) == "origin_not_allowed"


def test_an_address_that_a_user_has_typed_into_a_browser_is_served() -> None:
    assert refusal(LOOPBACK, sec_fetch_site=["none"], host=["localhost:8080"]) == ""


@pytest.mark.parametrize("host", ["a.example", "a.example:8080", "127.0.0.1.a.example", "localhost.a.example", ""])
def test_on_a_loopback_address_other_names_are_refused(host: str) -> None:
    assert refusal(LOOPBACK, host=[host]) == refusal("::1", host=["localhost", host]) == "host_not_allowed"


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost.:8080", "127.0.0.1:8080", "[::1]:8080", "10.1.2.3", "[fd00::7]:1"]
)
def test_on_a_loopback_address_localhost_and_addresses_are_served(host: str) -> None:
    assert refusal(LOOPBACK, host=[host]) == refusal("127.0.0.1", host=[host]) == ""


@pytest.mark.parametrize("host", ["10.1.2.3:8080", "[fd00::7]:8080", "chat-engine-0.models.svc:8080", "a.example"])
def test_at_the_address_of_a_pod_every_name_is_served(host: str) -> None:
    assert refusal(POD, host=[host]) == refusal("fd00::7", host=[host]) == ""


@pytest.mark.parametrize("address", [POD, LOOPBACK])
def test_a_client_without_host_is_served(address: str) -> None:
    assert refusal(address) == ""


def test_loopback_addresses_are_those_that_only_this_machine_reaches() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "::1", LOOPBACK)))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.1.2.3", POD, "fe80::1%eth0")))
