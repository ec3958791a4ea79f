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
from minisgl_operator.api.crd import NAME, crd
from minisgl_operator.api.types import API_VERSION, KIND, PLURAL
from support.cluster.control_plane import LocalControlPlane
from support.cluster.validation_cases import smallest
from support.gateway.cluster_account import service_account
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
