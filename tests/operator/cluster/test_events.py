"""Events of the operator as `kubectl describe` shows them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from minisgl_operator.shell.client import Client, connection
from minisgl_operator.shell.events import Recorder
from minisgl_operator.status.transitions import ModelEvent
from support.cluster.control_plane import LocalControlPlane
from support.cluster.operated_cluster import OperatedCluster, pvc_model


def model(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "serving.minisgl.io/v1alpha1",
        "kind": "InferenceModel",
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}", "resourceVersion": "1"},
    }


def events(control_plane: LocalControlPlane, name: str) -> list[dict[str, Any]]:
    printed = control_plane.kubectl("get", "events", "-o", "json", f"--field-selector=involvedObject.name={name}")
    items: list[dict[str, Any]] = json.loads(printed.stdout)["items"]
    return items


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.1)


async def test_a_repeated_event_is_counted_in_one_series(control_plane: LocalControlPlane) -> None:
    async with Client(await connection(control_plane.kubeconfig)) as client:
        recorder = Recorder(client, "operator-1")
        task = asyncio.create_task(recorder.run())
        for _ in range(3):
            recorder.record(model("twice"), ModelEvent("Warning", "OutOfMemory", "Observe", "Rank 1 was killed."))
        # The limit of the API server is in bytes.
        recorder.record(model("twice"), ModelEvent("Normal", "Ready", "Observe", "…" * 5000))
        await until(lambda: len(events(control_plane, "twice")) == 2)
        task.cancel()
    found = {event["reason"]: event for event in events(control_plane, "twice")}
    assert found["OutOfMemory"]["series"]["count"] == 3
    assert found["OutOfMemory"]["reportingComponent"] == "serving.minisgl.io/minisgl-operator"
    assert found["Ready"]["message"] == "…" * (1024 // 3)


async def test_events_of_a_restless_model_are_rate_limited(control_plane: LocalControlPlane) -> None:
    async with Client(await connection(control_plane.kubeconfig)) as client:
        recorder = Recorder(client, "operator-1")
        for number in range(60):
            recorder.record(model("restless"), ModelEvent("Normal", "Changed", "Observe", f"number {number}"))
        recorder.record(model("calm"), ModelEvent("Normal", "Changed", "Observe", "once"))
        task = asyncio.create_task(recorder.run())
        await until(lambda: len(events(control_plane, "calm")) == 1)
        task.cancel()
    assert len(events(control_plane, "restless")) == 25


async def test_a_rejected_event_does_not_stop_the_next(control_plane: LocalControlPlane) -> None:
    async with Client(await connection(control_plane.kubeconfig)) as client:
        recorder = Recorder(client, "operator-1")
        task = asyncio.create_task(recorder.run())
        nowhere = model("nowhere")
        nowhere["metadata"]["namespace"] = "no-such-namespace"
        recorder.record(nowhere, ModelEvent("Normal", "Changed", "Observe", "lost"))
        recorder.record(model("next"), ModelEvent("Normal", "Changed", "Observe", "kept"))
        await recorder.flush(60)
        task.cancel()
    assert [event["message"] for event in events(control_plane, "next")] == ["kept"]


def test_an_operator_that_stops_sends_the_events_of_its_statuses_first(control_plane: LocalControlPlane) -> None:
    """The next operator would see no change. More Events are recorded at once than may be sent at once."""
    names = [f"model-{number}" for number in range(10)]
    with OperatedCluster(control_plane) as cluster:
        with cluster.operator():
            for name in names:
                cluster.apply(pvc_model(name))
            for name in names:
                cluster.until(lambda name=name: cluster.ready(name), name)  # type: ignore[misc]
        printed = control_plane.kubectl("-n", cluster.namespace, "get", "events.v1.events.k8s.io", "-o", "json")
    of_models = [e for e in json.loads(printed.stdout)["items"] if e["regarding"]["kind"] == "InferenceModel"]
    told = Counter(event["regarding"]["name"] for event in of_models if event["action"] == "Ready")
    assert told == dict.fromkeys(names, 1)
