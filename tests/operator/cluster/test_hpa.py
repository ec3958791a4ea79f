"""The HorizontalPodAutoscaler and the query of docs/autoscaling.md, with the autoscaler of kube-controller-manager, a
real Prometheus, and metrics of a real frontend."""

from __future__ import annotations

import json
import re
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import yaml
from aiohttp import web

from harness.prometheus import Pages, Prometheus, prometheus
from support.cluster.control_plane import LocalControlPlane
from support.cluster.operated_cluster import LoopThread, OperatedCluster, pvc_model
from support.frontend.fake_scheduler import STATUS
from support.frontend.stack import FrontendStack

PAGE: Final = Path(__file__).parents[3] / "docs" / "autoscaling.md"
EXTERNAL: Final = "/apis/external.metrics.k8s.io/v1beta1"
FRONTENDS: Final = ("qwen3-frontend-a", "qwen3-frontend-b")
PAUSE: Final = 1200.0
"""Seconds between two loads; Prometheus forgets a sample after 300."""


def shown(kind: str) -> dict[str, Any]:
    """The object of this kind on the page."""
    blocks = [yaml.safe_load(text.split("```")[0]) for text in PAGE.read_text().split("```yaml\n")[1:]]
    [found] = [block for block in blocks if block.get("kind") == kind]
    return dict(found)


QUERY: Final = str(shown("ScaledObject")["spec"]["triggers"][0]["metadata"]["query"])


class ExternalMetrics:
    """An external metric with the value of the page's query at the time `at`, as an adapter serves it."""

    def __init__(self, server: Prometheus, metric: str) -> None:
        self.at = 0.0
        self._server = server
        self._metric = metric

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == EXTERNAL:
            resource = {"name": self._metric, "kind": "ExternalMetricValueList", "namespaced": True, "verbs": ["get"]}
            group = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": EXTERNAL.removeprefix("/apis/")}
            return web.json_response({**group, "resources": [{"singularName": "", **resource}]})
        if not request.path.endswith(f"/{self._metric}"):
            return web.Response(status=404)
        [sample] = self._server.query(QUERY, self.at)
        item = {"metricName": self._metric, "timestamp": datetime.now(UTC).isoformat(), "value": sample["value"][1]}
        values = {"kind": "ExternalMetricValueList", "apiVersion": EXTERNAL.removeprefix("/apis/")}
        return web.json_response({**values, "metadata": {}, "items": [{"metricLabels": {}, **item}]})


@contextmanager
def extension(control_plane: LocalControlPlane, namespace: str, metrics: ExternalMetrics) -> Iterator[None]:
    """Let the API server answer requests for external metrics by `metrics`."""
    control_plane.plane.prepare().issue("metrics", "metrics", addresses=("localhost",))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(control_plane.plane.pki / "metrics.crt", control_plane.plane.pki / "metrics.key")
    thread = LoopThread()

    async def begin() -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/{path:.*}", metrics.handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        return runner

    runner = thread.run(begin())
    port = runner.addresses[0][1]
    group, version = EXTERNAL.removeprefix("/apis/").split("/")
    service = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]}
    api = {
        "group": group,
        "version": version,
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "insecureSkipTLSVerify": True,
        "service": {"namespace": namespace, "name": "metrics", "port": port},
    }
    names = ({"name": "metrics", "namespace": namespace}, {"name": f"{version}.{group}"})
    control_plane.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": names[0], "spec": service},
        {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": names[1], "spec": api},
    )
    try:
        yield
    finally:
        # With an API that does not answer, no namespace could be deleted.
        control_plane.kubectl("delete", "apiservice", f"{version}.{group}")
        thread.run(runner.cleanup())
        thread.close()


def scrape(stack: FrontendStack, running: int, waiting: int) -> str:
    """Metrics of a frontend whose engines have these requests."""
    stack.scheduler.status = msgspec.structs.replace(STATUS, running=running, waiting=waiting)
    wanted = {"running": running, "waiting": waiting}
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        page = stack.http.get("/metrics").text
        counts = dict(re.findall(r"^vllm:num_requests_(running|waiting){.*} (\S+)$", page, re.MULTILINE))
        if counts and {name: float(count) for name, count in counts.items()} == wanted:
            return page
        time.sleep(0.02)
    raise AssertionError(f"the frontend does not report {running} and {waiting} requests")


@pytest.fixture
def measured(tmp_path: Path) -> Iterator[tuple[Prometheus, list[float]]]:
    """Prometheus with the metrics of two frontends of one model under 100 and then 10 requests, and these times."""
    pages, now = Pages(), time.time()
    times = [now - PAUSE, now]
    stack = FrontendStack(tmp_path / "frontend", model="qwen3")
    try:
        for at, (running, waiting) in zip(times, ((64, 36), (10, 0)), strict=True):
            page = scrape(stack, running, waiting)
            for pod in FRONTENDS:
                # Every frontend reports the requests of all replicas.
                pages.add(page, at, {"namespace": "default", "pod": pod, "job": "frontend"})
    finally:
        stack.close()
    with prometheus(pages, tmp_path) as server:
        yield server, times


def test_the_query_counts_each_request_once(measured: tuple[Prometheus, list[float]]) -> None:
    server, times = measured
    assert [[sample["value"][1] for sample in server.query(QUERY, at)] for at in times] == [["100"], ["10"]]
    frontends = server.query('vllm:num_requests_running{namespace="default", model_name="qwen3"}', times[0])
    assert {each["metric"]["pod"] for each in frontends} == set(FRONTENDS)


def test_the_autoscaler_of_the_page_follows_the_load(
    control_plane: LocalControlPlane, measured: tuple[Prometheus, list[float]]
) -> None:
    server, times = measured
    autoscaler = shown("HorizontalPodAutoscaler")
    metrics = ExternalMetrics(server, autoscaler["spec"]["metrics"][0]["external"]["metric"]["name"])
    metrics.at = times[0]
    with OperatedCluster(control_plane) as cluster, cluster.operator():
        cluster.apply(pvc_model("qwen3"))
        cluster.until(lambda: cluster.ready("qwen3"), "Ready")
        with extension(control_plane, cluster.namespace, metrics):
            control_plane.kubectl("apply", "-n", cluster.namespace, "-f", "-", stdin=json.dumps(autoscaler))
            # 100 requests with an average of 32 for each replica.
            cluster.until(lambda: cluster.status("qwen3").get("readyReplicas") == 4, "four replicas")
            metrics.at = times[1]
            cluster.until(lambda: cluster.status("qwen3").get("replicas") == 1, "one replica")
            live = cluster.get("InferenceModel", "qwen3")
            assert live is not None and live["spec"]["replicas"] == 1
            control_plane.kubectl("delete", "hpa", "qwen3", "-n", cluster.namespace)
