"""Operators that are killed at any moment, that run twice, or that are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.cluster.control_plane import LocalControlPlane
from support.cluster.operated_cluster import OperatedCluster, pvc_model
from support.launcher.ports import free_port

ROOT = Path(__file__).parents[3]
LEASE = "one-release"
AT_ONCE = 4
"""Number of operators that are killed at the same time."""


@pytest.fixture
def cluster(control_plane: LocalControlPlane) -> Iterator[OperatedCluster]:
    with OperatedCluster(control_plane) as cluster:
        yield cluster


def outcome(cluster: OperatedCluster, name: str) -> Any:
    """The children without fields that differ with each creation."""
    return {
        (kind, _without_hash(kind, child).replace(name, "NAME")): (
            body["metadata"]["labels"]["app.kubernetes.io/component"]
        )
        for (kind, child), body in cluster.children(name).items()
    }


def _without_hash(kind: str, child: str) -> str:
    """The name without the revision, which depends on the name of the model."""
    return child.rpartition("-")[0] if kind == "ControllerRevision" else child


@pytest.mark.timeout(900)
def test_an_operator_killed_after_any_write_is_replaced_by_one_that_finishes(cluster: OperatedCluster) -> None:
    """Exhaustive over all writes: the write took effect, its response was lost, and the process is gone."""
    with cluster.operator():
        cluster.apply(pvc_model("whole"))
        cluster.until(lambda: cluster.ready("whole"), "the whole")
        expected = outcome(cluster, "whole")
        cluster.delete("InferenceModel", "whole")
        cluster.until(lambda: not cluster.list("InferenceModel"), "its end")
    crashes, first = 0, 1
    while crashes == first - 1:
        assert crashes < 100
        with ExitStack() as stack:
            # Each in its own namespace, so that its writes are those for one new model.
            clusters = [stack.enter_context(OperatedCluster(cluster.control_plane)) for _ in range(AT_ONCE)]
            dying = []
            for number, each in enumerate(clusters, first):
                each.apply(pvc_model("crash"))
                dying.append(each.start_operator(crash_after=number))
            for each, operator in zip(clusters, dying, strict=True):
                each.until(lambda each=each, op=operator: op.crashed.is_set() or each.ready("crash"), "a crash")
                crashes += operator.crashed.is_set()
                operator.stop()
            successor = clusters[0].start_operator(others=clusters[1:])
            for number, each in enumerate(clusters, first):
                each.until(lambda each=each: each.ready("crash"), f"recovery from a crash after write {number}")
            clusters[0].until_quiet(successor)
            for each in clusters:
                assert outcome(each, "crash") == expected
        first += AT_ONCE
    assert crashes >= 12


def test_two_concurrent_operators_converge_and_stop_writing(cluster: OperatedCluster) -> None:
    with cluster.operator() as one, cluster.operator() as two:
        names = [f"both-{number}" for number in range(4)]
        for name in names:
            cluster.apply(pvc_model(name))
        for name in names:
            cluster.until(lambda name=name: cluster.ready(name), name)  # type: ignore[misc]
        for name in names:
            cluster.apply(pvc_model(name, replicas=2))
        for name in names:
            cluster.until(lambda name=name: cluster.status(name).get("readyReplicas") == 2, name)  # type: ignore[misc]
        cluster.until_quiet(one)
        cluster.until_quiet(two)

        def writes() -> int:
            return sum(
                count
                for operator in (one, two)
                for (method, _), count in operator.counts.requests.items()
                if method in ("PATCH", "PUT", "POST", "DELETE")
            )

        before = writes()
        probes = one.counts.probes.total() + two.counts.probes.total()
        cluster.until(lambda: one.counts.probes.total() + two.counts.probes.total() > probes + 100, "more probes")
        assert writes() == before


class Process:
    """`minisgl-operator run` as in the image."""

    def __init__(self, cluster: OperatedCluster, log: Path) -> None:
        self.port = free_port()
        self.log = log
        command = [
            *(sys.executable, "-m", "minisgl_operator", "run", f"--kubeconfig={cluster.control_plane.kubeconfig}"),
            *(f"--namespace={cluster.namespace}", f"--watch-namespace={cluster.namespace}"),
            *("--engine-image=example.com/engine:1", "--frontend-image=example.com/frontend:1"),
            *(f"--lease-name={LEASE}", f"--metrics-port={self.port}", "--log-format=json"),
        ]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'runtime'}:{ROOT / 'operator'}"}
        with log.open("ab") as out:
            self.popen = subprocess.Popen(command, env=environment, stdout=out, stderr=out)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""


@contextmanager
def process(cluster: OperatedCluster, log: Path) -> Iterator[Process]:
    running = Process(cluster, log)
    try:
        yield running
    finally:
        running.popen.kill()
        running.popen.wait()


def holder(cluster: OperatedCluster) -> str:
    printed = cluster.control_plane.kubectl(
        "get",
        "lease",
        LEASE,
        "-n",
        cluster.namespace,
        "-o",
        "jsonpath={.spec.holderIdentity}",
        check=False,
    )
    return printed.stdout


def test_sigterm_ends_the_process_within_five_seconds_and_releases_the_lease(
    cluster: OperatedCluster, tmp_path: Path
) -> None:
    with process(cluster, tmp_path / "one.log") as one:
        cluster.until(lambda: holder(cluster), "a holder")
        cluster.apply(pvc_model("served"))
        cluster.until(lambda: cluster.get("Deployment", "served-frontend"), "a child")
        assert one.get("/healthz")[0] == 200
        cluster.until(lambda: one.get("/readyz")[0] == 200, "readiness")
        page = one.get("/metrics")[1]
        assert "minisgl_operator_leader 1" in page and "minisgl_operator_models 1" in page
        with process(cluster, tmp_path / "two.log") as two:
            cluster.until(lambda: two.get("/readyz")[0] == 200, "the standby")
            first = holder(cluster)
            assert "minisgl_operator_leader 0" in two.get("/metrics")[1]
            start = time.monotonic()
            one.popen.send_signal(signal.SIGTERM)
            assert one.popen.wait(60) == 0
            assert time.monotonic() - start < 3 * 5
            cluster.until(lambda: holder(cluster) not in ("", first), "the standby's turn")
            start = time.monotonic()
            two.popen.send_signal(signal.SIGTERM)
            assert two.popen.wait(60) == 0
            assert time.monotonic() - start < 3 * 5
        cluster.until(lambda: holder(cluster) == "", "a free Lease")
    for name in ("one.log", "two.log"):
        assert "traceback" not in (tmp_path / name).read_text()


def test_the_successor_takes_over_the_lease_of_a_killed_operator(cluster: OperatedCluster, tmp_path: Path) -> None:
    with process(cluster, tmp_path / "one.log"):
        first = cluster.until(lambda: holder(cluster), "a holder")
        cluster.apply(pvc_model("orphan"))
        cluster.until(lambda: cluster.children("orphan"), "a child")
    with process(cluster, tmp_path / "two.log"):
        cluster.until(lambda: holder(cluster) not in ("", first), "the successor's turn", 60)
        cluster.until(lambda: len(cluster.children("orphan")) >= 10, "all children")


def test_a_waiting_operator_exits_on_sigterm(cluster: OperatedCluster, tmp_path: Path) -> None:
    with process(cluster, tmp_path / "one.log"):
        cluster.until(lambda: holder(cluster), "a holder")
        with process(cluster, tmp_path / "two.log") as two:
            cluster.until(lambda: "Waiting for the Lease" in (tmp_path / "two.log").read_text(), "the standby")
            start = time.monotonic()
            two.popen.send_signal(signal.SIGTERM)
            assert two.popen.wait(60) == 0
            assert time.monotonic() - start < 3 * 5
