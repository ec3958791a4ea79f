"""Rollouts step by step: the order of replacement, and the replicas that keep serving."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl_operator.api.objects import Manifest, Ref, ref_of
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.observed import NodeState, Readiness, Unreachable
from minisgl_operator.plan.plan import Apply, Delete, plan
from support.cluster.inference_models import CLAIM, DEFAULTS, HUB, raw_model
from support.cluster.simulated_cluster import SimulatedCluster

IN_PLACE = {"rollout": {"strategy": "Recreate", "autoRollback": False}}


def settled(spec: dict[str, Any], source: dict[str, Any] = CLAIM) -> SimulatedCluster:
    """A cluster in which the model runs, with two ranks in separate pods for each replica."""
    parallelism = {"tensor": 2, "gpusPerPod": 1}
    raw = raw_model(IN_PLACE | {"parallelism": parallelism, "engine": {"image": "engine:1"}} | spec, source=source)
    cluster = SimulatedCluster(raw, DEFAULTS)
    cluster.broken = {"engine:broken"}
    cluster.settle()
    return cluster


def counts(cluster: SimulatedCluster) -> dict[str, int]:
    """Number of pods in the plan by StatefulSet, for those that it would change."""
    return {
        step.manifest["metadata"]["name"]: step.manifest["spec"]["replicas"]
        for step in cluster.plan()
        if isinstance(step, Apply) and step.manifest["kind"] == "StatefulSet" and cluster.changes(step.manifest)
    }


def roll_out(cluster: SimulatedCluster, image: str) -> None:
    """Edit the image; the API server accepts its pods in a dry run."""
    cluster.edit({"engine": {"image": image}})
    cluster.reconcile()


def everyone_works(cluster: SimulatedCluster) -> None:
    cluster.run_controllers()
    cluster.run_kubelets()
    cluster.run_frontends()
    cluster.look()


def test_a_replica_is_emptied_refilled_and_rollout_ready_before_the_next() -> None:
    cluster = settled({"replicas": 3})
    roll_out(cluster, "engine:2")
    assert counts(cluster) == {"qwen-r0": 0}
    cluster.reconcile()
    assert counts(cluster) == {}, "its pods are not gone"
    cluster.run_controllers()
    cluster.run_kubelets()
    cluster.look()
    assert counts(cluster) == {}, "the controller has not confirmed that none is left"
    cluster.run_controllers()
    cluster.look()
    assert counts(cluster) == {"qwen-r0": 2}
    cluster.reconcile()
    cluster.run_controllers()
    cluster.run_kubelets()
    cluster.run_kubelets()
    cluster.look()
    assert counts(cluster) == {}, "it is ready, but no frontend has reached it"
    cluster.run_frontends()
    assert counts(cluster) == {"qwen-r1": 0}


def test_an_edit_of_recovery_keeps_the_pods_and_reaches_those_that_are_created_next() -> None:
    cluster = settled({"replicas": 2})
    before = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    cluster.edit({"recovery": {"maxRestarts": 9, "windowSeconds": 60}})
    cluster.settle()
    assert {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()} == before
    assert {max_restarts(pod) for pod in cluster.pods.values()} == {"5"}
    roll_out(cluster, "engine:2")
    cluster.settle()
    assert {max_restarts(pod) for pod in cluster.pods.values()} == {"9"}


def max_restarts(pod: Manifest) -> str:
    arguments: list[str] = pod["spec"]["containers"][0]["args"]
    return arguments[arguments.index("--max-restarts") + 1]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(replicas=st.integers(2, 4), source=st.sampled_from((CLAIM, HUB)), seed=st.integers(0, 2**32))
def test_all_but_one_replica_serve_at_every_moment(replicas: int, source: dict[str, Any], seed: int) -> None:
    order = Random(seed)
    cluster = settled({"replicas": replicas}, source)
    cluster.edit({"engine": {"image": "engine:2"}})
    most_pods = len(cluster.pods)
    actions = (cluster.reconcile, cluster.run_controllers, cluster.run_kubelets, cluster.run_frontends, cluster.look)
    for _ in range(40 * replicas):
        order.choice(actions)()
        assert len(cluster.serving()) >= replicas - 1
        assert len(cluster.pods) <= most_pods
        assert all(len(found) == 1 for found in cluster.revisions().values())
    cluster.settle()
    assert len(set(cluster.serving().values())) == 1


def with_files(spec: dict[str, Any]) -> SimulatedCluster:
    """A cluster in which engines of other images have other tokenizer files, some of which are unusable."""
    raw = raw_model(IN_PLACE | {"engine": {"image": "engine:1"}} | spec, source=CLAIM)
    cluster = SimulatedCluster(raw, DEFAULTS)
    cluster.files = {"engine:2": "other", "engine:unusable": "unusable"}
    cluster.unusable = {"unusable"}
    cluster.settle()
    return cluster


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(replicas=st.integers(1, 6), seed=st.integers(0, 2**32), revert_after=st.none() | st.integers(1, 40))
def test_a_rollout_to_other_tokenizer_files_completes_while_half_of_the_replicas_serve(
    replicas: int, seed: int, revert_after: int | None
) -> None:
    order = Random(seed)
    cluster = with_files({"replicas": replicas})
    cluster.edit({"engine": {"image": "engine:2"}})
    actions = (cluster.reconcile, cluster.run_controllers, cluster.run_kubelets, cluster.run_frontends, cluster.look)
    for step in range(40 * replicas):
        if step == revert_after:
            cluster.edit({"engine": {"image": "engine:1"}})
        order.choice(actions)()
        assert len(cluster.serving()) >= replicas - 1
        cluster.run_frontends()
        assert len(cluster.routed()) >= replicas // 2
    cluster.settle()
    assert len(cluster.routed()) == replicas
    (revision,) = set(cluster.routed().values())
    assert {revision} == set().union(*cluster.revisions().values())


def test_a_replica_is_rollout_ready_when_frontends_could_use_its_tokenizer_files() -> None:
    cluster = with_files({"replicas": 3})
    roll_out(cluster, "engine:2")
    for _ in range(3):
        cluster.reconcile()
        cluster.run_controllers()
        cluster.run_kubelets()
        cluster.look()
    assert len(cluster.serving()) == 3
    assert counts(cluster) == {}, "no frontend has seen it with its files"
    cluster.run_frontends()
    assert sorted(cluster.routed()) == ["qwen-r1", "qwen-r2"]
    assert counts(cluster) == {"qwen-r1": 0}


def test_a_rollout_with_unusable_tokenizer_files_stops_at_the_first_replica() -> None:
    cluster = with_files({"replicas": 3})
    cluster.edit({"engine": {"image": "engine:unusable"}})
    cluster.settle()
    assert sorted(cluster.routed()) == ["qwen-r1", "qwen-r2"]
    assert len(cluster.serving()) == 3
    cluster.edit({"engine": {"image": "engine:2"}})
    cluster.settle()
    assert len(cluster.routed()) == 3


def test_replicas_whose_files_no_frontend_can_use_are_replaced_one_after_the_other() -> None:
    cluster = with_files({"replicas": 3, "engine": {"image": "engine:unusable"}})
    assert (len(cluster.serving()), cluster.routed()) == (3, {})
    roll_out(cluster, "engine:2")
    assert counts(cluster) == {"qwen-r0": 0}
    cluster.settle()
    assert len(cluster.routed()) == 3


def test_a_rollout_of_a_broken_revision_stops_at_the_first_replica() -> None:
    cluster = settled({"replicas": 3})
    cluster.edit({"engine": {"image": "engine:broken"}})
    cluster.settle()
    assert sorted(cluster.serving()) == ["qwen-r1", "qwen-r2"]
    assert cluster.pods["qwen-r0-0"]["spec"]["containers"][0]["image"] == "engine:broken"


def test_a_correcting_edit_replaces_the_broken_replica_immediately() -> None:
    cluster = settled({"replicas": 3})
    cluster.edit({"engine": {"image": "engine:broken"}})
    cluster.settle()
    cluster.edit({"engine": {"image": "engine:2"}})
    assert counts(cluster) == {"qwen-r0": 0}
    cluster.settle()
    assert len(cluster.serving()) == 3


def test_replicas_that_have_never_served_are_replaced_together() -> None:
    cluster = settled({"replicas": 3, "engine": {"image": "engine:broken"}})
    cluster.edit({"engine": {"image": "engine:2"}})
    assert counts(cluster) == {"qwen-r0": 0, "qwen-r1": 0, "qwen-r2": 0}


def test_replicas_with_a_report_from_before_they_were_ready_are_not_out_of_service() -> None:
    cluster = settled({"replicas": 2})
    cluster.edit({"engine": {"image": "engine:2"}})
    observed = cluster.observed()
    said = {"kind": "engine", "phase": "Loading", "ready": False, "ready_ranks": 0, "tensor": 2, "restarts": 0}
    leaders = [pod["metadata"]["uid"] for pod in observed.pods if pod["metadata"]["name"] in ("qwen-r0-0", "qwen-r1-0")]
    observed = replace(observed, reports={**observed.reports, **dict.fromkeys(leaders, said)})
    steps = plan(Facts(cluster.model, observed, cluster.defaults, cluster.now))
    assert not [step for step in steps if isinstance(step, Apply) and step.manifest["kind"] == "StatefulSet"]


def test_replicas_whose_pods_cannot_start_are_replaced_together() -> None:
    cluster = settled({"replicas": 2})
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff"}}}
    for pod in cluster.pods.values():
        pod["status"] = {"phase": "Pending", "conditions": [], "containerStatuses": [waiting]}
    cluster.look()
    assert counts(cluster) == {}
    cluster.edit({"engine": {"image": "engine:2"}})
    assert counts(cluster) == {"qwen-r0": 0, "qwen-r1": 0}


@pytest.mark.parametrize("phase", ["Running", "Pending"])
def test_a_restarting_replica_is_kept_until_the_new_revision_is_ready(phase: str) -> None:
    cluster = settled({"replicas": 3})
    cluster.edit({"engine": {"image": "engine:broken"}})
    cluster.settle()
    for name in ("qwen-r1-0", "qwen-r1-1"):
        cluster.pods[name]["status"] = {"phase": phase, "conditions": [{"type": "Ready", "status": "False"}]}
    cluster.look()
    assert counts(cluster) == {}


def test_replicas_in_their_first_start_are_replaced_without_waiting() -> None:
    cluster = settled({"replicas": 2})
    cluster.edit({"replicas": 3, "engine": {"image": "engine:2"}})
    cluster.reconcile()
    cluster.run_controllers()
    cluster.look()
    cluster.edit({"engine": {"image": "engine:3"}})
    assert counts(cluster) == {"qwen-r2": 0}


def test_reverting_during_a_rollout_restarts_only_replaced_replicas() -> None:
    cluster = settled({"replicas": 3})
    roll_out(cluster, "engine:2")
    cluster.reconcile()
    everyone_works(cluster)
    kept = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items() if not name.startswith("qwen-r0")}
    cluster.edit({"engine": {"image": "engine:1"}})
    cluster.settle()
    assert len(cluster.serving()) == 3
    assert kept.items() <= {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}.items()


def test_a_ready_frontend_without_report_blocks_the_rollout() -> None:
    cluster = settled({"replicas": 2})
    roll_out(cluster, "engine:2")
    frontend = cluster.observed().pods[-1]
    observed = cluster.observed()
    reports = {**observed.reports, frontend["metadata"]["uid"]: Unreachable("timed out")}
    held = type(observed)(**{**vars(observed), "reports": reports})
    steps = _plan(cluster, held)
    assert not any(step.manifest["spec"]["replicas"] == 0 for step in steps)


def test_without_a_ready_frontend_ready_pods_are_available() -> None:
    cluster = settled({"replicas": 2})
    roll_out(cluster, "engine:2")
    observed = cluster.observed()
    pods = tuple(pod for pod in observed.pods if pod["metadata"]["name"] != "frontend-pod")
    steps = _plan(cluster, type(observed)(**{**vars(observed), "pods": pods, "reports": {}}))
    assert [step.manifest["metadata"]["name"] for step in steps if step.manifest["spec"]["replicas"] == 0] == [
        "qwen-r0"
    ]


def _plan(cluster: SimulatedCluster, observed: Any) -> list[Apply]:
    steps = plan(Facts(cluster.model, observed, DEFAULTS, cluster.now))
    return [step for step in steps if isinstance(step, Apply) and step.manifest["kind"] == "StatefulSet"]


def test_a_frontend_edit_does_not_change_engines() -> None:
    cluster = settled({"replicas": 2})
    before = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    cluster.edit({"frontend": {"image": "frontend:2", "replicas": 3}})
    changed = [step.manifest for step in cluster.plan() if isinstance(step, Apply) and cluster.changes(step.manifest)]
    assert [manifest["kind"] for manifest in changed] == ["Deployment"]
    cluster.settle()
    assert before == {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}


def test_scaling_up_does_not_change_running_replicas() -> None:
    cluster = settled({"replicas": 1})
    before = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    cluster.edit({"replicas": 3})
    assert counts(cluster) == {"qwen-r1": 2, "qwen-r2": 0}
    cluster.settle()
    assert before.items() <= {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}.items()


def test_scaling_down_removes_the_highest_index_first_and_keeps_its_service_until_the_pods_are_gone() -> None:
    cluster = settled({"replicas": 3})
    cluster.edit({"replicas": 1})
    deletes = [step.ref for step in cluster.plan() if isinstance(step, Delete)]
    assert deletes == [Ref("StatefulSet", "qwen-r2"), Ref("StatefulSet", "qwen-r1")]
    cluster.reconcile()
    cluster.look()
    assert not [step for step in cluster.plan() if isinstance(step, Delete)]
    cluster.run_kubelets()
    cluster.look()
    deletes = [step.ref for step in cluster.plan() if isinstance(step, Delete)]
    assert deletes == [Ref("Service", "qwen-r2"), Ref("Service", "qwen-r1")]


def test_suspending_keeps_the_endpoint_the_cache_and_the_policies() -> None:
    cluster = settled({"replicas": 2}, HUB)
    before = set(cluster.objects)
    cluster.edit({"suspend": True})
    cluster.settle()
    assert not cluster.pods
    gone = before - set(cluster.objects)
    budget = Ref("PodDisruptionBudget", "qwen-engine")
    assert {ref.name for ref in gone - {budget}} == {"qwen-r0", "qwen-r1"}
    cluster.edit({"suspend": False})
    cluster.settle()
    assert set(cluster.objects) == before


def test_a_replica_whose_pods_lost_their_controller_is_kept() -> None:
    cluster = settled({"replicas": 1})
    pods = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    del cluster.objects[Ref("StatefulSet", "qwen-r0")]
    assert counts(cluster) == {"qwen-r0": 2}
    cluster.settle()
    assert {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()} == pods


def budget_of(cluster: SimulatedCluster) -> tuple[int, list[str]]:
    """Minimum number of engine pods, and the replicas whose pods do not count."""
    (spec,) = (
        step.manifest["spec"]
        for step in cluster.plan()
        if isinstance(step, Apply) and ref_of(step.manifest) == Ref("PodDisruptionBudget", "qwen-engine")
    )
    expressions = spec["selector"].get("matchExpressions", [])
    return spec["minAvailable"], [name for each in expressions for name in each["values"]]


def test_a_node_drain_may_evict_one_pod_and_then_only_the_rest_of_its_replica() -> None:
    cluster = settled({"replicas": 3})
    assert budget_of(cluster) == (5, [])
    cluster.pods["qwen-r1-1"]["status"]["conditions"] = []
    cluster.look()
    assert budget_of(cluster) == (4, ["qwen-r1"])
    cluster.pods["qwen-r0-0"]["status"]["conditions"] = []
    cluster.look()
    assert budget_of(cluster) == (2, ["qwen-r0", "qwen-r1"])


def test_the_only_replica_may_always_be_evicted() -> None:
    cluster = settled({"replicas": 1})
    assert budget_of(cluster) == (0, [])
    cluster.pods["qwen-r0-1"]["status"]["conditions"] = []
    cluster.look()
    assert budget_of(cluster) == (0, [])


@pytest.mark.parametrize(("wanted", "live", "applied"), [(None, None, 1), (None, 5, 5), (2, 5, 2), (2, None, 2)])
def test_others_set_the_number_of_frontends_unless_the_spec_does(
    wanted: int | None, live: int | None, applied: int
) -> None:
    cluster = settled({"frontend": {"replicas": wanted}})
    ref = Ref("Deployment", "qwen-frontend")
    if live is None:
        del cluster.objects[ref]
    else:
        cluster.objects[ref]["spec"]["replicas"] = live
    cluster.look()
    (deployment,) = (step.manifest for step in cluster.plan() if isinstance(step, Apply) and step.ref == ref)
    assert deployment["spec"]["replicas"] == applied


def owner(manager: str, **fields: Any) -> dict[str, Any]:
    return {"manager": manager, "operation": "Update", "fieldsV1": {"f:spec": fields, "f:metadata": {}}}


OURS = owner("minisgl-operator", **{"f:template": {}})
OURS_WITH_COUNT = owner("minisgl-operator", **{"f:template": {}, "f:replicas": {}})
AUTOSCALER = owner("kube-controller-manager", **{"f:replicas": {}}) | {"subresource": "scale"}
ANOTHER = owner("kubectl-edit", **{"f:replicas": {}})
STATUS_OF_DEPLOYMENT = {"manager": "kube-controller-manager", "fieldsV1": {"f:status": {"f:replicas": {}}}}


@pytest.mark.parametrize(
    ("wanted", "owners", "applied"),
    [
        (None, [OURS, AUTOSCALER], None),
        (None, [OURS, ANOTHER], None),
        (None, [OURS_WITH_COUNT, AUTOSCALER], None),
        (None, [OURS_WITH_COUNT, STATUS_OF_DEPLOYMENT], 5),
        (None, [OURS, STATUS_OF_DEPLOYMENT], 5),
        (None, [], 5),
        (2, [OURS, AUTOSCALER], 2),
    ],
)
def test_the_number_of_frontends_is_not_applied_while_another_one_owns_it_and_the_spec_has_none(
    wanted: int | None, owners: list[dict[str, Any]], applied: int | None
) -> None:
    cluster = settled({"frontend": {"replicas": wanted}})
    ref = Ref("Deployment", "qwen-frontend")
    cluster.objects[ref]["spec"]["replicas"] = 5
    cluster.objects[ref]["metadata"]["managedFields"] = owners
    cluster.look()
    (deployment,) = (step.manifest for step in cluster.plan() if isinstance(step, Apply) and step.ref == ref)
    assert deployment["spec"].get("replicas") == applied


def test_a_model_without_budgets_has_none_and_restarts_nothing() -> None:
    cluster = settled({"replicas": 2})
    pods = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    cluster.edit({"availability": {"disruptionBudget": "None"}})
    cluster.settle()
    assert not [ref for ref in cluster.objects if ref.kind == "PodDisruptionBudget"]
    assert {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()} == pods
    cluster.edit({"availability": {"disruptionBudget": "Auto"}})
    cluster.settle()
    budgets = {ref.name for ref in cluster.objects if ref.kind == "PodDisruptionBudget"}
    assert budgets == {"qwen-engine", "qwen-frontend"}


def test_disruption_budgets_of_an_earlier_version_are_deleted() -> None:
    cluster = settled({"replicas": 2})
    (budget,) = (body for ref, body in cluster.objects.items() if ref == Ref("PodDisruptionBudget", "qwen-engine"))
    old = {**budget, "metadata": {**budget["metadata"], "name": "qwen-r0", "uid": "old"}}
    cluster.objects[Ref("PodDisruptionBudget", "qwen-r0")] = old
    assert [step.ref.name for step in cluster.plan() if isinstance(step, Delete)] == ["qwen-r0"]


def evicted() -> tuple[SimulatedCluster, Manifest]:
    """A cluster with a pod that was deleted now, with a grace period of 330 s."""
    cluster = settled({"replicas": 2})
    pod = cluster.pods["qwen-r0-1"]
    end = cluster.now + timedelta(seconds=330)
    pod["metadata"] |= {"deletionTimestamp": end.isoformat(), "deletionGracePeriodSeconds": 330}
    cluster.look()
    return cluster, pod


def deletions(cluster: SimulatedCluster) -> list[Delete]:
    return [step for step in cluster.plan() if isinstance(step, Delete)]


@pytest.mark.parametrize("loss", ["gone", "out of service", "silent"])
def test_a_pod_on_a_lost_node_waits_for_no_drain(loss: str) -> None:
    cluster, pod = evicted()
    node = pod["spec"]["nodeName"]
    if loss == "gone":
        del cluster.nodes[node]
    elif loss == "out of service":
        cluster.nodes[node] = NodeState("Unknown", cluster.now, out_of_service=True)
    else:
        cluster.nodes[node] = NodeState("Unknown", cluster.now - timedelta(seconds=300))
    cluster.now += timedelta(seconds=59)
    assert not deletions(cluster)
    cluster.now += timedelta(seconds=1)
    assert deletions(cluster) == [Delete(Ref("Pod", "qwen-r0-1"), pod["metadata"]["uid"], lost_node=node)]


def test_no_pod_is_forced_off_a_node_that_may_come_back() -> None:
    cluster, pod = evicted()
    cluster.nodes[pod["spec"]["nodeName"]] = NodeState("Unknown", cluster.now)
    cluster.now += timedelta(seconds=299)
    assert not deletions(cluster)
    cluster.now += timedelta(seconds=1)
    assert deletions(cluster)


@pytest.mark.parametrize("ready", ["True", "False"])
def test_no_pod_is_forced_off_a_live_node(ready: Readiness) -> None:
    """A process that hangs keeps its GPU, which the next pod would get. A kubelet that reports that its node is not
    ready lives."""
    cluster, pod = evicted()
    cluster.nodes[pod["spec"]["nodeName"]] = NodeState(ready, None if ready == "True" else cluster.now)
    cluster.now += timedelta(days=1)
    assert not deletions(cluster)


def test_nothing_is_forced_without_a_look_at_nodes() -> None:
    cluster, pod = evicted()
    del cluster.nodes[pod["spec"]["nodeName"]]
    cluster.sees_nodes = False
    cluster.now += timedelta(days=1)
    assert not deletions(cluster)
