"""The HorizontalPodAutoscaler and the query of docs/autoscaling.md, with the autoscaler of kube-controller-manager, a
real Prometheus, and metrics of real frontends."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from harness.prometheus import Pages, Prometheus, prometheus
from minisgl.router import discovery
from support.cluster.control_plane import LocalControlPlane
from support.cluster.external_metrics import ExternalMetric, served
from support.cluster.operated_cluster import OperatedCluster, pvc_model
from support.frontend.model_frontends import ModelFrontends

PAGE: Final = Path(__file__).parents[3] / "docs" / "autoscaling.md"
FRONTENDS: Final = 2
PAUSE: Final = 1200.0
"""Seconds between two loads; Prometheus forgets a sample after 300."""

# Running and waiting requests of each replica. The page asks for 32 requests per replica.
LOADS: Final = {
    "34 on one replica": [(32, 2)],
    "100 on one replica": [(64, 36)],
    "100 on four replicas": [(32, 8), (32, 0), (16, 2), (8, 2)],
    "10 on four replicas": [(4, 0), (3, 0), (2, 0), (1, 0)],
}


def shown(kind: str) -> dict[str, Any]:
    """The object of this kind on the page."""
    blocks = [yaml.safe_load(text.split("```")[0]) for text in PAGE.read_text().split("```yaml\n")[1:]]
    [found] = [block for block in blocks if block.get("kind") == kind]
    return dict(found)


TRIGGER: Final = shown("ScaledObject")["spec"]["triggers"][0]["metadata"]
HPA: Final = shown("HorizontalPodAutoscaler")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, dict[str, float]]]:
    """Prometheus with the metrics of the frontends under each load, and the time of each."""
    path = tmp_path_factory.mktemp("measured")
    pages, now = Pages(), time.time()
    times = {load: now - PAUSE * number for number, load in enumerate(reversed(LOADS))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery, "LOOKUP_SECONDS", 0.05)
        frontends = ModelFrontends(path, "qwen3", FRONTENDS)
        try:
            for load, replicas in LOADS.items():
                for number, page in enumerate(frontends.metrics(replicas)):
                    labels = {"namespace": "default", "pod": f"qwen3-frontend-{number}", "job": "frontend"}
                    pages.add(page, times[load], labels)
        finally:
            frontends.close()
    with prometheus(pages, path) as server:
        yield server, times


def test_the_query_counts_each_request_once(measured: tuple[Prometheus, dict[str, float]]) -> None:
    server, times = measured
    for load, at in times.items():
        assert [sample["value"][1] for sample in server.query(TRIGGER["query"], at)] == [load.split()[0]]
        [frontends] = server.query('count(vllm:num_requests_running{namespace="default", model_name="qwen3"})', at)
        assert frontends["value"][1] == str(FRONTENDS)


def test_both_examples_have_the_same_target_and_limits() -> None:
    keda, hpa = shown("ScaledObject")["spec"], HPA["spec"]
    assert keda["scaleTargetRef"] == hpa["scaleTargetRef"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (hpa["minReplicas"], hpa["maxReplicas"])
    target = {"type": keda["triggers"][0]["metricType"], "averageValue": TRIGGER["threshold"]}
    assert target == hpa["metrics"][0]["external"]["target"]


def test_the_autoscaler_of_the_page_follows_the_load(
    control_plane: LocalControlPlane, measured: tuple[Prometheus, dict[str, float]]
) -> None:
    server, times = measured
    metric_name = HPA["spec"]["metrics"][0]["external"]["metric"]["name"]
    metric = ExternalMetric(server, TRIGGER["query"], metric_name, times["34 on one replica"])
    with OperatedCluster(control_plane) as cluster, cluster.operator():

        def kubectl(*args: str, stdin: str | None = None) -> str:
            return control_plane.kubectl("-n", cluster.namespace, *args, stdin=stdin).stdout

        def autoscaler() -> dict[str, Any]:
            return dict(json.loads(kubectl("get", "hpa", HPA["metadata"]["name"], "-o", "json")).get("status", {}))

        def average() -> str:
            """Metric for each replica, as the autoscaler has last read it."""
            [current] = autoscaler().get("currentMetrics") or [{}]
            return str(current.get("external", {}).get("current", {}).get("averageValue"))

        def scaling_active() -> dict[str, Any]:
            return next((each for each in autoscaler().get("conditions", ()) if each["type"] == "ScalingActive"), {})

        cluster.apply(pvc_model("qwen3"))
        cluster.until(lambda: cluster.ready("qwen3"), "Ready")
        with served(metric, control_plane, cluster.namespace):
            kubectl("apply", "-f", "-", stdin=json.dumps(HPA))
            cluster.until(lambda: average() == "34", "34 requests for the only replica")
            assert autoscaler()["desiredReplicas"] == 1, "within the tolerance of 10 %"

            metric.at = times["100 on one replica"]
            cluster.until(lambda: cluster.status("qwen3").get("readyReplicas") == 4, "a replica for each 32 requests")
            metric.at = times["100 on four replicas"]
            cluster.until(lambda: average() == "25", "100 requests divided by status.replicas")
            assert autoscaler()["desiredReplicas"] == 4

            metric.at += PAUSE / 2
            assert server.query(TRIGGER["query"], metric.at) == []
            cluster.until(lambda: scaling_active().get("reason") == "FailedGetExternalMetric", "an unknown load")
            assert cluster.status("qwen3")["replicas"] == 4, "an unknown load removes nothing"

            metric.at = times["10 on four replicas"]
            cluster.until(lambda: cluster.status("qwen3").get("replicas") == 1, "one replica")
            model = cluster.get("InferenceModel", "qwen3")
            assert model is not None and model["spec"]["replicas"] == 1
            kubectl("delete", "hpa", HPA["metadata"]["name"])
