"""The gateway: one address for all models, also for one that has no pod."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import httpx
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from cluster.layout import in_url
from harness import installation
from harness.asking import ANSWER, QUESTION, ask
from harness.client import ClientPod
from harness.models import cpu_model
from harness.namespace import Namespace
from harness.traffic import traffic

SYSTEM: Final = Namespace(installation.NAMESPACE)
GATEWAY: Final = "app.kubernetes.io/name=minisgl-gateway"
FRONTEND: Final = "app.kubernetes.io/instance=demo,app.kubernetes.io/component=frontend"
CHAT: Final = "/v1/chat/completions"
MESSAGES: Final[list[ChatCompletionMessageParam]] = [{"role": "user", "content": QUESTION}]
JUNK: Final = (
    (CHAT, b"not json at all", 400),
    (CHAT, b'{"model": "zero", "messages": [', 400),
    (CHAT, json.dumps({"messages": MESSAGES}).encode(), 400),
    (CHAT, json.dumps({"model": "gpt-4o", "messages": MESSAGES}).encode(), 404),
    ("/wp-login.php", b'{"model": "zero"}', 404),
)
"""Path, body, and status of the answer."""


@pytest.fixture
def gateway(images: dict[str, str]) -> Iterator[None]:
    """The release with a gateway of two pods."""
    installation.install(images, {"gateway.enabled": True})
    yield
    installation.install(images)


def pods_of_zero(namespace: Namespace) -> list[str]:
    """Names of all pods of the model "zero", also of those that terminate."""
    return [pod["metadata"]["name"] for pod in namespace.objects("pods", "app.kubernetes.io/instance=zero")]


def leads_to_gateway(namespace: Namespace) -> bool:
    """True if the Service of the model "zero" does."""
    return namespace.get("endpointslices", "zero-gateway") is not None


def is_at_zero(namespace: Namespace) -> bool:
    idle = namespace.status("zero").get("phase") == "Idle"
    return idle and leads_to_gateway(namespace) and not pods_of_zero(namespace)


def states(openai: OpenAI, namespace: Namespace) -> dict[str, str]:
    """States of the models of a namespace by qualified name: those of other scenarios may not be deleted yet."""
    found = [model.model_dump() for model in openai.models.list()]
    names = [each["qualified_name"] for each in found]
    return {name: each["state"] for name, each in zip(names, found, strict=True) if name.startswith(namespace.name)}


def delete_one(namespace: Namespace, selector: str) -> str:
    """Begin to delete one of the pods that a selector matches; returns its name."""
    name: str = namespace.objects("pods", selector)[0]["metadata"]["name"]
    namespace.kubectl("delete", "pod", name, "--wait=false")
    return name


def test_one_address_serves_models_that_lose_pods_and_one_that_has_none(
    gateway: None, namespace: Namespace, client: ClientPod
) -> None:
    scaling = {"minReplicas": 0, "maxReplicas": 1, "target": {"runningPerReplica": 8}, "idleSecondsToZero": 15}
    demo, zero = cpu_model("demo"), cpu_model("zero", autoscaling=scaling)
    demo["spec"]["frontend"]["replicas"] = 2
    zero["spec"]["frontend"]["minReplicas"] = 0
    namespace.apply(demo, zero)
    nodes = {pod["spec"]["nodeName"] for pod in SYSTEM.objects("pods", GATEWAY)}
    assert len(nodes) == 2, "the death of a node leaves a gateway"
    service = SYSTEM.get("services", "minisgl-gateway")
    assert service is not None
    url = f"http://127.0.0.1:{client.port_to(in_url(service['spec']['clusterIP']) + ':80')}"
    openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
    namespace.wait_for_condition("demo", "Ready")
    namespace.wait("a model without pods", lambda: is_at_zero(namespace))
    expected = {f"{namespace.name}/demo": "ready", f"{namespace.name}/zero": "idle"}
    namespace.wait("states of both models", lambda: states(openai, namespace) == expected)

    for path, content, status in JUNK:
        answer = httpx.post(url + path, content=content, headers={"content-type": "application/json"}, timeout=60)
        assert answer.status_code == status, answer.text
    # A gateway knows by the Host which Service a client has used.
    host = {"Host": f"zero.{namespace.name}.svc"}
    own = client.openai("zero").with_options(timeout=300, default_headers=host)
    assert own.models.retrieve("zero").model_dump()["state"] == "idle", "its own Service answers without a frontend"
    namespace.wait("two frontends", lambda: len(namespace.pods("demo", "frontend")) == 2)
    assert is_at_zero(namespace), "junk wakes no model"

    with traffic(f"{url}/{namespace.name}/demo") as sent, ThreadPoolExecutor() as pool:
        # Whole and streamed, at the gateway and at the model's own Service.
        streamed = pool.submit(ask, openai, f"{namespace.name}/zero")
        whole = own.chat.completions.create(model="zero", messages=MESSAGES, temperature=0, max_tokens=60)
        assert whole.choices[0].message.content == streamed.result() == ANSWER
        namespace.wait("its own frontends behind its Service", lambda: not leads_to_gateway(namespace))
        assert ask(own, "zero") == ANSWER
        leaving = (SYSTEM, delete_one(SYSTEM, GATEWAY)), (namespace, delete_one(namespace, FRONTEND))
        namespace.wait("both pods to end", lambda: not any(where.get("pods", name) for where, name in leaving))
        sent.wait_for_answers()
    sent.check()
    namespace.wait("a model without pods again", lambda: is_at_zero(namespace))
    namespace.wait("states as at first", lambda: states(openai, namespace) == expected)
