"""Upgrades from the previous version and back, while streams and new requests run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pytest

from cluster.control_plane import kubectl
from harness import installation, writes
from harness.client import ClientPod
from harness.continuity import loaded
from harness.models import spread_model
from harness.namespace import Namespace
from harness.traffic import traffic
from image_builder import build

pytestmark = pytest.mark.soak

CRD: Final = "inferencemodels.serving.minisgl.io"


@pytest.fixture
def previous(images: dict[str, str]) -> Iterator[dict[str, str]]:
    """Images of the previous version, which is installed as on a new cluster. Today's version follows at the end."""
    references = installation.load_previous()
    _uninstall()
    installation.install(references, chart=build.previous_sources() / "charts")
    yield references
    _uninstall()
    installation.install(images)


def _uninstall() -> None:
    installation.helm("uninstall", installation.RELEASE, "--wait", "--timeout=600s")
    kubectl("delete", "crd", CRD, "--timeout=600s")


def test_an_upgrade_and_a_rollback_lose_no_request(
    previous: dict[str, str],
    namespace: Namespace,
    client: ClientPod,
    images: dict[str, str],
    measurement: Callable[[str], None],
) -> None:
    namespace.apply(spread_model("demo"))
    namespace.wait("two replicas", lambda: _runs(namespace, previous))
    with traffic(client.service_url("demo")) as upgrade:
        installation.install(images)
        namespace.wait("two replicas of today's version", lambda: _runs(namespace, images))
        added = {"engine": {"podTemplate": {"labels": {"example.com/team": "a"}}}, "frontend": {"leaveSeconds": 20}}
        namespace.patch("inferencemodel", "demo", {"spec": added})
        namespace.wait("two replicas with the label", lambda: _updated(namespace, 2))
    measurement(f"helm upgrade from {build.PREVIOUS}: {upgrade.summary()}")
    with traffic(client.service_url("demo")) as rollback:
        installation.helm("rollback", installation.RELEASE, "1", "--wait", "--timeout=600s")
        namespace.wait("two replicas of the previous version", lambda: _runs(namespace, previous))
    measurement(f"helm rollback to {build.PREVIOUS}: {rollback.summary()}")
    upgrade.check()
    rollback.check()


@pytest.mark.parametrize("in_waves", [False, True], ids=["at once", "in waves"])
def test_an_upgrade_answers_every_request_whole(
    previous: dict[str, str],
    namespace: Namespace,
    client: ClientPod,
    images: dict[str, str],
    measurement: Callable[[str], None],
    in_waves: bool,
) -> None:
    """Answers go on at replicas of the other version. In waves the frontends change before the engines."""
    namespace.apply(spread_model("demo"))
    namespace.wait("two replicas", lambda: _runs(namespace, previous))
    scenario = f"helm upgrade from {build.PREVIOUS}{' in waves' if in_waves else ''}"
    with loaded(scenario, client.service_url("demo"), measurement):
        installation.install(images, {"defaults.rollout.maxModels": 1} if in_waves else None)
        namespace.wait("two replicas of today's version", lambda: _runs(namespace, images))
    if in_waves:
        frontends, engines = (_pods(namespace, component) for component in ("frontend", "engine"))
        ready = [c["lastTransitionTime"] for pod in frontends for c in _conditions(pod) if c["type"] == "Ready"]
        assert max(ready) <= min(pod["metadata"]["creationTimestamp"] for pod in engines)


def _pods(namespace: Namespace, component: str) -> list[dict[str, Any]]:
    """All pods, those that terminate too, which Namespace.pods leaves out."""
    selector = f"app.kubernetes.io/instance=demo,app.kubernetes.io/component={component}"
    return list(namespace.objects("pods", selector))


def _conditions(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(pod["status"].get("conditions", []))


def _runs(namespace: Namespace, references: Mapping[str, str]) -> bool:
    """True if all pods of the model have these images, and both replicas and frontends are ready."""
    pods: list[dict[str, Any]] = []
    for component in ("engine", "frontend"):
        found = _pods(namespace, component)
        if [pod["spec"]["containers"][0]["image"] for pod in found] != 2 * [references[component]]:
            return False
        pods += found
    conditions = [(c["type"], c["status"]) for pod in pods for c in _conditions(pod)]
    status = namespace.status("demo")
    ready = conditions.count(("Ready", "True")) == len(pods)
    return ready and (status["readyReplicas"], status["phase"]) == (2, "Ready")


def _updated(namespace: Namespace, count: int) -> bool:
    model = namespace.get("inferencemodels", "demo")
    assert model is not None
    status = model["status"]
    counted = (status["updatedReplicas"], status["readyReplicas"]) == (count, count)
    return counted and status["observedGeneration"] == model["metadata"]["generation"]


@pytest.fixture
def own_definition(images: dict[str, str]) -> Iterator[None]:
    """The definition of today's version again at the end."""
    yield
    _uninstall()
    installation.install(images)


@pytest.mark.parametrize("command", ["apply", "replace"])
def test_models_serve_with_the_definition_of_the_previous_version(
    namespace: Namespace,
    client: ClientPod,
    images: dict[str, str],
    own_definition: None,
    command: str,
    measurement: Callable[[str], None],
) -> None:
    model = spread_model("demo")
    for component in ("engine", "frontend"):
        # A field that the definition of an older version may lack.
        model["spec"][component]["podTemplate"] = {"labels": {"example.com/team": "a"}}
    namespace.apply(model)
    namespace.wait("two replicas", lambda: _runs(namespace, images))
    with traffic(client.service_url("demo")) as sent:
        kubectl(command, "-f", str(build.previous_sources() / "manifests/crd/inferencemodels.yaml"))
        # The operator does not write again and again what the API server drops.
        writes.until_quiet(namespace)
        namespace.wait("two replicas", lambda: _runs(namespace, images))
        # The API server drops fields that the definition lacks at the latest when the model is written.
        namespace.kubectl("scale", "inferencemodel/demo", "--replicas=3")
        namespace.wait("three replicas", lambda: _updated(namespace, 3))
        namespace.wait_for_condition("demo", "Ready")
    measurement(f"kubectl {command} of the definition of {build.PREVIOUS}: {sent.summary()}")
    sent.check()
