"""Changes of a serving model. The operator is killed in the middle of each change."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from openai import OpenAI

from harness import installation
from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.installation import kill_operator
from harness.models import cpu_model
from harness.namespace import Namespace
from harness.traffic import traffic

IN_PLACE: Final = {"strategy": "Recreate"}


@pytest.fixture
def ready(namespace: Namespace) -> Namespace:
    """Namespace with the Ready model "demo", whose frontend leaves at once."""
    model = cpu_model("demo")
    model["spec"]["frontend"]["leaveSeconds"] = 1
    namespace.apply(model)
    namespace.wait_for_condition("demo", "Ready")
    return namespace


def uids(pods: list[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def restarts(pods: list[dict[str, Any]]) -> int:
    return sum(status["restartCount"] for pod in pods for status in pod["status"]["containerStatuses"])


def test_scale_suspend_and_frontend_edits_change_nothing_else(ready: Namespace, client: ClientPod) -> None:
    frontend = ready.pods("demo", "frontend")
    for count in (2, 0, 1):
        _scale(ready, client, count)
    _suspend_and_resume(ready, client)
    pods = ready.pods("demo", "frontend")
    assert uids(pods) == uids(frontend)
    assert restarts(pods) == restarts(frontend)

    engines = ready.pods("demo", "engine")
    # Longer than a busy machine needs for what follows.
    _edit_the_frontend(ready, {"leaveSeconds": 30})
    assert ask(client.openai("demo"), "demo") == ANSWER
    _ask_a_frontend_that_is_deleted(ready, client)
    ready.wait_for_condition("demo", "Ready")
    pods = ready.pods("demo", "engine")
    assert uids(pods) == uids(engines)
    assert restarts(pods) == restarts(engines)


def _scale(namespace: Namespace, client: ClientPod, count: int) -> None:
    before = _engine_pods(namespace)
    namespace.kubectl("scale", "inferencemodel/demo", f"--replicas={count}")
    namespace.wait("the change to begin", partial(_differ, namespace, before))
    kill_operator()
    namespace.wait(f"{count} ready replicas", partial(_serves, namespace, count))
    if count:
        assert ask(client.openai("demo"), "demo") == ANSWER


def _suspend_and_resume(namespace: Namespace, client: ClientPod) -> None:
    before = _engine_pods(namespace)
    namespace.patch("inferencemodel", "demo", {"spec": {"suspend": True}})
    namespace.wait("a change of the engine pods", lambda: _differ(namespace, before))
    kill_operator()
    namespace.wait("no engine pods", lambda: not _engines(namespace))
    namespace.wait("the phase Suspended", lambda: namespace.status("demo")["phase"] == "Suspended")
    namespace.patch("inferencemodel", "demo", {"spec": {"suspend": False}})
    namespace.wait("an engine pod", lambda: _engines(namespace))
    kill_operator()
    namespace.wait_for_condition("demo", "Ready")
    assert ask(client.openai("demo"), "demo") == ANSWER


def _edit_the_frontend(namespace: Namespace, change: dict[str, Any]) -> None:
    frontend = uids(namespace.pods("demo", "frontend"))
    namespace.patch("inferencemodel", "demo", {"spec": {"frontend": change}})
    namespace.wait("another frontend pod", lambda: uids(namespace.pods("demo", "frontend")) - frontend)
    kill_operator()

    def replaced() -> bool:
        pods = namespace.objects("pods", "app.kubernetes.io/component=frontend")
        return len(pods) == 1 and not uids(pods) & frontend

    namespace.wait("another frontend", replaced)
    namespace.wait_for_condition("demo", "Ready")


def _ask_a_frontend_that_is_deleted(namespace: Namespace, client: ClientPod) -> None:
    """As a load balancer that still has the address of its pod."""
    (pod,) = namespace.pods("demo", "frontend")
    name = pod["metadata"]["name"]
    url = f"{client.pod_url(pod)}/v1"
    began = time.monotonic()
    namespace.kubectl("delete", "pod", name, "--wait=false")
    namespace.wait("a pod that is not ready", lambda: not _is_ready(namespace.get("pods", name)))
    assert time.monotonic() - began < 30, "it was too late to ask"
    assert ask(OpenAI(base_url=url, api_key="none", max_retries=0), "demo") == ANSWER


def _is_ready(pod: dict[str, Any] | None) -> bool:
    assert pod is not None, "the pod ended"
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"]["conditions"])


@pytest.mark.soak
def test_a_scale_down_keeps_the_replica_that_serves(namespace: Namespace, client: ClientPod) -> None:
    namespace.apply(cpu_model("demo", replicas=2, rollout=IN_PLACE))
    namespace.wait("two replicas", lambda: namespace.status("demo").get("readyReplicas") == 2)
    before = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in namespace.pods("demo", "engine")}
    with traffic(client.service_url("demo")) as sent:
        namespace.patch("inferencemodel", "demo", {"spec": {"engine": {"image": "localhost/not-there:1"}}})
        namespace.wait_for_condition("demo", "Scheduled", "False", reason="ImagePullFailed")
        now = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in _engines(namespace)}
        (kept,) = before.items() & now.items()
        namespace.kubectl("scale", "inferencemodel/demo", "--replicas=1")
        kill_operator()
        namespace.wait("the smaller number in the status", lambda: namespace.status("demo")["observedGeneration"] == 3)
        sent.wait_for_answers()
        # Back to the image of the replica that serves.
        namespace.patch("inferencemodel", "demo", {"spec": {"engine": {"image": None}}})
        namespace.wait("one pod", lambda: len(_engines(namespace)) == 1)
        namespace.wait_for_condition("demo", "Ready")
    (pod,) = _engines(namespace)
    assert (pod["metadata"]["name"], pod["metadata"]["uid"]) == kept
    sent.check()


@pytest.mark.soak
def test_an_edit_with_a_scale_down_serves_all_the_time(
    namespace: Namespace, client: ClientPod, measurement: Callable[[str], None]
) -> None:
    namespace.apply(cpu_model("demo", replicas=2))
    namespace.wait("two replicas", lambda: namespace.status("demo").get("readyReplicas") == 2)
    before = uids(_engines(namespace))
    with traffic(client.service_url("demo")) as sent:
        change = {"replicas": 1, "engine": {"args": ["--max-running=4", "--num-pages=256"]}}
        namespace.patch("inferencemodel", "demo", {"spec": change})
        namespace.wait("another pod", lambda: uids(_engines(namespace)) - before)
        kill_operator()

        def done() -> bool:
            return len(_engines(namespace)) == 1 and not uids(_engines(namespace)) & before

        namespace.wait("one pod of the new revision", done)
        namespace.wait_for_condition("demo", "Ready")
    measurement(f"an edit with a scale-down: {sent.summary()}")
    sent.check()


def _engines(namespace: Namespace) -> list[dict[str, Any]]:
    return namespace.objects("pods", "app.kubernetes.io/component=engine")


def _engine_pods(namespace: Namespace) -> set[tuple[str, bool]]:
    """UID of each pod, and whether it is terminating."""
    found = namespace.objects("pods", "app.kubernetes.io/component=engine")
    return {(pod["metadata"]["uid"], "deletionTimestamp" in pod["metadata"]) for pod in found}


def _differ(namespace: Namespace, before: set[tuple[str, bool]]) -> bool:
    return _engine_pods(namespace) != before


def _serves(namespace: Namespace, count: int) -> bool:
    status = namespace.status("demo")
    pods = len(namespace.pods("demo", "engine"))
    phase = "Ready" if count else "Suspended"
    return (status["readyReplicas"], status["replicas"], pods, status["phase"]) == (count, count, count, phase)


@pytest.mark.soak
def test_an_engine_edit_replaces_replicas_one_by_one(namespace: Namespace, client: ClientPod) -> None:
    namespace.apply(cpu_model("demo", tensor=2, replicas=2, rollout=IN_PLACE))
    namespace.wait("two replicas", lambda: namespace.status("demo").get("readyReplicas") == 2)
    before = uids(namespace.pods("demo", "engine"))
    frontend = uids(namespace.pods("demo", "frontend"))
    with watching(namespace) as seen:
        change = {"spec": {"engine": {"args": ["--max-running=4", "--num-pages=256"]}}}
        namespace.patch("inferencemodel", "demo", change)
        namespace.wait("the first replica's new pods", lambda: uids(namespace.pods("demo", "engine")) - before)
        kill_operator()

        def done() -> bool:
            status = namespace.status("demo")
            current = status["observedGeneration"] == 2 and status["updatedReplicas"] == status["readyReplicas"] == 2
            return current and not before & uids(namespace.pods("demo", "engine"))

        namespace.wait("both replicas at the new revision", done)
    assert seen.most_pods == 4
    assert not seen.mixed
    assert uids(namespace.pods("demo", "frontend")) == frontend
    assert ask(client.openai("demo"), "demo") == ANSWER


def test_a_checkpoint_with_another_chat_template_replaces_replicas_one_by_one(
    namespace: Namespace, client: ClientPod, tmp_path: Path
) -> None:
    remark = "{# another template with the same result #}"
    other = tmp_path / "demo-other"
    shutil.copytree(installation.ROOT / ".cache/demo", other)
    config = json.loads((other / "tokenizer_config.json").read_text())
    config["chat_template"] = remark + config["chat_template"]
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    installation.publish_checkpoint("demo-other", other)
    namespace.apply(cpu_model("demo", replicas=2, rollout=IN_PLACE))
    namespace.wait("two replicas", lambda: namespace.status("demo").get("readyReplicas") == 2)
    before = uids(namespace.pods("demo", "engine"))
    frontend = uids(namespace.pods("demo", "frontend"))
    openai = client.openai("demo")
    with watching(namespace) as seen:
        change = {"spec": {"model": {"source": {"pvc": {"path": "demo-other"}}}}}
        namespace.patch("inferencemodel", "demo", change)
        namespace.wait("the first replica's new pod", lambda: uids(namespace.pods("demo", "engine")) - before)
        kill_operator()

        def done() -> bool:
            # One of the two replicas always answers, also while the frontend changes its tokenizer files.
            assert ask(openai, "demo") == ANSWER
            status = namespace.status("demo")
            current = status["observedGeneration"] == 2 and status["updatedReplicas"] == status["readyReplicas"] == 2
            return current and not before & uids(namespace.pods("demo", "engine"))

        namespace.wait("both replicas with the other checkpoint", done)
    assert seen.most_pods == 2
    assert not seen.mixed
    assert uids(namespace.pods("demo", "frontend")) == frontend
    answer = httpx.get(f"{client.service_url('demo')}/tokenizer_info", timeout=60).json()
    assert answer["chat_template"].startswith(remark)
    assert ask(openai, "demo") == ANSWER


class Observed:
    """Observations during a change."""

    def __init__(self) -> None:
        self.most_pods = 0
        self.mixed: set[tuple[str, ...]] = set()
        """Sets of different revisions that pods of one replica had at the same time."""


@contextmanager
def watching(namespace: Namespace) -> Iterator[Observed]:
    """Observe the engine pods in another thread while the block runs."""
    seen, end = Observed(), threading.Event()

    def look() -> None:
        while not end.is_set():
            pods = namespace.objects("pods", "app.kubernetes.io/component=engine")
            seen.most_pods = max(seen.most_pods, len(pods))
            revisions: dict[str, set[str]] = {}
            for pod in pods:
                labels = pod["metadata"]["labels"]
                replica = labels["serving.minisgl.io/replica"]
                revisions.setdefault(replica, set()).add(labels["serving.minisgl.io/revision"])
            seen.mixed |= {tuple(sorted(found)) for found in revisions.values() if len(found) > 1}
            time.sleep(0.2)

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            yield seen
        finally:
            end.set()
        looking.result()
