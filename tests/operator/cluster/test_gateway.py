"""A gateway with a real API server: models and keys by list and watch, with the permissions of its service account."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from minisgl.gateway.cluster_access import ClusterAccess
from minisgl.gateway.config import GatewayOptions
from minisgl.gateway.process import GatewayServer
from minisgl.version import __version__
from minisgl_operator.api.crd import NAME, crd
from minisgl_operator.api.types import API_VERSION, KIND, PLURAL
from support.cluster.control_plane import LocalControlPlane
from support.cluster.validation_cases import smallest
from support.gateway.cluster_account import service_account
from support.gateway.proxy import (
    BUFFERED,
    NOT_SERVING,
    SERVING,
    Proxy,
    proxy_of,
    refused,
    request_body,
    request_headers,
    set_headers,
)
from support.gateway.running import RunningGateway, running, until

HOME = "gateway-home"
TEAM = "gateway-team"
SECONDS = 1.0
"""Within which a change must be listed."""


@pytest.fixture(scope="module")
def access(control_plane: LocalControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterAccess]:
    if NAME not in control_plane.definitions:
        control_plane.apply(crd())
        control_plane.wait_for_definition(NAME)
        control_plane.definitions.add(NAME)
    control_plane.kubectl("create", "namespace", TEAM)
    with service_account(control_plane, HOME, tmp_path_factory.mktemp("account")) as found:
        yield found
    control_plane.kubectl("delete", "namespace", TEAM, "--wait=false")


def model(name: str, *served: str) -> dict[str, Any]:
    body = smallest()
    body |= {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name, "namespace": TEAM}}
    body["spec"]["model"]["servedNames"] = list(served)
    return body


async def entries(gateway: RunningGateway, headers: str = "") -> dict[str, Any]:
    listed = await gateway.get("/v1/models", headers)
    return {entry["id"]: entry for entry in listed.json["data"]} if listed.status == 200 else {}


async def seconds_until(gateway: RunningGateway, name: str, state: str | None) -> float:
    """Return the time until the list has a model in this state; None: no longer."""
    begin = time.monotonic()

    async def shows() -> bool:
        return (await entries(gateway)).get(name, {}).get("state") == state

    await until(shows)
    return time.monotonic() - begin


async def kubectl(plane: LocalControlPlane, *args: str, stdin: str | None = None) -> None:
    await asyncio.to_thread(plane.kubectl, *args, stdin=stdin)


async def test_models_are_listed_within_a_second_of_each_change(
    control_plane: LocalControlPlane, access: ClusterAccess
) -> None:
    await kubectl(control_plane, "apply", "-f", "-", stdin=json.dumps(model("first", "one")))
    options = GatewayOptions(host="0.0.0.0", port=0, control_port=0, namespaces=(TEAM,))
    server = GatewayServer(options, access)
    async with running(server) as gateway:
        assert (await entries(gateway))["one"]["qualified_name"] == f"{TEAM}/first"
        await kubectl(control_plane, "apply", "-f", "-", stdin=json.dumps(model("second", "two", "zwei")))
        assert await seconds_until(gateway, "zwei", "starting") < SECONDS
        condition = {
            "type": "Ready",
            "status": "True",
            "reason": "ScaledToZero",
            "message": "the model is idle",
            "lastTransitionTime": "2026-01-02T03:04:05Z",
        }
        patch = json.dumps({"status": {"conditions": [condition]}})
        status = ("patch", f"{PLURAL}/second", "-n", TEAM, "--subresource=status", "--type=merge", "-p", patch)
        await kubectl(control_plane, *status)
        assert await seconds_until(gateway, "two", "idle") < SECONDS
        await _holds_a_request(gateway)
        await kubectl(control_plane, "delete", f"{PLURAL}/second", "-n", TEAM)
        assert await seconds_until(gateway, "two", None) < SECONDS
    senders = {event.get("userAgent") for event in control_plane.audit() if PLURAL in event["requestURI"]}
    assert f"minisgl-gateway/{__version__}" in senders, "audit logs tell who asked"


async def _holds_a_request(gateway: RunningGateway) -> None:
    """Show that a request of the idle model is reported to the operator, by each of the ways to name the model."""
    chat, key = "/v1/chat/completions", f"{TEAM}/second"
    for path, body, headers in (
        (chat, {"model": "zwei"}, ""),
        (f"/{key}{chat}", {}, ""),
        (chat, {"model": key}, ""),
        (chat, {"model": "two"}, f"host: second.{TEAM}.svc.example.org\r\n"),
    ):
        waiting = asyncio.create_task(gateway.post(path, body, headers))

        async def is_held() -> bool:
            return ((await gateway.demand(key)) or {}).get("held") == 1

        async def has_left() -> bool:
            return bool((await gateway.demand(key))["idle_seconds"])

        await until(is_held)
        waiting.cancel()
        await until(has_left)


async def test_keys_of_secrets_are_accepted_without_a_restart(
    control_plane: LocalControlPlane, access: ClusterAccess
) -> None:
    await kubectl(control_plane, "apply", "-f", "-", stdin=json.dumps(model("first", "one")))
    server = GatewayServer(GatewayOptions(port=0, control_port=0, key_secrets=True), access)
    async with running(server) as gateway:
        key = "authorization: Bearer sk-test-1\r\n"
        assert (await gateway.get("/v1/models", key)).status == 401
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": "search-team",
                "namespace": HOME,
                "labels": {"serving.minisgl.io/gateway-key": "true"},
            },
            "stringData": {"key": "sk-test-1", "tenant": "models: [one]\nrequestsPerMinute: 60\n"},
        }
        await kubectl(control_plane, "apply", "-f", "-", stdin=json.dumps(secret))

        async def is_accepted() -> bool:
            return (await gateway.get("/v1/models", key)).status == 200

        await until(is_accepted)
        assert list(await entries(gateway, key)) == ["one"]
        await kubectl(control_plane, "delete", "secret", "search-team", "-n", HOME)

        async def is_refused() -> bool:
            return (await gateway.get("/v1/models", key)).status == 401

        await until(is_refused)


def endpoint_slice(model: str, ready: bool, *addresses: str) -> dict[str, Any]:
    """The EndpointSlice of the Service of a model's frontends, as Kubernetes writes it."""
    labels = {
        "app.kubernetes.io/name": "minisgl",
        "app.kubernetes.io/component": "frontend",
        "kubernetes.io/service-name": f"{model}-frontend",
    }
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": f"{model}-frontend-x", "namespace": HOME, "labels": labels},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [each], "conditions": {"ready": ready}} for each in addresses],
        "ports": [{"name": "http-frontend", "port": 8001}, {"name": "http", "port": 8000}],
    }


