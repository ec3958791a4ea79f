"""Time alone changes plan and status at `Facts.next_change`, and not before: scenes for each cause."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from minisgl_operator.api.objects import Manifest, has_condition
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.lost_nodes import FORCE_DELETE_AFTER
from minisgl_operator.facts.observed import NodeState, Unreachable
from minisgl_operator.facts.rollout.waves import Turn
from support.cluster.clock import instants, outcome, recorded
from support.cluster.guarded_cluster import GuardedCluster
from support.cluster.inference_models import CLAIM, DEFAULTS, raw_model
from support.cluster.scene import NOW, Scene, fetch_scene

SLOW_START: Final = {"replicas": 1, "engine": {"image": "engine:1"}}
FAILURE: Final = {"reason": "Error", "message": "CUDA error", "rank": 0, "pod": "qwen-r0-0", "at": "", "exit_code": 1}
AUTOSCALING: Final = {"minReplicas": 1, "maxReplicas": 4, "target": {"runningPerReplica": 4}}
EIGHT_PODS: Final = {"parallelism": {"tensor": 8, "gpusPerPod": 1}}


def facts_of(scene: Scene) -> Facts:
    return Facts(scene.model, scene.observed(), DEFAULTS, NOW)


def rollout(strategy: str, **rollout: Any) -> GuardedCluster:
    """A model whose new revision gets no node."""
    settings = {"strategy": strategy, **rollout}
    cluster = GuardedCluster(raw_model(SLOW_START | {"rollout": settings}, source=CLAIM), DEFAULTS)
    cluster.settle()
    cluster.slots = 0 if strategy == "Recreate" else 1
    cluster.edit({"engine": {"image": "engine:2"}})
    cluster.settle()
    return cluster


def of_cluster(cluster: GuardedCluster) -> Facts:
    """The facts once every pod has been probed."""
    observed = cluster.observed()
    serving = {"kind": "engine", "phase": "Ready", "ready": True}
    engines = (pod for pod in observed.pods if has_condition(pod, "Ready") and not observed.was_probed(pod))
    reports = {**observed.reports, **{pod["metadata"]["uid"]: serving for pod in engines}}
    return replace(cluster.facts(), observed=replace(observed, reports=reports))


def a_revision_that_does_not_serve() -> Facts:
    return of_cluster(rollout("Recreate", progressDeadlineSeconds=600))


def an_additional_replica_without_a_node() -> Facts:
    return of_cluster(rollout("Auto"))


def a_revision_that_is_refused() -> Facts:
    cluster = GuardedCluster(raw_model(SLOW_START | {"rollout": {"strategy": "Recreate"}}, source=CLAIM), DEFAULTS)
    cluster.refused = {"engine:refused"}
    cluster.settle()
    cluster.edit({"engine": {"image": "engine:refused"}})
    cluster.settle()
    return of_cluster(cluster)


def in_part(*, pauses: bool) -> Facts:
    """A replica of eight pods, five of which have got nodes; if it `pauses`, the pause after it gave them back."""
    spec = EIGHT_PODS | {"replicas": 1, "rollout": {"strategy": "Recreate", "autoRollback": False}}
    cluster = GuardedCluster(raw_model(spec, source=CLAIM), DEFAULTS)
    cluster.slots = 5
    cluster.settle()
    if pauses:
        cluster.now += timedelta(seconds=60)
        cluster.settle()
        assert not cluster.pods
    return of_cluster(cluster)


def a_replica_that_is_placed_in_part() -> Facts:
    return in_part(pauses=False)


def a_replica_that_pauses() -> Facts:
    return in_part(pauses=True)


def failed() -> Scene:
    scene = Scene(source=CLAIM)
    scene.leader_reports("qwen-r0", phase="Failed", ready=False, epoch=[1, 6], restarts=5, last_failure=FAILURE)
    return scene


def a_replica_that_has_failed() -> Facts:
    return facts_of(failed())


def a_replica_that_serves_again() -> Facts:
    scene = failed()
    scene.raw["status"] = scene.status()
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": (NOW - timedelta(seconds=1)).isoformat()}
    scene.pods["qwen-r0-0"]["status"]["conditions"] = [ready]
    scene.leader_reports("qwen-r0", epoch=[2, 1])
    return facts_of(scene)


def a_fetch_that_has_failed() -> Facts:
    scene = fetch_scene()
    ended = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "it has failed"}
    scene.child("Job", scene.job)["status"] = {"conditions": [ended | {"lastTransitionTime": NOW.isoformat()}]}
    scene.no_pods("fetch")
    return facts_of(scene)


def scaled(**load: Any) -> Scene:
    scene = Scene({"replicas": 3, "autoscaling": AUTOSCALING}, source=CLAIM)
    scene.frontends_report()
    said: Any = scene.reports["frontend-0"]
    entries = [{**entry, "running": 0, "waiting": 0} for entry in said["replicas"]]
    scene.reports["frontend-0"] = {**said, "replicas": entries, "held": 0, "running": 0, "idle_seconds": 0.0} | load
    scene.raw["status"] = {"autoscaling": {"targetReplicas": 3}}
    return scene


def a_model_with_too_many_replicas() -> Facts:
    return facts_of(scaled())


def a_frontend_that_is_silent() -> Facts:
    scene = scaled()
    scene.pods["frontend-1"] = copy.deepcopy(scene.pods["frontend-0"])
    scene.pods["frontend-1"]["metadata"] |= {"name": "frontend-1", "uid": "Pod/frontend-1"}
    scene.reports["frontend-1"] = Unreachable("timed out")
    return facts_of(scene)


def ending_pod(node: NodeState) -> Scene:
    scene = Scene(source=CLAIM)
    scene.nodes = {"node-0": node}
    metadata: Manifest = scene.pods["qwen-r0-0"]["metadata"]
    metadata |= {"deletionTimestamp": (NOW + timedelta(seconds=30)).isoformat(), "deletionGracePeriodSeconds": 30}
    return scene


def a_pod_that_its_node_does_not_end() -> Facts:
    return facts_of(ending_pod(NodeState()))


def a_pod_of_a_silent_node() -> Facts:
    return facts_of(ending_pod(NodeState("Unknown", NOW - timedelta(seconds=120))))


def a_pod_of_a_lost_node() -> Facts:
    return facts_of(ending_pod(NodeState("False", NOW, out_of_service=True)))


def a_pod_with_a_finalizer() -> Facts:
    scene = ending_pod(NodeState())
    scene.pods["qwen-r0-0"]["metadata"]["finalizers"] = ["example.com/archive"]
    scene.pods["qwen-r0-0"]["status"]["phase"] = "Succeeded"
    return facts_of(scene)


SCENES: Final[dict[Callable[[], Facts], timedelta | None]] = {
    a_revision_that_does_not_serve: None,
    an_additional_replica_without_a_node: None,
    a_revision_that_is_refused: None,
    a_replica_that_is_placed_in_part: None,
    a_replica_that_pauses: None,
    a_replica_that_has_failed: timedelta(minutes=1),
    a_replica_that_serves_again: None,
    a_fetch_that_has_failed: None,
    a_model_with_too_many_replicas: timedelta(minutes=5),
    a_frontend_that_is_silent: timedelta(minutes=10),
    a_pod_that_its_node_does_not_end: timedelta(seconds=30) + FORCE_DELETE_AFTER,
    a_pod_of_a_silent_node: timedelta(seconds=180),
    a_pod_of_a_lost_node: FORCE_DELETE_AFTER,
    a_pod_with_a_finalizer: timedelta(seconds=30) + FORCE_DELETE_AFTER,
}
"""Time until the change; None where the simulated cluster decides."""


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_plan_or_status_change_at_the_next_change_and_not_before(scene: Callable[[], Facts]) -> None:
    facts = recorded(scene())
    for _ in range(6):
        change = facts.next_change
        assert change is not None and change > facts.now
        before = outcome(facts, facts.now)
        for instant in instants(facts.now, change):
            assert outcome(facts, instant) == before, f"{change - instant} before the change"
            assert replace(facts, now=instant).next_change == change
        assert outcome(facts, change) != before
        if SCENES[scene] is not None:
            assert change == NOW + SCENES[scene] or facts.now > NOW
        facts = recorded(replace(facts, now=change))
        if facts.next_change is None or facts.next_change <= change:
            break


def test_a_model_that_nothing_waits_for_changes_only_with_an_event() -> None:
    facts = recorded(facts_of(Scene(source=CLAIM)))
    assert facts.next_change is None
    later = outcome(facts, NOW + timedelta(days=365))
    assert later == outcome(facts, NOW)


def test_a_model_whose_upgrade_waits_for_the_window_changes_when_it_opens() -> None:
    opens = datetime(2026, 1, 1, 22, tzinfo=UTC)
    facts = replace(facts_of(Scene(source=CLAIM)), turn=Turn(False, "", opens_at=opens))
    assert facts.next_change == opens


def test_a_failed_fetch_that_is_replaced_asks_for_no_reconcile_until_its_job_is_gone() -> None:
    facts = recorded(a_fetch_that_has_failed())
    due = facts.next_change
    assert due is not None
    assert replace(facts, now=due).next_change is None
    assert replace(facts, now=due + timedelta(seconds=7)).next_change is None


def test_a_new_attempt_that_is_overdue_is_due_now() -> None:
    facts = recorded(facts_of(failed()))
    due = facts.next_change
    assert due is not None
    later = replace(facts, now=due + timedelta(seconds=7))
    assert later.next_change == later.now
