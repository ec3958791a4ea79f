"""What a gateway and a frontend say to each other: used tokens, tenants and priorities."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl.frontend.admin.control import HEARS_GATEWAYS
from minisgl.frontend.config import Access
from minisgl.frontend.server.known_gateways import KnownGateways
from minisgl.gateway.config import GatewayOptions
from minisgl.gateway.process import GatewayServer
from minisgl.wire.messages import Submit
from minisgl.wire.status import GATEWAYS_HEADER
from support.frontend.fake_scheduler import WAIT_SECONDS, answer_with
from support.frontend.served import eventually, metric_sum
from support.frontend.stack import FrontendStack, ids

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
ASKED = {"x-minisgl-report-usage": "1"}
MakeStack = Callable[..., FrontendStack]


@contextlib.contextmanager
def gateway_of(stack: FrontendStack) -> Iterator[httpx.Client]:
    server = GatewayServer(GatewayOptions(port=0, control_port=0, backends=(stack.openai_url[:-3],), drain_timeout=0.1))
    listening = threading.Event()
    thread = threading.Thread(target=server.run, args=(lambda _: listening.set(),))
    thread.start()
    try:
        assert listening.wait(WAIT_SECONDS)
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=WAIT_SECONDS) as http:
            eventually(lambda: http.get("/ready").status_code == 200)
            yield http
    finally:
        server.stop()
        thread.join(WAIT_SECONDS)


def counted(http: httpx.Client) -> dict[str, int]:
    """Return the tokens that the gateway has counted."""
    lines = http.get("/metrics").text.splitlines()
    return {
        kind: int(line.split()[-1])
        for kind in ("prompt", "completion")
        for line in lines
        if f"_{kind}_tokens_total{{" in line
    }


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_whole_answer_reports_its_tokens_in_a_header(stack: FrontendStack, path: str, n: int) -> None:
    stack.scheduler.answer = answer_with(ids("Hello"))
    body = {**(CHAT if "chat" in path else {"prompt": ["a", "b"], "max_tokens": 8}), "n": n}
    assert "x-minisgl-usage" not in stack.http.post(path, json=body).headers
    answer = stack.http.post(path, json=body, headers=ASKED)
    usage = answer.json()["usage"]
    reported = json.loads(answer.headers["x-minisgl-usage"])
    assert reported == {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_stream_reports_its_tokens_in_a_comment_before_its_end(stack: FrontendStack, path: str) -> None:
    stack.scheduler.answer = answer_with(ids("Hello"))
    body: dict[str, Any] = {"input": "Hi", "max_output_tokens": 8} if "responses" in path else CHAT
    plain = stack.http.post(path, json={**body, "stream": True}).text
    assert "minisgl-usage" not in plain
    answer = stack.http.post(path, json={**body, "stream": True}, headers=ASKED)
    comments = [line for line in answer.text.split("\n\n") if line.startswith(": minisgl-usage ")]
    assert len(comments) == 1
    reported = json.loads(comments[0].removeprefix(": minisgl-usage "))
    assert reported["completion_tokens"] == 8
    assert json.loads(answer.headers["x-minisgl-usage"])["prompt_tokens"] == reported["prompt_tokens"] > 0
    assert not answer.text.endswith(comments[0] + "\n\n"), "what ends the stream comes last"


def test_streams_through_a_gateway_are_those_of_the_frontend_and_are_counted(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with(ids("Hello"))
    usage = stack.http.post("/v1/chat/completions", json=CHAT).json()["usage"]
    with gateway_of(stack) as http:
        assert [entry["id"] for entry in http.get("/v1/models").json()["data"]] == ["org/tiny"]
        answer = http.post("/v1/chat/completions", json={**CHAT, "model": "org/tiny", "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")
        assert "minisgl-usage" not in answer.text + str(answer.headers)
        assert counted(http) == {kind: usage[f"{kind}_tokens"] for kind in ("prompt", "completion")}


def test_tenants_and_priorities_of_a_gateway_are_believed_where_it_is_trusted(make_stack: MakeStack) -> None:
    stack = make_stack(access=Access(trust_gateway=True))
    stack.scheduler.answer = answer_with(ids("a"))
    for tenant, priority, own in (("key a", "5", 0), ("key b", "5", -2), ("key b", "5", 9), ("key b", "x", 3)):
        headers = {"x-minisgl-tenant": tenant, "x-minisgl-priority": priority}
        stack.http.post("/v1/chat/completions", json={**CHAT, "priority": own}, headers=headers)
    submits = stack.scheduler.received(Submit)
    assert [submit.priority for submit in submits] == [5, 3, 5, 3]
    assert submits[0].tenant != submits[1].tenant == submits[2].tenant


def test_no_client_can_name_its_tenant_elsewhere(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with(ids("a"))
    for tenant in ("key a", "key b"):
        headers = {"x-minisgl-tenant": tenant, "x-minisgl-priority": "5"}
        stack.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    submits = stack.scheduler.received(Submit)
    assert submits[0].tenant == submits[1].tenant
    assert [submit.priority for submit in submits] == [0, 0]


GATEWAY, CLIENT = "127.0.0.2", "127.0.0.1"


class Cluster:
    """A frontend of a cluster: connections come from several addresses, and an operator polls its status."""

    def __init__(self, stack: FrontendStack) -> None:
        self.stack = stack
        stack.scheduler.answer = answer_with(ids("a"))

    def poll(self, gateways: str | None) -> None:
        """Poll the status as an operator that knows these pods of the gateway; None: it has none."""
        headers = {} if gateways is None else {GATEWAYS_HEADER: gateways}
        port = self.stack.server.control_port
        assert httpx.get(f"http://127.0.0.1:{port}/status", headers=headers, timeout=WAIT_SECONDS).status_code == 200

    def not_believed(self) -> float:
        """Requests so far that named a tenant and were not believed."""
        return metric_sum(self.stack.http.get("/metrics").text, "minisgl:untrusted_tenants_total")

    def submit(self, address: str, tenant: str, **headers: str) -> Submit:
        """Send a request from `address`; returns what the scheduler gets."""
        before = len(self.stack.scheduler.received(Submit))
        said = {"x-minisgl-tenant": tenant, "x-minisgl-priority": "5", **headers}
        transport = httpx.HTTPTransport(local_address=address)
        with httpx.Client(base_url=self.stack.openai_url, transport=transport, timeout=WAIT_SECONDS) as http:
            assert http.post("/chat/completions", json=CHAT, headers=said).status_code == 200
        return self.stack.scheduler.received(Submit)[before]

    def believes(self, address: str, **headers: str) -> bool:
        """Whether requests from `address` get the tenant and the priority that they name."""
        one, other = (self.submit(address, tenant, **headers) for tenant in ("key a", "key b"))
        assert one.priority == other.priority == (5 if one.tenant != other.tenant else 0)
        return one.tenant != other.tenant


@pytest.fixture
def cluster(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv(HEARS_GATEWAYS, "true")
    return Cluster(make_stack(control_port=0))


def test_a_gateway_is_believed_once_the_operator_has_named_its_address(cluster: Cluster) -> None:
    assert not cluster.believes(GATEWAY)
    cluster.poll(None)
    assert not cluster.believes(GATEWAY)
    cluster.poll(f"10.0.0.1,{GATEWAY}")
    assert cluster.believes(GATEWAY)
    cluster.poll(None)
    assert cluster.believes(GATEWAY), "a poll of something else says nothing about gateways"
    assert cluster.not_believed() == 4
    cluster.poll("10.0.0.1")
    assert not cluster.believes(GATEWAY)
    assert cluster.not_believed() == 6, "it shows that tenants of a gateway have no effect"


def test_a_key_says_more_than_the_address_that_a_gateway_without_keys_names(
    make_stack: MakeStack, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("sk-1 one\nsk-2 two\n")
    cluster = Cluster(make_stack(access=Access(api_keys=str(tmp_path / "keys"), trust_gateway=True)))
    one, two = {"authorization": "Bearer sk-1"}, {"authorization": "Bearer sk-2"}
    direct = cluster.submit(CLIENT, "", **one).tenant
    assert cluster.submit(GATEWAY, "address 10.0.0.1", **one).tenant == direct
    assert cluster.submit(GATEWAY, "address 10.0.0.2", **one).tenant == direct
    assert cluster.submit(GATEWAY, "address 10.0.0.1", **two).tenant != direct
    assert cluster.submit(GATEWAY, "key a", **one).tenant != cluster.submit(GATEWAY, "key b", **one).tenant


def test_nobody_can_name_gateways_where_others_than_the_operator_may_reach_the_control_port(
    make_stack: MakeStack,
) -> None:
    cluster = Cluster(make_stack(control_port=0))
    cluster.poll(GATEWAY)
    assert not cluster.believes(GATEWAY)


def test_a_client_that_connects_to_the_frontend_itself_cannot_pretend_to_be_a_tenant(cluster: Cluster) -> None:
    cluster.poll(GATEWAY)
    assert not cluster.believes(CLIENT)
    # A proxy on this machine, as of a service mesh, passes on headers in which a client may write any address.
    forged = {"x-forwarded-for": GATEWAY, "forwarded": f"for={GATEWAY}", "x-real-ip": GATEWAY}
    assert not cluster.believes(CLIENT, **forged)
    assert not cluster.believes(CLIENT, **{GATEWAYS_HEADER: CLIENT})
    assert not cluster.believes(CLIENT), "the port of the API names no gateways"


def test_what_a_client_writes_does_not_pass_through_a_gateway(cluster: Cluster) -> None:
    cluster.poll(CLIENT)
    assert cluster.believes(CLIENT), "the gateway of this test has this address"
    before = len(cluster.stack.scheduler.received(Submit))
    with gateway_of(cluster.stack) as http:
        for tenant in ("key a", "key b"):
            headers = {"x-minisgl-tenant": tenant, "X-Minisgl-Priority": "5"}
            assert http.post("/v1/chat/completions", json={**CHAT, "model": "org/tiny"}, headers=headers).is_success
    submits = cluster.stack.scheduler.received(Submit)[before:]
    assert submits[0].tenant == submits[1].tenant
    assert [submit.priority for submit in submits] == [0, 0]


def test_addresses_of_gateways_are_forgotten_without_a_word_of_the_operator() -> None:
    known = KnownGateways()
    assert not known.include("10.0.0.1", 0.0)
    known.name("10.0.0.1, fd00::0001,nonsense,", 100.0)
    assert known.include("10.0.0.1", 144.0)
    assert known.include("::ffff:10.0.0.1", 144.0), "a socket for both families"
    assert known.include("fd00::1", 144.0)
    assert not any(known.include(other, 144.0) for other in ("10.0.0.2", "nonsense", ""))
    assert not known.include("10.0.0.1", 145.0)