async def test_the_endpoint_picker_follows_the_ready_frontends_of_a_model(
    control_plane: LocalControlPlane, access: ClusterAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is stopped a second time at the end, which does not wait for this.
    monkeypatch.setattr("minisgl.gateway.process.LEAVE_SECONDS", 60.0)

    async def apply(*objects: dict[str, Any]) -> None:
        for each in objects:
            await kubectl(control_plane, "apply", "-f", "-", stdin=json.dumps(each))

    at_home = {"namespace": HOME}
    for name in ("picked", "other"):
        found = model(name, name)
        await apply(found | {"metadata": found["metadata"] | at_home})
    await apply(model("elsewhere", "elsewhere"))
    await apply(endpoint_slice("picked", True, "192.0.2.1"), endpoint_slice("other", False, "192.0.2.9"))
    options = GatewayOptions(
        port=0, control_port=0, namespaces=(HOME, TEAM), endpoint_picker_port=0, endpoint_picker_plaintext=True
    )
    async with running(GatewayServer(options, access)) as gateway, proxy_of(gateway) as proxy:
        # Not a generation: such a request does not wait.
        path, body = "/tokenize", {"model": "picked"}
        assert await proxy.exchange().pick(body, path) == ["192.0.2.1:8000"]
        assert refused(await proxy.exchange().ask({"model": "other"}, path)) == (503, "engine_unavailable")
        await _returns_bodies_with_served_names(proxy, f"{HOME}/picked", "picked")
        # No pool in the namespace of the picker has its pods.
        assert refused(await proxy.exchange().ask({"model": "elsewhere"}, path)) == (404, "model_not_found")
        await apply(endpoint_slice("picked", True, "192.0.2.1", "192.0.2.2"))

        async def has_both() -> bool:
            return len(await proxy.exchange().pick(body, path)) == 2

        await until(has_both)
        await kubectl(control_plane, "delete", "endpointslice", "picked-frontend-x", "-n", HOME)

        async def has_none() -> bool:
            return (await proxy.exchange().ask(body, path)).HasField("immediate_response")

        await until(has_none)
        assert await proxy.health("readiness") == SERVING
        gateway.server.stop()

        async def is_leaving() -> bool:
            return await proxy.health("readiness") == NOT_SERVING

        await until(is_leaving)
        assert await proxy.health("liveness") == SERVING


async def _returns_bodies_with_served_names(proxy: Proxy, name: str, served: str) -> None:
    """Show that the frontend gets the name that it knows, in both forms in which a proxy may send bodies."""
    path, body = "/tokenize", json.dumps({"model": name, "prompt": "x"}).encode()
    exchange = proxy.exchange()
    assert (await exchange.ask(body, path)).HasField("request_headers")
    assert json.loads(await exchange.whole_body()) == {"model": served, "prompt": "x"}
    exchange = proxy.exchange()
    await exchange.send(request_headers(path, mode=BUFFERED))
    await exchange.read()
    await exchange.send(request_body(body, end=True))
    common = (await exchange.read()).request_body.response
    assert json.loads(common.body_mutation.body)["model"] == served
    assert set_headers(common)["content-length"] == str(len(common.body_mutation.body))
