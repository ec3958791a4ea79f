from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from minisgl_operator.shell.client import Client, Connection
from minisgl_operator.shell.config import Config
from minisgl_operator.shell.controller import Controller
from minisgl_operator.shell.health import Health, LoopLag
from minisgl_operator.shell.metrics import Metrics, render
from support.cluster.inference_models import DEFAULTS


async def _get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}{path}") as answer:
        return answer.status, await answer.text()


async def test_failing_probes_return_the_reason() -> None:
    reasons = {"unhealthy": "", "unready": "the first full list is not complete"}
    health = Health(lambda: reasons["unhealthy"], lambda: reasons["unready"], lambda: "some 1\n")
    port = await health.start(0, "127.0.0.1")
    try:
        assert await _get(port, "/healthz") == (200, "ok\n")
        assert await _get(port, "/readyz") == (503, "the first full list is not complete\n")
        assert await _get(port, "/metrics") == (200, "some 1\n")
        reasons["unhealthy"] = "a reconcile has been running for 200 s"
        assert (await _get(port, "/healthz"))[0] == 503
        assert (await _get(port, "/secrets"))[0] == 404
    finally:
        await health.stop()


async def test_probes_are_answered_over_ipv4_and_ipv6() -> None:
    health = Health(lambda: "", lambda: "", lambda: "")
    port = await health.start(0)
    try:
        for host in ("127.0.0.1", "[::1]"):
            assert (await _get(port, "/healthz", host))[0] == 200
    finally:
        await health.stop()


async def test_probes_are_answered_on_a_kernel_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.has_dualstack_ipv6", lambda: False)
    health = Health(lambda: "", lambda: "", lambda: "")
    port = await health.start(0)
    try:
        assert (await _get(port, "/healthz"))[0] == 200
    finally:
        await health.stop()


async def test_a_crashed_task_fails_the_health_check(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: LoopLag) -> None:
        raise KeyError("spec")

    monkeypatch.setattr(LoopLag, "watch", fail)
    config = Config(defaults=DEFAULTS, metrics_port=0)
    async with Client(Connection(host="http://127.0.0.1:1")) as client:
        controller = Controller(client, config, "one", Metrics())
        port = await controller.serve_health()
        try:
            async with asyncio.timeout(60):
                while (answer := await _get(port, "/healthz"))[0] != 503:
                    await asyncio.sleep(0)
            assert answer[1] == "loop lag ended: KeyError('spec')\n"
        finally:
            await controller.stop()


def test_prometheus_can_parse_the_metrics() -> None:
    counts = Metrics()
    counts.reconciled("success", 0.02)
    counts.reconciled("success", 100)
    counts.reconciled("error", 0.3)
    counts.requested("PATCH", 200)
    counts.applies["Service", "skipped"] += 3
    counts.probes["unreachable"] += 1
    queue: Any = SimpleNamespace(depth=4, adds=9, retries=2, longest_running=lambda: 1.5)
    ready = [{"type": "Ready", "status": "True", "reason": "Ready"}]
    failed = [
        {"type": "Ready", "status": "False", "reason": "NoReplicaReady"},
        {"type": "Progressing", "status": "False", "reason": "RolledBack"},
        {"type": "Degraded", "status": "False", "reason": "AllReplicasServe"},
    ]
    models = [
        {"metadata": {"namespace": "team-a", "name": "new"}},
        {"metadata": {"namespace": "team-a", "name": "good"}, "status": {"conditions": ready}},
        {"metadata": {"namespace": "team-b", "name": "bad"}, "status": {"conditions": failed}},
    ]
    page = render(counts, queue, models=models, resync_age=12, loop_lag=0.25, leader=True)
    families = {family.name: family for family in text_string_to_metric_families(page)}
    values = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families.values()
        for sample in family.samples
    }
    controller = ("controller", "inferencemodel")
    assert values["controller_runtime_reconcile_total", (controller, ("result", "success"))] == 2
    assert values["controller_runtime_reconcile_time_seconds_count", (controller,)] == 3
    assert values["controller_runtime_reconcile_time_seconds_bucket", (controller, ("le", "0.5"))] == 2
    assert values["controller_runtime_reconcile_time_seconds_bucket", (controller, ("le", "+Inf"))] == 3
    assert values["workqueue_depth", (("name", "inferencemodel"),)] == 4
    assert values["rest_client_requests_total", (("code", "200"), ("method", "PATCH"))] == 1
    assert values["minisgl_operator_apply_total", (("kind", "Service"), ("result", "skipped"))] == 3
    assert values["minisgl_operator_leader", ()] == 1 and values["minisgl_operator_models", ()] == 3
    found = {
        (labels["namespace"], labels["name"], labels["reason"]): value
        for (name, pairs), value in values.items()
        if name == "minisgl_operator_model_ready" and (labels := dict(pairs))
    }
    assert found == {
        ("team-a", "new", "Unknown"): 0,
        ("team-a", "good", "Ready"): 1,
        ("team-b", "bad", "NoReplicaReady"): 0,
    }
    faults = {
        (labels["name"], labels["type"], labels["status"], labels["reason"])
        for name, pairs in values
        if name == "minisgl_operator_model_condition" and (labels := dict(pairs))
    }
    assert faults == {
        ("bad", "Ready", "False", "NoReplicaReady"),
        ("bad", "Progressing", "False", "RolledBack"),
    }
