"""A model that changes, loses pods or starts from nothing, under requests of all kinds: none fails, none changes."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any, Final

import httpx
import pytest

from harness import nodes, writes
from harness.client import ClientPod
from harness.continuity import Measurement, keep, loaded
from harness.mixed_load import KINDS
from harness.models import AGENT, cpu_model, spread_model
from harness.namespace import Namespace
from harness.ranks import launcher_status, launcher_url

EDITED: Final = {"spec": {"engine": {"args": ["--max-running=8", "--num-pages=257"]}}}
# An engine starts in a few seconds, and on a machine that is busy in half a minute.
PATIENT: Final = {"args": ["--queue-timeout=240"], "resources": {"requests": {"cpu": "50m", "memory": "100Mi"}}}


def serve(namespace: Namespace, model: dict[str, Any]) -> None:
    model["spec"]["frontend"] = {**model["spec"]["frontend"], **PATIENT}
    model["spec"]["model"] = AGENT
    namespace.apply(model)
    namespace.wait("all replicas", partial(is_served, namespace, model["spec"].get("replicas", 1)))
    namespace.wait_for_condition("demo", "Ready")


def is_served(namespace: Namespace, replicas: int) -> bool:
    """True if this many replicas of the current generation serve, and no others exist."""
    model = namespace.get("inferencemodels", "demo")
    assert model is not None
    status = model.get("status", {})
    counts = {status.get(key, 0) for key in ("readyReplicas", "updatedReplicas")}
    sets = namespace.objects("statefulsets", "app.kubernetes.io/instance=demo")
    current = status.get("observedGeneration") == model["metadata"]["generation"]
    return current and counts == {replicas} and len(sets) == replicas


def engines(namespace: Namespace) -> dict[str, str]:
    """UID of each engine pod by name."""
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in namespace.pods("demo", "engine")}


def force_delete(namespace: Namespace, *pods: str) -> None:
    """Kill pods, and make the API server forget them at once."""
    before = engines(namespace)
    namespace.kubectl("delete", "pod", *pods, "--force", "--grace-period=0")

    def replaced() -> bool:
        now = engines(namespace)
        return all(now.get(pod, before[pod]) != before[pod] for pod in pods)

    namespace.wait("other pods", replaced)


@pytest.mark.soak
def test_requests_outlive_an_engine_pod(namespace: Namespace, client: ClientPod, measurement: Measurement) -> None:
    serve(namespace, cpu_model("demo", replicas=2))
    with loaded("engine pod kill", client.service_url("demo"), measurement):
        force_delete(namespace, "demo-r0-0")
        namespace.wait("two replicas again", partial(is_served, namespace, 2))


def _edit(namespace: Namespace, client: ClientPod, measurement: Measurement, name: str, *, strategy: str) -> None:
    """Edit the engine of a model with one replica under load, until another replica serves."""
    serve(namespace, cpu_model("demo", rollout={"strategy": strategy}))
    before = engines(namespace)
    with loaded(name, client.service_url("demo"), measurement):
        namespace.patch("inferencemodel", "demo", EDITED)
        namespace.wait("another replica", lambda: is_served(namespace, 1) and engines(namespace) != before)


def test_requests_wait_for_the_only_replica_while_it_is_replaced(
    namespace: Namespace, client: ClientPod, measurement: Measurement
) -> None:
    _edit(namespace, client, measurement, "recreate edit of one replica", strategy="Recreate")


@pytest.mark.soak
def test_requests_outlive_a_whole_replica(namespace: Namespace, client: ClientPod, measurement: Measurement) -> None:
    serve(namespace, cpu_model("demo", tensor=2))
    with loaded("replica kill", client.service_url("demo"), measurement):
        force_delete(namespace, "demo-r0-0", "demo-r0-1")
        namespace.wait("the replica again", partial(is_served, namespace, 1))


@pytest.mark.soak
def test_requests_outlive_a_drained_node(
    namespace: Namespace, images: dict[str, str], victim: str, measurement: Measurement
) -> None:
    serve(namespace, spread_model("demo", drainSeconds=60))
    client = ClientPod.create(namespace, images["frontend"], node=nodes.other_than(victim))
    with loaded("kubectl drain", client.service_url("demo"), measurement), nodes.drained(victim):
        namespace.wait("two replicas again", partial(is_served, namespace, 2))


@pytest.mark.soak
def test_requests_do_not_notice_a_surge(namespace: Namespace, client: ClientPod, measurement: Measurement) -> None:
    _edit(namespace, client, measurement, "surge edit", strategy="Surge")


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["Surge", "Recreate"])
def test_requests_outlive_an_image_that_is_rolled_back(
    namespace: Namespace, client: ClientPod, measurement: Measurement, strategy: str
) -> None:
    serve(namespace, cpu_model("demo", rollout={"strategy": strategy, "progressDeadlineSeconds": 20}))
    (image,) = _images(namespace)
    with loaded(f"broken image, {strategy.lower()}", client.service_url("demo"), measurement):
        namespace.patch("inferencemodel", "demo", {"spec": {"engine": {"image": "localhost/not-there:1"}}})
        rolled_back = namespace.wait_for_condition("demo", "Progressing", "False", reason="RolledBack")
        namespace.wait("the replica again", lambda: _serves_alone(namespace, image))
    assert "within 20 s" in rolled_back["message"]


def _images(namespace: Namespace) -> list[str]:
    return [pod["spec"]["containers"][0]["image"] for pod in namespace.pods("demo", "engine")]


def _serves_alone(namespace: Namespace, image: str) -> bool:
    """True if the only engine pod has this image and its replica serves."""
    return _images(namespace) == [image] and namespace.status("demo").get("readyReplicas") == 1


@pytest.mark.soak
def test_requests_outlive_changes_of_scale(namespace: Namespace, client: ClientPod, measurement: Measurement) -> None:
    """A model that is scaled to zero by hand refuses requests, with the time after which clients ask again."""
    serve(namespace, cpu_model("demo", replicas=3))
    with loaded("scale 3-1-3-0-2", client.service_url("demo"), measurement, refusals_allowed=True):
        for count in (1, 3, 0, 2):
            namespace.kubectl("scale", "inferencemodel/demo", f"--replicas={count}")
            namespace.wait(f"{count} replicas", partial(is_served, namespace, count))


def serve_at_zero(namespace: Namespace) -> None:
    """Create a model that begins without replicas, and whose frontend takes requests."""
    scaling = {"minReplicas": 0, "maxReplicas": 1, "target": {"runningPerReplica": 8}, "idleSecondsToZero": 60}
    model = cpu_model("demo", autoscaling=scaling)
    model["spec"]["frontend"] = PATIENT
    namespace.apply(model)
    namespace.wait("the phase Idle", lambda: namespace.status("demo").get("phase") == "Idle")
    namespace.kubectl("rollout", "status", "deployment/demo-frontend", "--timeout=300s")
    assert not namespace.objects("statefulsets", "app.kubernetes.io/instance=demo")


def test_a_scanner_does_not_wake_a_model_at_zero_and_a_client_does(namespace: Namespace, client: ClientPod) -> None:
    serve_at_zero(namespace)
    url = client.service_url("demo")
    chat, named = "/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    log = writes.position()
    for path, content, status in (
        (chat, b"not json at all", 400),
        (chat, b"{}", 400),
        (chat, json.dumps(named | {"model": "gpt-4o"}).encode(), 404),
        (chat, json.dumps(named | {"n": -1}).encode(), 400),
        ("/wp-login.php", b"log=admin", 404),
    ):
        answer = httpx.post(url + path, content=content, headers={"content-type": "application/json"}, timeout=60)
        assert answer.status_code == status, answer.text
    assert [model["id"] for model in httpx.get(f"{url}/v1/models", timeout=60).json()["data"]] == ["demo"]
    began = time.time()
    answer = httpx.post(url + chat, json=named | {"max_tokens": 1}, timeout=300)
    assert answer.status_code == 200, answer.text
    created = [
        each.at
        for each in writes.of_operators(log)
        if (each.namespace, each.resource, each.code) == (namespace.name, "statefulsets", 201)
    ]
    assert len(created) == 1 and created[0] >= began, "the client's request has started the only replica"


@pytest.mark.soak
def test_the_first_request_wakes_a_model_at_zero(
    namespace: Namespace, client: ClientPod, measurement: Measurement
) -> None:
    serve_at_zero(namespace)
    path, body = KINDS["long"]
    url = client.service_url("demo")
    log, began = writes.position(), time.time()
    parts: dict[str, float] = {}

    def note(part: str) -> None:
        parts[part] = round(time.time() - began, 2)

    with httpx.stream("POST", url + path, json={"model": "demo", "stream": True, **body}, timeout=300) as response:
        note("headers")
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if '"content":"' in line:
                break
        note("first_token")
    created = next(each.at for each in writes.of_operators(log) if each.resource == "statefulsets" and each.code == 201)
    parts["stateful_set"] = round(created - began, 2)
    (pod,) = namespace.pods("demo", "engine")
    # The rest passes before the pod's launcher runs: controller, scheduler, volumes, container.
    timings = launcher_status(launcher_url(namespace, pod["metadata"]["name"]))["timings"]
    parts |= {f"launcher_{stage}": seconds for stage, seconds in timings.items()}
    measurement(f"from zero to the first token: {parts}")
    counts = {"requests": 1, "failed": 0, "changed_tokens": 0}
    keep("from zero", {**counts, "seconds": parts["first_token"], **parts})
