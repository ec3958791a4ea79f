"""Ranks, pods and replicas are killed again and again while eight answers are in the middle."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest

from cluster.containers import ctr
from harness.client import ClientPod
from harness.continuity import Measurement, keep
from harness.kills import Kills, Undisturbed, kills, undisturbed
from harness.models import AGENT, cpu_model
from harness.namespace import Namespace
from harness.pods import delete_by_force, ready_pods
from harness.ranks import kill_rank, launcher_status, launcher_url
from support.continuity_results import check_pauses

PODS = ("demo-r0-0", "demo-r0-1")
SOAK = partial(pytest.param, marks=[pytest.mark.soak, pytest.mark.timeout(3000)])


def serve(namespace: Namespace, **spec: Any) -> None:
    model = cpu_model("demo", model=AGENT, recovery={"maxRestarts": 1000}, **spec)
    # Each choice of each answer has a row: an answer that waits for one would keep the others from their next kill.
    model["spec"]["engine"]["args"] = ["--max-running=16", "--num-pages=1024"]
    model["spec"]["frontend"]["args"] = ["--queue-timeout=240"]
    namespace.apply(model)
    namespace.wait("all replicas", lambda: namespace.status("demo").get("readyReplicas") == spec.get("replicas", 1))
    namespace.wait_for_condition("demo", "Ready")


Known = dict[tuple[int, int], Undisturbed]


@pytest.fixture(scope="module")
def known() -> Known:
    """Answers without a kill by the ranks of a replica and the length of long answers: all tests get the same."""
    return {}


def killing(known: Known, client: ClientPod, tensor: int, *, seldom: bool = False) -> AbstractContextManager[Kills]:
    """Read answers of the model while the block kills. seldom: long answers are so long that several kills fall into
    one, although pods take seconds to come back. The longer they are, the longer a kill waits until enough of them are
    in the middle."""
    tokens = 900 if seldom else 400
    url = client.service_url("demo")
    key = tensor, tokens
    if key not in known:
        known[key] = undisturbed(url, tokens)
    return kills(url, known[key])


def check(scenario: str, killed: str, replicas: int, found: Kills, measurement: Measurement) -> None:
    measurement(f"{scenario}: {found.summary()}")
    figures = {"killed": killed, "replicas": replicas, **found.result()}
    keep(scenario, figures)
    assert not found.failed, found.summary()
    assert not found.changed, found.summary()
    check_pauses(figures)


@pytest.mark.parametrize(
    ("count", "ranks"),
    [pytest.param(6, (0, 1), id="6"), SOAK(120, (0,), id="120-leader"), SOAK(120, (1,), id="120-follower")],
)
def test_answers_go_on_when_ranks_are_killed(
    namespace: Namespace,
    client: ClientPod,
    known: Known,
    measurement: Measurement,
    request: pytest.FixtureRequest,
    count: int,
    ranks: tuple[int, ...],
) -> None:
    serve(namespace, tensor=2)
    urls = [launcher_url(namespace, pod) for pod in PODS]

    def is_back(restarts: int) -> bool:
        leader, follower = map(launcher_status, urls)
        standbys = leader.get("standbys") and follower.get("standbys")
        return bool(leader["restarts"] >= restarts and leader["phase"] == "Ready" and standbys)

    namespace.wait("standbys", partial(is_back, 0))
    with killing(known, client, 2) as found:
        for number in range(count):
            rank = ranks[number % len(ranks)]
            restarts = launcher_status(urls[0])["restarts"] + 1
            found.kill(partial(kill_rank, namespace, PODS[rank], rank), partial(is_back, restarts))
    check(f"{request.node.callspec.id} ranks killed", "ranks", 1, found, measurement)


@pytest.mark.parametrize(("count", "replicas"), [(2, 1), (1, 2), SOAK(25, 1), SOAK(25, 2)])
def test_answers_go_on_when_pods_are_killed(
    namespace: Namespace, client: ClientPod, known: Known, measurement: Measurement, count: int, replicas: int
) -> None:
    serve(namespace, replicas=replicas)
    with killing(known, client, 1, seldom=count > 2) as found:
        for number in range(count):
            _kill_pods(namespace, found, f"demo-r{number % replicas}-0")
    check(f"{count} pods killed, {replicas} replicas", "pods", replicas, found, measurement)


@pytest.mark.parametrize("count", [1, SOAK(10)])
def test_answers_go_on_when_a_replica_is_killed(
    namespace: Namespace, client: ClientPod, known: Known, measurement: Measurement, count: int
) -> None:
    serve(namespace, tensor=2)
    with killing(known, client, 2, seldom=count > 2) as found:
        for _ in range(count):
            _kill_pods(namespace, found, *PODS)
    check(f"{count} replicas killed", "replicas", 1, found, measurement)


def _kill_pods(namespace: Namespace, found: Kills, *names: str) -> None:
    """Kill pods, make the API server forget them at once, and wait until others serve in their place. All replicas have
    standbys before: their start would take CPU time from the answers whose pauses are measured."""

    ready = partial(ready_pods, namespace.name, "demo", "engine")
    before = ready()
    launchers = [launcher_url(namespace, name) for name in before]
    namespace.wait("standbys", lambda: all(launcher_status(url)["standbys"] for url in launchers))
    pods = [pod for pod in namespace.pods("demo", "engine") if pod["metadata"]["name"] in names]

    def kill() -> None:
        for pod in pods:
            container = pod["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
            ctr(pod["spec"]["nodeName"], "task", "kill", "--signal=SIGKILL", container)
        for name in names:
            delete_by_force(namespace.name, name)

    found.kill(
        kill, lambda: (now := ready()).keys() == before.keys() and all(now[name] != before[name] for name in names)
    )
