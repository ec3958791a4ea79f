"""What a gateway says of its models: lists, states and demand, by objects as an API server has them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minisgl.gateway.backends import BackendError, Listed, models_of, parse_backend
from minisgl.gateway.config import OidcOptions, RedisOptions
from minisgl.gateway.listing import listed_models
from minisgl.gateway.models import Address, InferenceModel, Key, Model, model_of
from minisgl.gateway.routing import Table, everything
from support.gateway.running import gateway_of, until
from support.gateway.stub_frontend import stub_frontend


def condition(kind: str, status: str, reason: str = "Why", message: str = "") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def read(name: str, namespace: str, spec: Any = None, **status: Any) -> Model:
    """Return the entry of an object with these parts."""
    metadata = {"name": name, "namespace": namespace, "creationTimestamp": "2026-01-02T03:04:05Z", "uid": "x"}
    raw = {
        "metadata": metadata,
        "spec": spec or {"model": {"source": {}}},
        "status": {"observedGeneration": 1} | status,
    }
    return model_of(msgspec.json.decode(msgspec.json.encode(raw), type=InferenceModel))


@pytest.mark.parametrize(
    ("conditions", "state", "reason"),
    [
        ([condition("Ready", "True", "Ready", "fine")], "ready", ""),
        ([condition("Ready", "True", "ScaledToZero", "idle now")], "idle", "ScaledToZero: idle now"),
        ([condition("Ready", "True", "Suspended")], "suspended", "Suspended"),
        ([condition("Ready", "True", "Ready"), condition("Stalled", "True", "RolledBack")], "ready", ""),
        ([condition("Ready", "False", "Loading"), condition("Stalled", "False")], "starting", "Loading"),
        (
            [condition("Ready", "False", "InvalidModel", "no such"), condition("Stalled", "True")],
            "failed",
            "InvalidModel: no such",
        ),
        ([condition("Ready", "Unknown", "Unreachable")], "starting", "Unreachable"),
        ([], "starting", "the operator has not reported a state yet"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_the_state_of_a_model_follows_from_its_conditions(
    conditions: list[dict[str, str]], state: str, reason: str
) -> None:
    found = read("a", "t", conditions=conditions)
    assert (found.state, found.reason) == (state, reason)


def test_an_object_is_read_as_far_as_it_is_needed() -> None:
    spec = {"model": {"servedNames": ["one", "two"], "source": {"pvc": {"claimName": "x"}}}, "replicas": 3}
    found = read("a", "t", spec, model={"task": "embed", "maxModelLen": 512, "commit": "c"})
    assert found.names == ("one", "two")
    assert (found.task, found.max_model_len, found.created) == ("embed", 512, 1767323045)
    assert found.addresses == (Address("a-frontend.t.svc", 8000),)
    assert read("a", "t").names == ("a",)


def test_all_models_are_listed_with_their_states_and_names_that_are_unique() -> None:
    table = Table([read("qwen", "t"), read("qwen", "u"), read("x", "u", {"model": {"servedNames": ["y", "z"]}})])
    listed = listed_models(table, everything)
    assert listed["object"] == "list"
    assert [(entry["id"], entry["state"]) for entry in listed["data"]] == [
        ("t/qwen", "starting"),
        ("u/qwen", "starting"),
        ("y", "starting"),
        ("z", "starting"),
    ]
    assert listed["data"][2]["qualified_name"] == "u/x"
    assert [entry["id"] for entry in listed_models(table, lambda model: model.key.namespace == "t")["data"]] == ["qwen"]


def test_a_thousand_models_take_little_memory_and_no_time_to_list() -> None:
    table = Table(read(f"m{number}", f"ns{number % 7}") for number in range(1000))
    assert len(listed_models(table, everything)["data"]) == len(table) == 1000


def test_servers_with_the_same_first_model_serve_one() -> None:
    a, b, c = (Address("127.0.0.1", port) for port in (1, 2, 3))
    listings = {a: [Listed("qwen"), Listed("alias")], b: [Listed("qwen")], c: [Listed("llama")]}
    qwen, llama = models_of(listings, {})
    assert (qwen.key, qwen.names, qwen.addresses, qwen.state) == (Key("", "qwen"), ("qwen", "alias"), (a, b), "ready")
    assert (llama.names, llama.addresses) == (("llama",), (c,))
    qwen, llama = models_of(listings, {a: "gone", c: "refused"})
    assert (qwen.names, qwen.addresses, qwen.state) == (("qwen",), (b,), "ready")
    assert (llama.addresses, llama.state, llama.reason) == ((c,), "starting", "no answer: refused")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "https://a", "http://", "http://a:x", "http://a/v1", "http://u@a", ""]
)
def test_a_backend_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(BackendError) as caught:
        parse_backend(url)
    assert caught.value.code == "invalid_backend"


async def test_the_list_of_a_gateway_follows_its_servers() -> None:
    async with stub_frontend("a", "a2") as a, stub_frontend("b") as b, gateway_of(a, b) as gateway:

        async def states() -> dict[str, str]:
            return {entry["id"]: entry["state"] for entry in (await gateway.get("/v1/models")).json["data"]}

        assert await states() == {"a": "ready", "a2": "ready", "b": "ready"}
        entry = (await gateway.get("/v1/models/a2")).json
        assert (entry["id"], entry["root"], entry["created"], entry["object"]) == ("a2", "a", 7, "model")
        assert (await gateway.get("/v1/models/c")).status == 404
        await b.stop()

        async def has_noticed() -> bool:
            return await states() == {"a": "ready", "a2": "ready", "b": "starting"}

        await until(has_noticed)


async def test_all_metrics_are_documented(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("tenants: [{name: a}]")
    # Nothing listens there.
    oidc, redis = OidcOptions(issuer="http://127.0.0.1:1", audiences=("a",)), RedisOptions(url="redis://127.0.0.1:1")
    async with stub_frontend("a") as stub, gateway_of(stub, keys=str(keys), oidc=oidc, redis=redis) as gateway:
        given = set(re.findall(r"^# TYPE (minisgl:gateway_\S+) ", await gateway.metrics(), re.MULTILINE))
    documented = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    assert given == set(re.findall(r"`(minisgl:gateway_\w+)", documented))


async def test_a_gateway_answers_for_itself() -> None:
    async with stub_frontend("a") as stub, gateway_of(stub) as gateway:
        assert (await gateway.get("/health")).json == {"status": "ok"}
        assert (await gateway.get("/ready")).json == {"status": "ready", "models": 1}
        assert (await gateway.get("/version")).status == 200
        assert b"<html" in (await gateway.get("/")).body
        assert (await gateway.get("/v1/responses/resp_1")).code == "response_not_found"
        assert (await gateway.get(CHAT)).status == 405
        assert (await gateway.get("/nothing")).code == "not_found"
        assert b"minisgl:gateway_models" in (await gateway.get("/metrics")).body
        assert (await gateway.control("/live"))["ready"] is True
        assert "use /live, /ready, /gateway/status or /metrics" in (await gateway.control("/x"))["error"]
        assert not stub.received


CHAT = "/v1/chat/completions"


async def test_requests_for_information_go_to_the_model_that_they_name() -> None:
    async with stub_frontend("a") as a, gateway_of(a) as gateway:
        assert (await gateway.get("/model_info")).json["path"] == "/model_info"
        await a.stop()
        answer = await gateway.get("/model_info")
        assert (answer.status, answer.code) == (503, "engine_unavailable")
        assert (await gateway.post("/tokenize", {"model": "a", "prompt": "x"})).code == "engine_unavailable"
        assert await gateway.demand("a") is None, "they use no model"


async def test_the_operator_learns_of_a_held_request_at_once() -> None:
    async with stub_frontend("a") as stub, gateway_of(stub) as gateway:
        await stub.stop()
        poll = asyncio.create_task(gateway.control("/gateway/status?wait=20"))
        await until(lambda: gateway.control("/live"))
        waiting = asyncio.create_task(gateway.post(CHAT, {"model": "a"}))
        assert (await poll)["models"]["a"]["held"] == 1
        waiting.cancel()

        async def has_left() -> bool:
            return (await gateway.demand("a"))["held"] == 0

        await until(has_left)
