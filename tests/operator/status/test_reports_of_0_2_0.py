"""Reports of pods of version 0.2.0, as the operator is upgraded before the pods."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import web

from minisgl_operator.api.objects import Manifest
from minisgl_operator.facts.observed import Unreachable
from minisgl_operator.render import names
from minisgl_operator.shell.metrics import Metrics
from minisgl_operator.shell.probe import Prober
from minisgl_operator.shell.store import Store
from support.cluster.inference_models import CLAIM
from support.cluster.scene import Scene, fetch_scene
from support.compat.frames import load

RECORDED = load("0.2.0")
TWO_RANKS = {"parallelism": {"tensor": 2, "gpusPerPod": 1}}


def body(family: str, name: str) -> bytes:
    return RECORDED[family].samples[name].frame


async def probed(bodies: Mapping[str, bytes]) -> dict[str, Mapping[str, Any] | Unreachable]:
    """Reports that the prober makes of these bodies of /status, by pod name."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=bodies[request.match_info["name"]], content_type="application/json")

    app = web.Application()
    app.router.add_get("/{name:.*}/status", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    store = Store()
    for name in bodies:
        store.put(pod(name))
    all_answered = asyncio.Event()

    def on_change(_: object) -> None:
        if len(prober.reports) == len(bodies):
            all_answered.set()

    def address(pod: Manifest) -> str:
        return f"http://127.0.0.1:{port}/{pod['metadata']['uid']}"

    prober = Prober(store, on_change, Metrics(), 0.02, address)
    task = asyncio.create_task(prober.run())
    try:
        async with asyncio.timeout(20):
            await all_answered.wait()
        return dict(prober.reports)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await runner.cleanup()


def pod(name: str) -> Manifest:
    labels = {names.COMPONENT_LABEL: names.ENGINE, names.POD_INDEX_LABEL: "0", names.MODEL_LABEL: "qwen"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "1", "labels": labels},
        "spec": {},
        "status": {"phase": "Running", "podIP": "127.0.0.1"},
    }


@pytest.mark.parametrize("family", ["engine_status", "frontend_status", "fetch_status"])
async def test_every_body_is_a_report(family: str) -> None:
    samples = RECORDED[family].samples
    reports = await probed({name: sample.frame for name, sample in samples.items()})
    assert reports == {name: sample.value for name, sample in samples.items()}


async def scene_with(engine: str, frontend: str = "frontend/serving") -> Scene:
    """A model of two ranks whose pods have reported these samples."""
    scene = Scene(TWO_RANKS | {"rollout": {"strategy": "Recreate"}}, source=CLAIM)
    of_engine, of_frontend = body("engine_status", engine), body("frontend_status", frontend)
    reports = await probed({"qwen-r0-0": of_engine, "frontend-0": of_frontend})
    revision = RECORDED["engine_status"].samples[engine].value["revision"]
    labelled = [scene.child("StatefulSet", "qwen-r0")["spec"]["template"], *scene.pods.values()]
    for each in labelled:
        if names.REVISION_LABEL in each["metadata"]["labels"]:
            each["metadata"]["labels"][names.REVISION_LABEL] = revision
    scene.reports = dict(reports)
    return scene


async def test_a_ready_replica_appears_in_the_status() -> None:
    status = (await scene_with("engine/ready")).status()
    [replica] = status["replicaStatuses"]
    said = RECORDED["engine_status"].samples["engine/ready"].value
    failure = said["last_failure"]
    assert status["readyReplicas"] == 1
    assert replica["phase"] == "Ready"
    assert (replica["ranks"], replica["readyRanks"]) == (2, 2)
    assert (replica["transport"], replica["epoch"], replica["restarts"]) == ("P2P/IPC", said["epoch"], 1)
    assert replica["dataTypes"] == {"weights": "fp8-block", "kvCache": "fp8_e4m3"}
    assert replica["timings"] == {"rendezvous": 0.5, "load": 3.0, "total": 8.0}
    assert replica["startupSeconds"] == 8.0
    assert replica["lastFailure"] == {
        "rank": failure["rank"],
        "pod": failure["pod"],
        "reason": failure["reason"],
        "exitCode": failure["exit_code"],
        "message": failure["message"],
        "at": failure["at"],
    }
    model = status["model"]
    assert (model["architecture"], model["maxModelLen"]) == ("Qwen3ForCausalLM", 40960)


async def test_an_unrouted_replica_is_not_available() -> None:
    assert (await scene_with("engine/ready", "frontend/empty")).status()["readyReplicas"] == 0


@pytest.mark.parametrize(("name", "phase"), [("waiting", "Waiting"), ("loading", "Loading"), ("failed", "Failed")])
async def test_a_replica_that_is_not_ready_has_its_reported_phase(name: str, phase: str) -> None:
    scene = await scene_with(f"engine/{name}", "frontend/empty")
    for each in [each for each in scene.pods if each.startswith("qwen-r0")]:
        scene.not_ready(each)
    [replica] = scene.status()["replicaStatuses"]
    assert replica["phase"] == phase
    assert replica["readyRanks"] == (1 if name == "loading" else 0)


async def condition_of_fetch(name: str) -> tuple[Scene, dict[str, Any]]:
    scene = fetch_scene()
    scene.reports |= await probed({"fetch-pod": body("fetch_status", name)})
    return scene, scene.conditions()["ModelCached"]


async def test_a_fetch_reports_its_progress() -> None:
    scene, condition = await condition_of_fetch("downloading")
    said = RECORDED["fetch_status"].samples["downloading"].value
    assert condition["reason"] == "Downloading"
    assert "40 %" in condition["message"]
    assert scene.status()["model"]["commit"] == said["commit"]


@pytest.mark.parametrize("name", ["waiting", "failed"])
async def test_a_fetch_reports_the_reason_why_it_waits_or_failed(name: str) -> None:
    _, condition = await condition_of_fetch(name)
    said = RECORDED["fetch_status"].samples[name].value
    assert condition["reason"] == said["reason"]
    assert said["message"] in condition["message"]
