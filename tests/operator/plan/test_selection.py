"""Which replicas stay when there are more than wanted, and the indices that new ones take."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_operator.api.objects import Ref
from minisgl_operator.plan.plan import Delete
from minisgl_operator.render import names
from support.cluster.guarded_cluster import GuardedCluster
from support.cluster.inference_models import CLAIM, DEFAULTS, raw_model
from support.cluster.simulated_cluster import SimulatedCluster


def settled(spec: dict[str, Any]) -> SimulatedCluster:
    in_place = {"engine": {"image": "engine:1"}, "rollout": {"strategy": "Recreate", "autoRollback": False}}
    cluster = SimulatedCluster(raw_model(in_place | spec, source=CLAIM), DEFAULTS)
    cluster.broken = {"engine:broken"}
    cluster.files = {"engine:unusable": "unusable"}
    cluster.unusable = {"unusable"}
    cluster.settle()
    return cluster


def deleted(cluster: SimulatedCluster) -> list[str]:
    """StatefulSets that the plan deletes, in this order."""
    return [step.ref.name for step in cluster.plan() if isinstance(step, Delete) and step.ref.kind == "StatefulSet"]


def make_unready(cluster: SimulatedCluster, *replicas: str) -> None:
    for replica in replicas:
        cluster.pods[f"{replica}-0"]["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    cluster.run_frontends()
    cluster.look()


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_scale_down_keeps_a_replica_that_serves_when_a_rollout_has_stopped(replicas: int) -> None:
    cluster = settled({"replicas": replicas})
    cluster.edit({"engine": {"image": "engine:broken"}})
    cluster.settle()
    assert sorted(cluster.routed()) == ["qwen-r1", "qwen-r2"][: replicas - 1]
    cluster.edit({"replicas": 1})
    assert deleted(cluster) == ["qwen-r0", "qwen-r2"][: replicas - 1]
    cluster.settle()
    assert list(cluster.routed()) == ["qwen-r1"], "it is not replaced by the revision that has failed"
    cluster.edit({"replicas": 2})
    cluster.settle()
    assert list(cluster.routed()) == ["qwen-r1"], "the revision still fails"
    cluster.edit({"replicas": 1, "engine": {"image": "engine:2"}})
    cluster.settle()
    assert len(cluster.routed()) == 1


def test_a_scale_down_waits_for_a_replica_whose_files_frontends_cannot_use_yet() -> None:
    cluster = settled({"replicas": 3})
    cluster.edit({"engine": {"image": "engine:unusable"}})
    cluster.settle()
    cluster.edit({"replicas": 1})
    assert deleted(cluster) == []
    cluster.edit({"engine": {"image": "engine:2"}})
    cluster.settle()
    assert len(cluster.routed()) == 1


@pytest.mark.parametrize("image", ["engine:2", "engine:broken"])
def test_something_serves_throughout_an_edit_and_a_scale_down_at_once(image: str) -> None:
    cluster = settled({"replicas": 3})
    cluster.edit({"replicas": 1, "engine": {"image": image}})
    for _ in range(30):
        cluster.look()
        cluster.reconcile()
        cluster.run_controllers()
        assert cluster.serving()
        cluster.run_kubelets()
        cluster.run_frontends()
    assert len(cluster.routed()) == 1
    assert len({ref for ref in cluster.objects if ref.kind == "StatefulSet"}) == 1


def test_a_scale_down_does_not_wait_for_the_download_of_another_model() -> None:
    cluster = SimulatedCluster(raw_model({"replicas": 2}), DEFAULTS)
    cluster.settle()
    cluster.edit({"replicas": 1, "model": {"source": {"huggingFace": {"repo": "owner/other"}}}})
    assert deleted(cluster) == ["qwen-r1"]


def test_a_failed_revision_is_tried_again_by_a_new_replica() -> None:
    cluster = settled({"replicas": 2})
    cluster.edit({"engine": {"image": "engine:broken"}})
    cluster.settle()
    cluster.edit({"replicas": 1})
    cluster.settle()
    cluster.broken.clear()
    cluster.settle()
    old = cluster.routed()
    assert list(old) == ["qwen-r1"]
    cluster.edit({"replicas": 2})
    cluster.settle()
    assert len(cluster.routed()) == 2
    assert set(cluster.routed().values()).isdisjoint(old.values())


@pytest.mark.parametrize("event", ["restart", "another node"])
def test_a_failed_revision_does_not_replace_the_last_old_replica_while_that_starts_again(event: str) -> None:
    cluster = settled({"replicas": 2})
    cluster.edit({"engine": {"image": "engine:broken"}})
    cluster.settle()
    cluster.edit({"replicas": 1})
    cluster.settle()
    old = cluster.routed()
    if event == "restart":
        make_unready(cluster, "qwen-r1")
    else:
        del cluster.pods["qwen-r1-0"]
    cluster.look()
    cluster.reconcile()
    cluster.settle()
    assert cluster.routed() == old


def test_an_unknown_replica_is_kept_rather_than_one_that_does_not_serve() -> None:
    cluster = settled({"replicas": 3})
    cluster.silent = {"qwen-r1-0"}
    make_unready(cluster, "qwen-r0", "qwen-r1")
    cluster.edit({"replicas": 2})
    assert deleted(cluster) == ["qwen-r0"]
    cluster.edit({"replicas": 1})
    assert deleted(cluster) == ["qwen-r0", "qwen-r1"]


def test_a_restarting_replica_is_kept_rather_than_one_that_failed_permanently() -> None:
    cluster = settled({"replicas": 3})
    cluster.edit({"engine": {"image": "engine:broken"}})
    cluster.settle()
    make_unready(cluster, "qwen-r1", "qwen-r2")
    cluster.edit({"replicas": 2})
    assert deleted(cluster) == ["qwen-r0"]


def test_among_serving_replicas_those_of_the_current_revision_are_kept_then_the_oldest() -> None:
    cluster = settled({"replicas": 3})
    cluster.now += timedelta(hours=1)
    cluster.edit({"replicas": 4})
    cluster.settle()
    cluster.edit({"engine": {"image": "engine:2"}})
    for _ in range(4):
        cluster.reconcile()
        cluster.run_controllers()
        cluster.run_kubelets()
        cluster.look()
    cluster.run_frontends()
    cluster.objects[Ref("StatefulSet", "qwen-r1")]["metadata"]["creationTimestamp"] = cluster.now.isoformat()
    assert len(cluster.routed()) == 4
    cluster.edit({"replicas": 1})
    assert deleted(cluster) == ["qwen-r1", "qwen-r3", "qwen-r2"]


def test_a_new_replica_takes_the_lowest_index_without_a_stateful_set_a_service_or_a_pod() -> None:
    cluster = settled({"replicas": 3})
    make_unready(cluster, "qwen-r0")
    cluster.edit({"replicas": 1})
    cluster.reconcile()
    cluster.look()
    assert {ref.name for ref in cluster.objects if ref.kind == "StatefulSet"} == {"qwen-r1"}
    cluster.edit({"replicas": 2})
    cluster.reconcile()
    assert Ref("StatefulSet", "qwen-r3") in cluster.objects, "pods and Services of r0 and r2 exist"
    cluster.settle()
    assert sorted(cluster.routed()) == ["qwen-r1", "qwen-r3"]
    cluster.edit({"replicas": 3})
    cluster.settle()
    assert sorted(cluster.routed()) == ["qwen-r0", "qwen-r1", "qwen-r3"]


def test_a_replica_whose_stateful_set_was_deleted_gets_a_successor_that_does_not_wait() -> None:
    cluster = settled({"replicas": 1})
    cluster.remove(Ref("StatefulSet", "qwen-r0"))
    cluster.reconcile()
    assert Ref("StatefulSet", "qwen-r1") in cluster.objects
    cluster.settle()
    assert list(cluster.routed()) == ["qwen-r1"]
    assert not {ref for ref in cluster.objects if ref.name == "qwen-r0"}


def test_the_successor_of_a_replica_that_hangs_leaves_it_its_pod() -> None:
    cluster = settled({"replicas": 1})
    pod = cluster.pods["qwen-r0-0"]
    cluster.hanging.add(pod["metadata"]["uid"])
    pod["metadata"]["deletionTimestamp"] = cluster.now.isoformat()
    cluster.settle()
    assert not cluster.routed()
    cluster.remove(Ref("StatefulSet", "qwen-r0"))
    cluster.settle()
    assert list(cluster.routed()) == ["qwen-r1"]
    assert cluster.pods["qwen-r0-0"] is pod, "its devices are in use"
    cluster.hanging.clear()
    cluster.settle()
    assert list(cluster.pods) == ["qwen-r1-0"]


@pytest.mark.parametrize("kind", ["Service", "StatefulSet"])
def test_a_new_replica_does_not_take_a_name_of_another_owner(kind: str) -> None:
    cluster = settled({"replicas": 1})
    cluster.put_conflicting(Ref(kind, "qwen-r1"))
    cluster.edit({"replicas": 2})
    cluster.settle()
    assert sorted(cluster.routed()) == ["qwen-r0", "qwen-r2"]


def test_a_replica_is_moved_when_its_stateful_set_cannot_be_created() -> None:
    cluster = settled({"replicas": 1})
    cluster.edit({"replicas": 2})
    cluster.apply(next(step.manifest for step in cluster.plan() if step.ref == Ref("Service", "qwen-r1")))
    cluster.put_conflicting(Ref("StatefulSet", "qwen-r1"))
    cluster.settle()
    assert sorted(cluster.routed()) == ["qwen-r0", "qwen-r2"]
    assert Ref("Service", "qwen-r1") not in cluster.objects


STATES = ("ready", "starting", "silent", "broken", "unusable", "outdated")


@settings(max_examples=60, deadline=None)
@given(states=st.lists(st.sampled_from(STATES), min_size=1, max_size=5), wanted=st.integers(0, 4))
def test_no_replica_that_serves_is_deleted_while_one_that_does_not_exists(states: list[str], wanted: int) -> None:
    cluster = GuardedCluster(raw_model({"engine": {"image": "engine:1"}}, source=CLAIM), DEFAULTS)
    cluster.broken = {"engine:broken"}
    cluster.files = {"engine:unusable": "unusable"}
    cluster.unusable = {"unusable"}
    cluster.edit({"replicas": len(states)})
    cluster.settle()
    for index, state in enumerate(states):
        pod = cluster.pods[f"qwen-r{index}-0"]
        if state in ("broken", "unusable"):
            pod["spec"]["containers"][0]["image"] = f"engine:{state}"
        if state in ("broken", "silent", "starting"):
            pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
        if state == "silent":
            cluster.silent.add(f"qwen-r{index}-0")
        if state == "outdated":
            template = cluster.objects[Ref("StatefulSet", f"qwen-r{index}")]["spec"]["template"]
            for labelled in (pod, template):
                labelled["metadata"]["labels"][names.REVISION_LABEL] = "old"
    cluster.run_frontends()
    cluster.look()
    cluster.edit({"replicas": wanted})
    cluster.reconcile()
    left = {ref.name for ref in cluster.objects if ref.kind == "StatefulSet"}
    assert len(left) >= wanted
    assert len(left) == wanted or "outdated" in states, "during a rollout replicas stay that serve or may do so"
