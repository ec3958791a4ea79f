"""Ranks, pods and replicas are killed while eight answers are in the middle; the operator is killed, too."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest

from cluster.containers import ctr
from harness.client import ClientPod
from harness.continuity import Measurement, keep
from harness.installation import kill_operator
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
    tokens = 900 if seldom else 250
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


def test_answers_go_on_when_ranks_and_then_all_pods_of_a_replica_are_killed(
    namespace: Namespace, client: ClientPod, known: Known, measurement: Measurement
) -> None:
    serve(namespace, tensor=2)
    before = namespace.pods("demo", "engine")
    for rank, name in enumerate(("leader", "follower")):
        with killing(known, client, 2) as found:
            _kill_rank(namespace, found, rank)
            kill_operator()
        check(f"{name} killed", "ranks", 1, found, measurement)

    def failure() -> dict[str, Any]:
        (replica,) = namespace.status("demo")["replicaStatuses"]
        last: dict[str, Any] = replica.get("lastFailure") or {}
        return last if replica["phase"] == "Ready" and last.get("rank") == 1 else {}

    reported = namespace.wait("the failure in the status", failure)
    assert (reported["pod"], reported["exitCode"]) == (PODS[1], -9)
    assert "killed by signal 9" in reported["message"]
    after = namespace.pods("demo", "engine")
    assert {p["metadata"]["uid"] for p in after} == {p["metadata"]["uid"] for p in before}
    assert all(s["restartCount"] == 0 for p in after for s in p["status"]["containerStatuses"])

    with killing(known, client, 2) as found:
        _kill_pods(namespace, found, *PODS)
    check("1 replicas killed", "replicas", 1, found, measurement)


@pytest.mark.parametrize(("count", "ranks"), [SOAK(120, (0,), id="120-leader"), SOAK(120, (1,), id="120-follower")])
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
    with killing(known, client, 2) as found:
        for number in range(count):
            _kill_rank(namespace, found, ranks[number % len(ranks)])
    check(f"{request.node.callspec.id} ranks killed", "ranks", 1, found, measurement)


def _kill_rank(namespace: Namespace, found: Kills, rank: int) -> None:
    """Kill a rank of the only replica, and wait until it serves again."""
    url = launcher_url(namespace, PODS[0])
    restarts = launcher_status(url)["restarts"] + 1

    def is_back() -> bool:
        status = launcher_status(url)
        return bool(status["restarts"] >= restarts and status["phase"] == "Ready")

    found.kill(partial(kill_rank, namespace, PODS[rank], rank), is_back)


@pytest.mark.parametrize(("count", "replicas"), [(1, 2), SOAK(25, 1), SOAK(25, 2)])
def test_answers_go_on_when_pods_are_killed(
    namespace: Namespace, client: ClientPod, known: Known, measurement: Measurement, count: int, replicas: int
) -> None:
    serve(namespace, replicas=replicas)
    with killing(known, client, 1, seldom=count > 2) as found:
        for number in range(count):
            _kill_pods(namespace, found, f"demo-r{number % replicas}-0")
    check(f"{count} pods killed, {replicas} replicas", "pods", replicas, found, measurement)


@pytest.mark.parametrize("count", [SOAK(10)])
def test_answers_go_on_when_a_replica_is_killed(
    namespace: Namespace, client: ClientPod, known: Known, measurement: Measurement, count: int
) -> None:
    serve(namespace, tensor=2)
    with killing(known, client, 2, seldom=count > 2) as found:
        for _ in range(count):
            _kill_pods(namespace, found, *PODS)
    check(f"{count} replicas killed", "replicas", 1, found, measurement)


def _kill_pods(namespace: Namespace, found: Kills, *names: str) -> None:
    """Kill pods, make the API server forget them at once, and wait until others serve in their place."""

    ready = partial(ready_pods, namespace.name, "demo", "engine")
    before = ready()
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
