"""An extension of the API server that serves one external metric from a Prometheus query, as metrics adapters do."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from aiohttp import web

from harness.prometheus import Prometheus
from support.cluster.control_plane import LocalControlPlane
from support.cluster.operated_cluster import LoopThread

GROUP: Final = "external.metrics.k8s.io"
VERSION: Final = "v1beta1"
_PATH: Final = f"/apis/{GROUP}/{VERSION}"


@dataclass
class ExternalMetric:
    """Samples of `query` at the time `at`, in seconds, under the name of a metric."""

    server: Prometheus
    query: str
    name: str
    at: float

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == _PATH:
            resource = {"name": self.name, "singularName": "", "kind": "ExternalMetricValueList", "namespaced": True}
            listed = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/{VERSION}"}
            return web.json_response({**listed, "resources": [{**resource, "verbs": ["get"]}]})
        if not request.path.endswith(f"/{self.name}"):
            return web.Response(status=404)
        now = datetime.now(UTC).isoformat()
        items = [
            {"metricName": self.name, "metricLabels": {}, "timestamp": now, "value": sample["value"][1]}
            for sample in self.server.query(self.query, self.at)
        ]
        values = {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {}}
        return web.json_response({**values, "items": items})


@contextmanager
def served(metric: ExternalMetric, control_plane: LocalControlPlane, namespace: str) -> Iterator[None]:
    """Let the API server answer requests for external metrics; its Service is in `namespace`."""
    control_plane.plane.prepare().issue("metrics", "metrics", addresses=("localhost",))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(control_plane.plane.pki / "metrics.crt", control_plane.plane.pki / "metrics.key")
    thread = LoopThread()

    async def begin() -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/{path:.*}", metric.handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        return runner

    runner = thread.run(begin())
    port = runner.addresses[0][1]
    title = f"{VERSION}.{GROUP}"
    service = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]}
    api = {
        "group": GROUP,
        "version": VERSION,
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "insecureSkipTLSVerify": True,
        "service": {"namespace": namespace, "name": "metrics", "port": port},
    }
    name = {"name": "metrics", "namespace": namespace}
    control_plane.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": name, "spec": service},
        {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": title}, "spec": api},
    )
    try:
        yield
    finally:
        # With an API that does not answer, no namespace could be deleted.
        control_plane.kubectl("delete", "apiservice", title)
        thread.run(runner.cleanup())
        thread.close()
