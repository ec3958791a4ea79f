"""Models of the Hub, by way of a server that speaks its protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.layout import CONTROL_IP
from cluster.places import CONTROL, inside, run
from fake_hub import FakeHub, Repository
from harness import installation
from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.models import cpu_model
from harness.namespace import Namespace

STORAGE_IP = "10.243.0.2"
"""The Hub's large files lie on another host."""
READY_SECONDS = 300


@pytest.fixture
def hub(images: dict[str, str]) -> Iterator[tuple[FakeHub, str]]:
    """A Hub that pods can reach, with the demo checkpoint as org/demo; and its URL."""
    fake = FakeHub({"org/demo": Repository(installation.ROOT / ".cache/demo", revisions=("main", "v1"))})
    run(CONTROL, "ip", "addr", "replace", f"{STORAGE_IP}/24", "dev", "lan")
    with fake.serve(CONTROL_IP, STORAGE_IP, lambda make: inside(CONTROL, make)) as url:
        yield fake, url


def hub_model(namespace: Namespace, name: str, url: str, repo: str = "org/demo", **source: Any) -> dict[str, Any]:
    """A model from the Hub, with a claim for its cache."""
    model = cpu_model(name)
    model["spec"]["model"] = {
        "source": {"huggingFace": {"repo": repo, "endpoint": url, **source}},
        "dtype": "float32",
        "cache": {"claimName": f"{name}-files"},
    }
    directory = installation.MODELS.parent / f"cache-{namespace.name}-{name}"
    directory.mkdir(exist_ok=True)
    directory.chmod(0o777)
    namespace.mount_directory(f"{name}-files", directory, writable=True)
    return model


def test_a_hub_model_is_fetched_once_for_two_replicas(
    namespace: Namespace, client: ClientPod, hub: tuple[FakeHub, str]
) -> None:
    fake, url = hub
    fake.repositories["org/demo"].broken_downloads = 1
    model = hub_model(namespace, "demo", url, revision="v1")
    model["spec"]["replicas"] = 2
    namespace.apply(model)
    installation.kill_operator()
    namespace.wait("two replicas", lambda: namespace.status("demo").get("readyReplicas") == 2, READY_SECONDS)
    assert ask(client.openai("demo"), "demo") == ANSWER
    # One that broke off, and one that went on from there.
    assert fake.downloads("org/demo") == 2
    assert namespace.status("demo")["model"]["commit"] == fake.repositories["org/demo"].commit


@pytest.mark.parametrize(
    ("repository", "reason"),
    [("org/gated", "AuthRequired"), ("org/none", "NotFound"), ("org/limited", "RateLimited")],
    ids=["gated", "missing", "limited"],
)
def test_what_the_hub_refuses_is_said_in_the_condition(
    namespace: Namespace, hub: tuple[FakeHub, str], repository: str, reason: str
) -> None:
    fake, url = hub
    files = installation.ROOT / ".cache/demo"
    fake.repositories["org/gated"] = Repository(files, token="secret")
    fake.repositories["org/limited"] = Repository(files, too_many_requests=100_000)
    namespace.apply(hub_model(namespace, "demo", url, repository))
    reasons = (reason, "AuthRequired") if repository == "org/none" else (reason,)

    def refused() -> dict[str, str]:
        condition = namespace.condition("demo", "ModelCached")
        return condition if condition.get("reason") in reasons else {}

    condition = namespace.wait(f"the reason {reason}", refused, 90)
    assert condition["status"] == "False"
    assert repository in condition["message"]
    assert not namespace.pods("demo", "engine")


def test_a_token_opens_a_gated_repository(namespace: Namespace, client: ClientPod, hub: tuple[FakeHub, str]) -> None:
    fake, url = hub
    fake.repositories["org/gated"] = Repository(installation.ROOT / ".cache/demo", token="secret")
    namespace.kubectl("create", "secret", "generic", "hub", "--from-literal=token=secret")
    namespace.apply(hub_model(namespace, "demo", url, "org/gated", tokenSecretRef={"name": "hub"}))
    namespace.wait_for_condition("demo", "Ready", seconds=READY_SECONDS)
    assert ask(client.openai("demo"), "demo") == ANSWER
