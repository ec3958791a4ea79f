"""Pods of a gateway and of a frontend that are deleted or killed under 32 streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import pytest
from openai import OpenAI

from cluster.layout import in_url
from harness import installation
from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.models import cpu_model
from harness.namespace import Namespace
from harness.traffic import Traffic, traffic

SYSTEM: Final = Namespace(installation.NAMESPACE)
GATEWAY: Final = "app.kubernetes.io/name=minisgl-gateway"
FRONTEND: Final = "app.kubernetes.io/instance=demo,app.kubernetes.io/component=frontend"
SHORT: Final = 24
LONG: Final = 8
"""Streams at a time."""
STATES: Final = {"demo": "ready", "other": "ready", "zero": "idle"}
"""Of the models."""


@pytest.fixture
def gateway(images: dict[str, str]) -> Iterator[None]:
    """The release with a gateway of two pods."""
    installation.install(images, {"gateway.enabled": True})
    yield
    installation.install(images)


@pytest.fixture
def url(gateway: None, namespace: Namespace, client: ClientPod) -> str:
    """Address of a gateway in front of three models, one of them at zero."""
    scaling = {"minReplicas": 0, "maxReplicas": 1, "target": {"runningPerReplica": 8}, "idleSecondsToZero": 15}
    demo, zero = cpu_model("demo"), cpu_model("zero", autoscaling=scaling)
    demo["spec"]["frontend"]["replicas"] = 2
    zero["spec"]["frontend"]["minReplicas"] = 0
    namespace.apply(demo, cpu_model("other"), zero)
    service = SYSTEM.get("services", "minisgl-gateway")
    assert service is not None
    found = f"http://127.0.0.1:{client.port_to(in_url(service['spec']['clusterIP']) + ':80')}"
    for model in ("demo", "other"):
        namespace.wait_for_condition(model, "Ready")
    expected = {f"{namespace.name}/{name}": state for name, state in STATES.items()}
    openai = OpenAI(base_url=f"{found}/v1", api_key="none", max_retries=0, timeout=300)
    namespace.wait("states of three models", lambda: _states(openai, namespace) == expected)
    for name in STATES:
        assert ask(openai, f"{namespace.name}/{name}") == ANSWER
    return found


@pytest.mark.soak
def test_deleted_pods_break_no_stream_and_killed_ones_their_own_alone(url: str, namespace: Namespace) -> None:
    places = (SYSTEM, GATEWAY), (namespace, FRONTEND)
    for where, selector in places:
        with traffic(f"{url}/{namespace.name}/demo", short=SHORT, long=LONG) as sent:
            name = where.objects("pods", selector)[0]["metadata"]["name"]
            where.kubectl("delete", "pod", name, "--wait=false")
            where.wait("the pod to end", partial(_is_gone, where, name))
            sent.wait_for_answers(32)
        sent.check()
    for where, selector in places:
        with traffic(f"{url}/{namespace.name}/demo", retry=True, short=SHORT, long=LONG) as sent:
            pod = where.objects("pods", selector)[0]
            installation.kill(pod)
            where.wait("its container again", _restarted(where, pod))
            sent.wait_for_answers(32)
        _check_own_connections(sent)


def _is_gone(where: Namespace, name: str) -> bool:
    return where.get("pods", name) is None


def _check_own_connections(sent: Traffic) -> None:
    sent.check(frontend_lost=True)
    assert sent.answered and len(sent.cut) < sent.threads, "streams of the other pod went on"


def _restarted(where: Namespace, pod: dict[str, Any]) -> Callable[[], bool]:
    def found() -> bool:
        now = where.get("pods", pod["metadata"]["name"])
        [status] = (now or {}).get("status", {}).get("containerStatuses") or [{}]
        before = pod["status"]["containerStatuses"][0]["restartCount"]
        return bool(status.get("restartCount", 0) > before and status["ready"])

    return found


def _states(openai: OpenAI, namespace: Namespace) -> dict[str, str]:
    found = [model.model_dump() for model in openai.models.list()]
    return {
        each["qualified_name"]: each["state"]
        for each in found
        if each["qualified_name"].startswith(f"{namespace.name}/")
    }
