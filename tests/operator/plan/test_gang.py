"""Starts of replicas with several pods on scarce GPUs."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl_operator.api.objects import Ref, has_condition
from minisgl_operator.render import names
from support.cluster.inference_models import CLAIM, DEFAULTS, HUB, raw_model
from support.cluster.simulated_cluster import SimulatedCluster

EIGHT_PODS = {"tensor": 8, "gpusPerPod": 1}


def cluster_with(slots: int, spec: dict[str, Any], uid: int = 1) -> SimulatedCluster:
    raw = raw_model(
        {"parallelism": EIGHT_PODS, "rollout": {"strategy": "Recreate", "autoRollback": False}} | spec,
        source=CLAIM, uid=f"00000000-0000-4000-8000-{uid:012d}"
    )
    cluster = SimulatedCluster(raw, DEFAULTS)
    cluster.slots = slots
    return cluster


def pods(cluster: SimulatedCluster) -> dict[str, int]:
    """Number of pods by replica that has any."""
    found: dict[str, int] = {}
    for pod in cluster.pods.values():
        replica = pod["metadata"]["labels"][names.REPLICA_LABEL]
        found[replica] = found.get(replica, 0) + 1
    return found


def pause_of(cluster: SimulatedCluster, replica: str = "qwen-r0") -> dict[str, str]:
    return dict(cluster.objects[Ref("StatefulSet", replica)]["metadata"].get("annotations") or {})


def until_complete(
    clusters: list[SimulatedCluster], some: list[SimulatedCluster], seconds: int, order: Random
) -> bool:
    """Run all clusters, which place pods in any order, until a replica of `some` serves; False if none does in time."""
    end = clusters[0].now + timedelta(seconds=seconds)
    while clusters[0].now < end:
        before = [cluster.image_of_all() for cluster in clusters]
        for cluster in clusters:
            cluster.look()
            cluster.reconcile()
            cluster.run_controllers()
        waiting = [(cluster, name) for cluster in clusters for name in sorted(cluster.pods)]
        order.shuffle(waiting)
        for cluster, name in waiting:
            cluster.run_scheduler([name])
        for cluster in clusters:
            cluster.run_kubelets()
            cluster.run_frontends()
        if any(cluster.serving() for cluster in some):
            return True
        if before == [cluster.image_of_all() for cluster in clusters]:
            skip_to_next_change(clusters)
    return False


def skip_to_next_change(clusters: list[SimulatedCluster]) -> None:
    """Let the time pass in which nothing changes, as test_next_change shows, up to a second before the next change. The
    last plans were made a second ago."""
    times = []
    for cluster in clusters:
        cluster.look()
        change = replace(cluster.facts(), now=cluster.now - timedelta(seconds=1)).next_change
        times.append(timedelta(hours=1) if change is None else change - cluster.now - timedelta(seconds=1))
    for cluster in clusters:
        cluster.now += max(min(times), timedelta(0))


def test_replicas_start_one_after_the_other_and_one_stays_pending() -> None:
    cluster = cluster_with(8, {"replicas": 3})
    cluster.placement = Random(0)
    cluster.settle()
    assert list(cluster.serving()) == ["qwen-r0"]
    assert pods(cluster) == {"qwen-r0": 8, "qwen-r1": 8}
    cluster.now += timedelta(hours=1)
    cluster.settle()
    assert pods(cluster) == {"qwen-r0": 8, "qwen-r1": 8}, "it holds no GPU, and autoscalers see it"
    cluster.slots = 16
    cluster.settle()
    assert sorted(cluster.serving()) == ["qwen-r0", "qwen-r1"]
    assert pods(cluster)["qwen-r2"] == 8


def test_a_partly_placed_replica_returns_its_gpus_after_a_minute_and_tries_again_after_growing_pauses() -> None:
    cluster = cluster_with(5, {"replicas": 2})
    pauses = []
    for count in range(1, 7):
        cluster.settle()
        assert pods(cluster) == {"qwen-r0": 8}
        assert cluster.placed == 5
        cluster.now += timedelta(seconds=50)
        cluster.reconcile()
        assert pods(cluster) == {"qwen-r0": 8}, "not yet"
        cluster.now += timedelta(seconds=10)
        cluster.settle()
        assert pods(cluster) == {}
        assert pause_of(cluster)[names.PARTIAL_STARTS_ANNOTATION] == str(count)
        before = cluster.now
        while not pods(cluster):
            skip_to_next_change([cluster])
            cluster.now += timedelta(seconds=1)
            cluster.reconcile()
            cluster.run_controllers()
        pauses.append((cluster.now - before).total_seconds())
    longest = [30, 60, 120, 240, 300, 300]
    assert all(0.3 * most < pause < 1.6 * most for pause, most in zip(pauses, longest, strict=True)), pauses
    cluster.slots = 16
    cluster.settle()
    assert sorted(cluster.serving()) == ["qwen-r0", "qwen-r1"]
    assert pause_of(cluster) == {}


def test_models_of_the_same_age_try_again_at_different_times() -> None:
    ends = set()
    for uid in range(1, 6):
        cluster = cluster_with(5, {"replicas": 1}, uid=uid)
        cluster.settle()
        cluster.now += timedelta(minutes=1)
        cluster.settle()
        ends.add(pause_of(cluster)[names.PAUSED_UNTIL_ANNOTATION])
    assert len(ends) == 5, ends


def test_each_pod_that_gets_a_node_postpones_the_end_of_the_attempt() -> None:
    cluster = cluster_with(1, {"replicas": 1})
    for slots in range(1, 9):
        cluster.slots = slots
        cluster.settle()
        cluster.now += timedelta(seconds=50)
    assert list(cluster.serving()) == ["qwen-r0"]


def test_a_replica_that_lost_a_node_for_good_returns_the_other_gpus() -> None:
    cluster = cluster_with(8, {"replicas": 1})
    cluster.settle()
    cluster.slots = 7
    del cluster.pods["qwen-r0-3"]
    cluster.settle()
    cluster.now += timedelta(minutes=1)
    cluster.settle()
    assert pods(cluster) == {}


def test_a_return_to_no_pods_counts_once_however_late_the_controller_is() -> None:
    cluster = cluster_with(5, {"replicas": 2})
    cluster.settle()
    cluster.now += timedelta(minutes=1)
    cluster.reconcile()
    first = pause_of(cluster)
    for _ in range(3):
        cluster.now += timedelta(seconds=1)
        cluster.reconcile()
    assert pods(cluster) == {"qwen-r0": 8}, "the controller has not deleted them yet"
    assert pause_of(cluster) == first
    assert first[names.PARTIAL_STARTS_ANNOTATION] == "1"


def test_a_replica_whose_missing_pods_a_quota_refuses_returns_its_gpus() -> None:
    cluster = cluster_with(8, {"replicas": 1})
    cluster.quota = 5
    cluster.settle()
    assert pods(cluster) == {"qwen-r0": 5}
    cluster.now += timedelta(seconds=50)
    cluster.settle()
    assert pods(cluster) == {"qwen-r0": 5}, "not yet"
    cluster.now += timedelta(seconds=10)
    cluster.settle()
    assert pods(cluster) == {}
    assert pause_of(cluster)[names.PARTIAL_STARTS_ANNOTATION] == "1"
    assert "exceeded quota: gpus" in pause_of(cluster)[names.EXCEEDED_QUOTA_ANNOTATION]
    cluster.quota = None
    cluster.now += timedelta(minutes=1)
    cluster.settle()
    assert list(cluster.serving()) == ["qwen-r0"]
    assert pause_of(cluster) == {}


def test_a_replica_whose_members_have_joined_counts_as_incomplete_as_long_as_pod_0_is_not_ready() -> None:
    cluster = cluster_with(8, {"replicas": 1})
    cluster.quota = 5
    cluster.settle()
    ready = [name for name, pod in sorted(cluster.pods.items()) if has_condition(pod, "Ready")]
    assert ready == [f"qwen-r0-{index}" for index in range(1, 5)]
    change = cluster.facts().gang.next_change
    assert change is not None and change <= cluster.now + timedelta(seconds=60)
    # A member that loses its link and joins again is no progress.
    cluster.now += timedelta(seconds=50)
    for links in (False, True):
        condition = {"type": "Ready", "status": str(links), "lastTransitionTime": cluster.now.isoformat()}
        conditions = cluster.pods["qwen-r0-2"]["status"]["conditions"]
        conditions[:] = [each for each in conditions if each["type"] != "Ready"] + [condition]
        cluster.look()
        change = cluster.facts().gang.next_change
        assert change is not None and change <= cluster.now + timedelta(seconds=10)


@pytest.mark.parametrize("first", [0, 1], ids=["the first", "the second"])
def test_models_that_share_a_quota_do_not_block_each_other(first: int) -> None:
    clusters = [cluster_with(16, {"replicas": 1}, uid) for uid in (1, 2)]
    clusters[0].neighbours, clusters[1].neighbours = [clusters[1]], [clusters[0]]
    for quota, cluster in zip((4, 8), (clusters[first], clusters[1 - first]), strict=True):
        cluster.quota = quota
        cluster.settle()
    clusters[first].quota = 8
    assert [pods(cluster) for cluster in clusters] == [{"qwen-r0": 4}] * 2
    assert until_complete(clusters, clusters, 1200, Random(0))


@pytest.mark.parametrize("index", [0, 3])
def test_a_pod_that_has_just_gone_does_not_end_a_replica_that_served_for_long(index: int) -> None:
    cluster = cluster_with(8, {"replicas": 1})
    cluster.settle()
    cluster.now += timedelta(hours=1)
    gone = f"qwen-r0-{index}"
    del cluster.pods[gone]
    others = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    for kubelets_know in (False, True):
        if kubelets_know:
            cluster.run_kubelets()
        cluster.look()
        cluster.reconcile()
        cluster.run_controllers()
        cluster.pods.pop(gone)
    cluster.settle()
    assert list(cluster.serving()) == ["qwen-r0"]
    assert others.items() <= {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}.items()


def test_a_replica_with_a_pod_that_never_ends_returns_the_other_gpus() -> None:
    cluster = cluster_with(8, {"replicas": 1})
    cluster.settle()
    pod = cluster.pods["qwen-r0-3"]
    cluster.hanging.add(pod["metadata"]["uid"])
    end = cluster.now + timedelta(seconds=330)
    pod["metadata"] |= {"deletionTimestamp": end.isoformat(), "deletionGracePeriodSeconds": 330}
    cluster.settle()
    cluster.now = end + timedelta(seconds=40)
    cluster.settle()
    assert pods(cluster) == {"qwen-r0": 8}, "its kubelet may still be about to confirm"
    cluster.now += timedelta(seconds=20)
    cluster.settle()
    assert pods(cluster) == {"qwen-r0": 1}, "the others are back on no node"
    cluster.now += timedelta(hours=1)
    cluster.settle()
    assert pods(cluster) == {"qwen-r0": 1}, "none is created while one of them would lack its name"
    cluster.hanging.clear()
    cluster.settle()
    assert list(cluster.serving()) == ["qwen-r0"]


def test_a_partly_placed_old_replica_returns_its_gpus_during_a_download() -> None:
    spec = {"parallelism": EIGHT_PODS, "replicas": 1}
    cluster = SimulatedCluster(raw_model(spec, source=HUB), DEFAULTS)
    cluster.slots = 8
    cluster.settle()
    assert list(cluster.serving()) == ["qwen-r0"]
    cluster.downloads = False
    cluster.edit({"model": {"source": {"huggingFace": {"repo": "Qwen/Qwen3-14B"}}}})
    cluster.settle()
    assert list(cluster.serving()) == ["qwen-r0"], "it serves until the new model is there"
    cluster.slots = 7
    del cluster.pods["qwen-r0-3"]
    cluster.settle()
    cluster.now += timedelta(minutes=1)
    cluster.settle()
    assert pods(cluster) == {}
    cluster.now += timedelta(hours=1)
    cluster.settle()
    assert pods(cluster) == {}, "the new model is not there yet"
    cluster.slots, cluster.downloads = 8, True
    cluster.settle()
    assert len(cluster.serving()) == 1


def test_the_last_old_replica_waits_for_its_node_rather_than_get_a_failed_revision() -> None:
    cluster = cluster_with(16, {"replicas": 2})
    cluster.broken = {"engine:broken"}
    cluster.settle()
    cluster.edit({"engine": {"image": "engine:broken"}})
    cluster.settle()
    cluster.edit({"replicas": 1})
    cluster.settle()
    old = cluster.serving()
    assert list(old) == ["qwen-r1"]
    cluster.slots = 7
    del cluster.pods["qwen-r1-3"]
    cluster.settle()
    cluster.now += timedelta(minutes=10)
    cluster.settle()
    cluster.slots = 8
    cluster.settle()
    assert cluster.serving() == old


def test_an_edit_ends_the_pause() -> None:
    cluster = cluster_with(5, {"replicas": 1})
    cluster.settle()
    cluster.now += timedelta(minutes=1)
    cluster.settle()
    assert pods(cluster) == {}
    cluster.edit({"parallelism": {"tensor": 4, "gpusPerPod": 1}})
    cluster.settle()
    assert list(cluster.serving()) == ["qwen-r0"]


def test_a_partly_placed_replica_does_not_keep_its_gpus_from_one_of_a_single_pod() -> None:
    cluster = cluster_with(2, {"replicas": 1, "parallelism": {"tensor": 2, "gpusPerPod": 1}})
    cluster.settle()
    del cluster.pods["qwen-r0-0"]
    cluster.slots = 1
    cluster.settle()
    assert pods(cluster) == {"qwen-r0": 2}
    cluster.edit({"replicas": 2, "parallelism": {"tensor": 1}})
    cluster.apply(next(step.manifest for step in cluster.plan() if step.ref == Ref("StatefulSet", "qwen-r1")))
    for _ in range(3):
        cluster.settle()
        cluster.now += timedelta(minutes=1)
    assert len(cluster.serving()) == 1


def test_annotations_that_a_user_has_edited_stop_nothing() -> None:
    cluster = cluster_with(5, {"replicas": 1})
    cluster.settle()
    cluster.now += timedelta(minutes=1)
    cluster.settle()
    for value in ("soon", "2026-01-01"):
        edited = {names.PAUSED_UNTIL_ANNOTATION: value, names.PARTIAL_STARTS_ANNOTATION: "many"}
        cluster.objects[Ref("StatefulSet", "qwen-r0")]["metadata"]["annotations"] = edited
        cluster.settle()
        assert pods(cluster) == {"qwen-r0": 8}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), replicas=st.integers(1, 2), spare=st.integers(0, 3), uid=st.integers(1, 1000))
def test_models_that_compete_for_gpus_do_not_block_each_other(seed: int, replicas: int, spare: int, uid: int) -> None:
    order = Random(seed)
    clusters = [cluster_with(8 + spare, {"replicas": replicas}, uid + each) for each in range(2)]
    clusters[0].neighbours, clusters[1].neighbours = [clusters[1]], [clusters[0]]
    assert until_complete(clusters, clusters, 1200, order)
    first = next(cluster for cluster in clusters if cluster.serving())
    first.edit({"suspend": True})
    assert until_complete(clusters, first.neighbours, 1200, order)


@pytest.mark.parametrize(
    "template",
    [
        {"schedulerName": "volcano"},
        {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}},
        {"annotations": {"scheduling.volcano.sh/queue-name": "gpus"}},
        {},
    ],
    ids=["scheduler", "label", "annotation", "gates"],
)
def test_nothing_is_held_back_or_returned_when_a_queue_places_the_pods(template: dict[str, Any]) -> None:
    cluster = cluster_with(0, {"replicas": 2, "engine": {"podTemplate": template}})
    cluster.settle()
    if not template:
        for pod in cluster.pods.values():
            pod["spec"]["schedulingGates"] = [{"name": "example.com/quota"}]
        cluster.look()
    cluster.settle()
    assert pods(cluster) == {"qwen-r0": 8, "qwen-r1": 8}
    cluster.slots = 10
    cluster.settle()
    cluster.now += timedelta(hours=1)
    cluster.settle()
    assert pods(cluster) == {"qwen-r0": 8, "qwen-r1": 8}
