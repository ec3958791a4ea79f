"""Rollouts that add a replica first, revisions that are given up, and rollouts that are paused."""

from __future__ import annotations

from datetime import timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl_operator.facts.facts import Facts
from support.cluster.guarded_cluster import GuardedCluster
from support.cluster.inference_models import CLAIM, DEFAULTS, raw_model


def settled(replicas: int, rollout: dict[str, Any]) -> GuardedCluster:
    spec = {"replicas": replicas, "engine": {"image": "engine:1"}, "rollout": rollout}
    cluster = GuardedCluster(raw_model(spec, source=CLAIM), DEFAULTS)
    cluster.broken = {"engine:broken"}
    cluster.settle()
    return cluster


def images(cluster: GuardedCluster) -> list[str]:
    return [pod["spec"]["containers"][0]["image"] for pod in cluster.pods.values()]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(replicas=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_with_surge_all_replicas_serve_at_every_moment(replicas: int, seed: int) -> None:
    order = Random(seed)
    cluster = settled(replicas, {"strategy": "Surge"})
    cluster.edit({"engine": {"image": "engine:2"}})
    actions = (cluster.reconcile, cluster.run_controllers, cluster.run_kubelets, cluster.run_frontends, cluster.look)
    for _ in range(40 * replicas):
        order.choice(actions)()
        assert len(cluster.serving()) >= replicas
    cluster.settle()
    assert len(cluster.serving()) == replicas
    assert set(images(cluster)) == {"engine:2"}


def test_auto_replaces_in_place_when_an_additional_replica_gets_no_node() -> None:
    cluster = settled(1, {})
    cluster.slots = 1
    cluster.edit({"engine": {"image": "engine:2"}})
    cluster.settle()
    assert set(cluster.serving()) == {"qwen-r0"}
    assert sorted(images(cluster)) == ["engine:1", "engine:2"], "the new replica waits for a node"
    cluster.now += timedelta(seconds=60)
    cluster.settle()
    assert images(cluster) == ["engine:2"]
    assert set(cluster.routed()) == {"qwen-r0"}, "in place"


def test_auto_adds_a_replica_when_a_node_has_room() -> None:
    cluster = settled(1, {})
    cluster.slots = 2
    cluster.edit({"engine": {"image": "engine:2"}})
    cluster.settle()
    assert set(cluster.routed()) == {"qwen-r1"}


@pytest.mark.parametrize("strategy", ["Auto", "Surge", "Recreate"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_revision_that_fails_is_rolled_back_and_the_next_edit_is_tried(strategy: str, replicas: int) -> None:
    cluster = settled(replicas, {"strategy": strategy})
    cluster.edit({"engine": {"image": "engine:broken"}})
    cluster.settle()
    assert images(cluster) == replicas * ["engine:1"]
    assert len(cluster.routed()) == replicas
    status = cluster.raw["status"]
    assert "has failed" in status["rollout"]["failure"]
    assert status["failedRevision"] == status["rollout"]["revision"] != status["rollout"]["stableRevision"]
    cluster.edit({"replicas": replicas + 1})
    cluster.settle()
    assert images(cluster) == (replicas + 1) * ["engine:1"]
    cluster.edit({"engine": {"image": "engine:2"}})
    cluster.settle()
    assert images(cluster) == (replicas + 1) * ["engine:2"]
    assert "failedRevision" not in cluster.raw["status"]


@pytest.mark.parametrize("strategy", ["Surge", "Recreate"])
def test_a_revision_that_does_not_serve_by_the_deadline_is_rolled_back(strategy: str) -> None:
    cluster = settled(1, {"strategy": strategy, "progressDeadlineSeconds": 600})
    cluster.silent = {"none"}
    cluster.edit({"engine": {"image": "engine:slow"}})
    for _ in range(4):
        cluster.look()
        cluster.reconcile()
        cluster.run_controllers()
        if strategy == "Recreate":
            cluster.run_kubelets(["qwen-r0-0"] if images(cluster) == ["engine:1"] else [])
    assert "engine:slow" in images(cluster)
    deadline = Facts(cluster.model, cluster.observed(), DEFAULTS, cluster.now).deadline
    assert deadline is not None
    assert timedelta(seconds=590) <= deadline - cluster.now <= timedelta(seconds=600)
    cluster.now += timedelta(seconds=600)
    cluster.reconcile()
    assert "within 600 s" in cluster.raw["status"]["rollout"]["failure"]
    cluster.settle()
    assert images(cluster) == ["engine:1"]
    assert len(cluster.routed()) == 1


def unproven(strategy: str) -> GuardedCluster:
    """A model whose new revision has pods, which get no node: on the only one the old revision stays, or other work
    took its place when it was drained."""
    cluster = settled(1, {"strategy": strategy, "progressDeadlineSeconds": 600})
    cluster.slots = 1 if strategy == "Surge" else 0
    cluster.edit({"engine": {"image": "engine:2"}})
    cluster.settle()
    assert "engine:2" in images(cluster)
    assert "startedAt" in cluster.raw["status"]["rollout"]
    return cluster


@pytest.mark.parametrize("strategy", ["Surge", "Recreate"])
@pytest.mark.parametrize(("off", "on"), [({"suspend": True}, {"suspend": False}), ({"replicas": 0}, {"replicas": 1})])
def test_the_deadline_of_a_revision_does_not_run_while_the_model_has_no_replicas(
    strategy: str, off: dict[str, Any], on: dict[str, Any]
) -> None:
    cluster = unproven(strategy)
    cluster.edit(off)
    cluster.settle()
    assert cluster.pods == {}
    assert cluster.facts().deadline is None
    cluster.now += timedelta(minutes=31)
    cluster.settle()
    assert "failure" not in cluster.raw["status"]["rollout"]
    cluster.slots = None
    cluster.edit(on)
    cluster.settle()
    assert images(cluster) == ["engine:2"]
    assert "failedRevision" not in cluster.raw["status"]


@pytest.mark.parametrize("strategy", ["Surge", "Recreate"])
def test_a_model_that_goes_to_zero_again_and_again_gives_its_revision_up_after_the_deadline(strategy: str) -> None:
    cluster = unproven(strategy)
    for _ in range(3):
        cluster.now += timedelta(seconds=150)
        cluster.edit({"replicas": 0})
        cluster.settle()
        cluster.now += timedelta(hours=1)
        cluster.settle()
        cluster.slots = 0
        cluster.edit({"replicas": 1})
        cluster.settle()
        assert images(cluster) == ["engine:2"]
    deadline = cluster.facts().deadline
    assert deadline is not None
    left = deadline - cluster.now
    assert timedelta(0) < left < timedelta(seconds=150), "it has had pods for 450 s and the time they took to begin"
    cluster.now = deadline
    cluster.settle()
    assert "within 600 s" in cluster.raw["status"]["rollout"]["failure"]
    assert images(cluster) == ["engine:1"]


def test_a_resumed_model_has_the_whole_time_again() -> None:
    cluster = unproven("Surge")
    cluster.now += timedelta(seconds=590)
    cluster.edit({"suspend": True})
    cluster.settle()
    cluster.slots = 0
    cluster.edit({"suspend": False})
    cluster.settle()
    deadline = cluster.facts().deadline
    assert deadline is not None and deadline - cluster.now > timedelta(seconds=500)


def test_the_pauses_of_a_replica_that_fits_only_in_part_do_not_prolong_the_deadline() -> None:
    cluster = settled(1, {"strategy": "Recreate", "progressDeadlineSeconds": 600})
    began = cluster.now
    cluster.slots = 1
    cluster.edit({"parallelism": {"tensor": 2, "gpusPerPod": 1}, "engine": {"image": "engine:2"}})
    empty = 0
    while "failure" not in cluster.raw["status"].get("rollout", {}):
        cluster.settle()
        empty += not cluster.pods
        assert cluster.now < began + timedelta(seconds=900), "the deadline begins again after each pause"
        cluster.now += timedelta(seconds=20)
    assert empty, "it went back to no pods"
    cluster.settle()
    assert images(cluster) == ["engine:1"]


def test_without_automatic_rollback_the_failure_is_reported_only() -> None:
    cluster = settled(1, {"strategy": "Recreate", "autoRollback": False})
    cluster.edit({"engine": {"image": "engine:broken"}})
    cluster.settle()
    assert images(cluster) == ["engine:broken"]
    assert "has failed" in cluster.raw["status"]["rollout"]["failure"]


def test_a_paused_rollout_changes_no_replica_and_new_ones_get_the_last_revision() -> None:
    cluster = settled(2, {"strategy": "Surge", "paused": True})
    before = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    cluster.edit({"engine": {"image": "engine:2"}, "replicas": 3})
    cluster.settle()
    assert images(cluster) == 3 * ["engine:1"]
    assert before.items() <= {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}.items()
    cluster.edit({"rollout": {"strategy": "Surge"}})
    cluster.settle()
    assert images(cluster) == 3 * ["engine:2"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_auto_does_not_take_pods_that_admission_refuses_for_a_lack_of_nodes(replicas: int) -> None:
    cluster = settled(replicas, {"autoRollback": False})
    cluster.refused = {"engine:2"}
    cluster.edit({"engine": {"image": "engine:2"}})
    for _ in range(3):
        cluster.settle()
        assert images(cluster) == replicas * ["engine:1"]
        assert len(cluster.routed()) == replicas
        cluster.now += timedelta(seconds=61)
    assert cluster.raw["status"]["failedRevision"]
    assert cluster.raw["status"]["rollout"]["strategy"] == "Surge"
    cluster.refused = set()
    cluster.settle()
    assert images(cluster) == replicas * ["engine:2"]
    assert len(cluster.routed()) == replicas


def test_auto_takes_a_quota_that_leaves_no_room_for_a_lack_of_nodes() -> None:
    cluster = settled(1, {})
    cluster.quota = 1
    cluster.edit({"engine": {"image": "engine:2"}})
    cluster.settle()
    cluster.now += timedelta(seconds=61)
    cluster.settle()
    assert images(cluster) == ["engine:2"]
