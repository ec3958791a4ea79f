"""The operator without the API server, its watches or its CRD."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from minisgl.gateway.config import GatewayOptions
from minisgl.gateway.process import GatewayServer
from minisgl_operator.shell.controller import Controller
from support.cluster.control_plane import LocalControlPlane, control_plane_or_skip
from support.cluster.operated_cluster import OperatedCluster, RunningOperator, pvc_model
from support.gateway.cluster_account import service_account
from support.gateway.running import running, until


@pytest.fixture(scope="module")
def own_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalControlPlane]:
    """A control plane that may be stopped, as no other test uses it."""
    with control_plane_or_skip(tmp_path_factory.mktemp("outages")) as plane:
        yield plane


def test_without_the_crd_the_operator_waits_until_it_exists(own_plane: LocalControlPlane) -> None:
    with OperatedCluster(own_plane, with_crd=False) as cluster, cluster.operator() as operator:
        cluster.until(lambda: operator.counts.requests["GET", 404], "the question whether the CRD is there")
        assert operator.alive and not operator.started.is_set()
        cluster.install()
        cluster.until(operator.started.is_set, "the start")
        cluster.apply(pvc_model("late"))
        cluster.until(lambda: cluster.ready("late"), "Ready")


def test_changes_during_an_outage_of_the_api_server_are_applied_afterwards(own_plane: LocalControlPlane) -> None:
    with OperatedCluster(own_plane) as cluster:
        operator = cluster.start_operator()
        cluster.apply(pvc_model("steady"))
        cluster.until(lambda: cluster.ready("steady"), "Ready")
        own_plane.stop("kube-apiserver")
        time.sleep(2)  # duration of the outage
        own_plane.start("kube-apiserver")
        own_plane.wait_until_ready()
        cluster.delete("Service", "steady")
        cluster.apply(pvc_model("steady", replicas=2))

        def settled() -> bool:
            nonlocal operator
            if not operator.alive:
                # The kubelet's part after a watch broke permanently.
                operator = cluster.start_operator()
            return cluster.status("steady").get("readyReplicas") == 2 and cluster.get("Service", "steady") is not None

        cluster.until(settled, "two replicas", 240)


def test_changes_missed_by_watches_are_found_by_the_full_list(
    own_plane: LocalControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch misses deletions while it is broken: here no watch reports anything."""
    monkeypatch.setattr("minisgl_operator.shell.controller.Controller.on_watch_event", lambda *_: None)
    with OperatedCluster(own_plane) as cluster, cluster.operator(resync_seconds=1.0):
        cluster.apply(pvc_model("unseen"))
        cluster.until(lambda: cluster.ready("unseen"), "Ready")
        lost = cluster.get("Service", "unseen")
        assert lost is not None
        cluster.delete("Service", "unseen")

        def back() -> bool:
            found = cluster.get("Service", "unseen")
            return found is not None and found["metadata"]["uid"] != lost["metadata"]["uid"]

        cluster.until(back, "the Service")
        cluster.delete("InferenceModel", "unseen")
        operator = cluster._operators[-1]
        assert isinstance(operator, RunningOperator)
        cluster.until(lambda: not operator.call(lambda controller: controller.store.models()), "an empty store")


def test_a_restored_database_of_the_api_server_is_noticed(own_plane: LocalControlPlane) -> None:
    """Its versions are lower than those that the operator knows, and watches from these report nothing."""

    def remember_later_versions(controller: Controller) -> None:
        objects = controller.store._objects
        for id, stored in objects.items():
            objects[id] = replace(stored, version=stored.version + 10**9)

    with OperatedCluster(own_plane) as cluster, cluster.operator(resync_seconds=1.0) as operator:
        cluster.apply(pvc_model("restored"))
        cluster.until(lambda: cluster.ready("restored"), "Ready")
        cluster.until_quiet(operator)
        operator.call(remember_later_versions)
        cluster.delete("Service", "restored")
        cluster.until(lambda: not operator.alive, "a restart")
        assert operator.error is None
        with cluster.operator():
            cluster.until(lambda: cluster.get("Service", "restored"), "the Service")


def test_a_permanently_broken_watch_ends_the_process_with_an_error(
    own_plane: LocalControlPlane, tmp_path: Path
) -> None:
    """The CRD is deleted while the operator runs, which must not go on without watches. Its successor waits for the
    CRD."""
    with OperatedCluster(own_plane) as cluster:
        operator = cluster.start_operator()
        cluster.until(operator.started.is_set, "the start")
        cluster.apply(pvc_model("lost"))
        cluster.until(lambda: cluster.ready("lost"), "Ready")
        own_plane.kubectl("delete", "crd", "inferencemodels.serving.minisgl.io", "--wait=true")
        cluster.install()
        cluster.apply(pvc_model("found"))

        def served() -> bool:
            nonlocal operator
            if not operator.alive:
                operator = cluster.start_operator()
            return cluster.ready("found")

        cluster.until(served, "Ready", 240)


async def test_a_gateway_keeps_its_models_in_an_outage_of_the_api_server_and_follows_changes_after_it(
    own_plane: LocalControlPlane, tmp_path: Path
) -> None:
    with (
        OperatedCluster(own_plane) as cluster,
        service_account(own_plane, "outage-gateway", tmp_path) as access,
    ):
        cluster.apply(pvc_model("before"))
        async with running(GatewayServer(GatewayOptions(port=0, control_port=0), access)) as gateway:

            async def names() -> set[str]:
                listed = {entry["id"] for entry in (await gateway.get("/v1/models")).json["data"]}
                # Models of other tests may still be there.
                return listed & {"before", "after"}

            assert await names() == {"before"}
            await asyncio.to_thread(own_plane.stop, "kube-apiserver")
            assert await names() == {"before"}
            own_plane.start("kube-apiserver")
            await asyncio.to_thread(own_plane.wait_until_ready)
            await asyncio.to_thread(cluster.apply, pvc_model("after"))

            async def follows() -> bool:
                return await names() == {"before", "after"}

            await until(follows)
