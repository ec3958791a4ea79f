"""The chart's alerts and dashboard over metrics of a running model."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import openai
import pytest

from cluster.layout import in_url
from harness import installation
from harness.asking import ask
from harness.client import ClientPod
from harness.models import cpu_model
from harness.namespace import Namespace
from harness.prometheus import Pages, metrics_of, prometheus, queries

SCRAPES = 3
INTERVAL = 30.0


def test_every_query_of_the_chart_finds_its_metrics(namespace: Namespace, client: ClientPod, tmp_path: Path) -> None:
    namespace.apply(cpu_model("watched"))
    namespace.wait_for_condition("watched", "Ready")
    model = client.openai("watched")
    sources = {"frontend": f"{client.service_url('watched')}/metrics", "operator": _operator_url(client)}
    pages, now = Pages(), time.time()
    for scrape in range(SCRAPES):
        ask(model, "watched")
        with pytest.raises(openai.BadRequestError):
            model.completions.create(model="watched", prompt="Hello", max_tokens=-1)
        for job, url in sources.items():
            # As if these scrapes were half a minute apart.
            at = now - (SCRAPES - 1 - scrape) * INTERVAL
            pages.add(httpx.get(url, timeout=30).text, at, {"job": job, "namespace": namespace.name, "pod": job})
    with prometheus(pages, tmp_path) as server:
        for title, query in queries().items():
            unknown = metrics_of(query) - pages.declared
            assert not unknown, f"{title}: {unknown} are not exported"
            server.query(query, now)
        answered = {title for title, query in queries().items() if server.query(query, now)}
        # Models of other scenarios may just be deleted.
        alerts = server.query(queries()["MinisglModelNotReady"], now)
        assert namespace.name not in {alert["metric"]["namespace"] for alert in alerts}
        assert {"Models not ready A", "Requests running A", "Time to first token A", "KV cache in use A"} <= answered
        assert {"Tokens per second A", "Requests per second A", "Time in the queue A"} <= answered
        [ready] = server.query(f'minisgl_operator_model_ready{{namespace="{namespace.name}"}}', now)
        assert ready["metric"]["name"] == "watched" and float(ready["value"][1]) == 1


def _operator_url(client: ClientPod) -> str:
    found = Namespace(installation.NAMESPACE).get("services", "minisgl-operator-metrics")
    assert found is not None, "the release has no Service of metrics"
    return f"http://127.0.0.1:{client.port_to(in_url(found['spec']['clusterIP']) + ':8080')}/metrics"
