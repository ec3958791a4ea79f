"""Dry runs before a replica that serves is drained."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl_operator.facts.facts import Facts
from minisgl_operator.plan.plan import Check
from support.cluster.guarded_cluster import GuardedCluster
from support.cluster.inference_models import CLAIM, DEFAULTS, raw_model
from support.cluster.simulated_cluster import REFUSAL

REFUSED = {"engine": {"image": "engine:refused"}}


def settled(replicas: int, **rollout: Any) -> GuardedCluster:
    spec = {"replicas": replicas, "engine": {"image": "engine:1"}, "rollout": {"strategy": "Recreate"} | rollout}
    cluster = GuardedCluster(raw_model(spec, source=CLAIM), DEFAULTS)
    cluster.refused = {"engine:refused"}
    cluster.settle()
    return cluster


def images(cluster: GuardedCluster) -> list[str]:
    return [pod["spec"]["containers"][0]["image"] for pod in cluster.pods.values()]


def admission(cluster: GuardedCluster) -> dict[str, Any]:
    return dict(cluster.raw["status"]["rollout"].get("admission", {}))


def next_check(cluster: GuardedCluster) -> datetime | None:
    return Facts(cluster.model, cluster.observed(), DEFAULTS, cluster.now).next_check


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_replica_is_drained_only_for_a_revision_that_admission_accepts(replicas: int) -> None:
    cluster = settled(replicas)
    before = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    cluster.edit(REFUSED)
    cluster.settle()
    assert {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()} == before
    assert len(cluster.routed()) == replicas
    found = admission(cluster)
    assert (found["result"], found["attempts"]) == ("Refused", 1)
    assert REFUSAL in found["message"]
    cluster.edit({"engine": {"image": "engine:2"}})
    cluster.settle()
    assert images(cluster) == replicas * ["engine:2"]
    assert admission(cluster) == {}, "the rollout is complete"


def test_the_pod_of_a_dry_run_is_the_one_that_the_stateful_set_would_create() -> None:
    cluster = settled(1)
    cluster.edit({"engine": {"image": "engine:2"}})
    [check] = [step for step in cluster.plan() if isinstance(step, Check)]
    cluster.settle()
    created = cluster.pods["qwen-r0-0"]
    metadata = check.pod["metadata"]
    assert metadata["labels"].items() >= created["metadata"]["labels"].items()
    assert [each["uid"] for each in metadata["ownerReferences"]] == [
        each["uid"] for each in created["metadata"]["ownerReferences"]
    ]
    assert check.pod["spec"].items() >= {k: v for k, v in created["spec"].items() if k != "nodeName"}.items()
    assert (check.pod["spec"]["hostname"], check.pod["spec"]["subdomain"]) == ("qwen-r0-0", "qwen-r0")


def test_one_dry_run_is_enough_for_a_rollout() -> None:
    cluster = settled(3)
    cluster.edit({"engine": {"image": "engine:2"}})
    cluster.settle()
    assert cluster.dry_runs == 1


def test_edits_that_drain_nothing_need_no_dry_run() -> None:
    cluster = settled(1, strategy="Surge")
    cluster.edit({"engine": {"image": "engine:2"}})
    cluster.settle()
    cluster.edit({"replicas": 3, "frontend": {"replicas": 2}})
    cluster.settle()
    cluster.edit({"rollout": {"strategy": "Recreate", "paused": True}, "engine": {"image": "engine:3"}})
    cluster.settle()
    assert cluster.dry_runs == 0


def test_a_refused_revision_is_tried_again_after_growing_pauses() -> None:
    cluster = settled(1, autoRollback=False)
    cluster.edit(REFUSED)
    pauses = []
    for number in range(1, 8):
        cluster.settle()
        assert cluster.dry_runs == number
        check = next_check(cluster)
        assert check is not None and check >= cluster.now
        pauses.append(check - cluster.now)
        cluster.now = check
    assert all(before < after for before, after in pairwise(pauses[:6]))
    assert max(pauses) <= timedelta(seconds=300)
    cluster.refused = set()
    cluster.settle()
    assert images(cluster) == ["engine:refused"]
    assert next_check(cluster) is None


def test_a_revision_that_is_refused_until_the_deadline_is_given_up() -> None:
    cluster = settled(1, progressDeadlineSeconds=600)
    cluster.edit(REFUSED)
    cluster.settle()
    facts = Facts(cluster.model, cluster.observed(), DEFAULTS, cluster.now)
    assert facts.deadline is not None and facts.deadline - cluster.now <= timedelta(seconds=600)
    cluster.now += timedelta(seconds=600)
    cluster.settle()
    status = cluster.raw["status"]
    assert "within 600 s: the API server refuses its pods" in status["rollout"]["failure"]
    assert status["failedRevision"] == status["rollout"]["revision"]
    assert images(cluster) == ["engine:1"]


def test_the_deadline_begins_again_when_a_refusal_ends() -> None:
    cluster = settled(1, progressDeadlineSeconds=600)
    cluster.edit(REFUSED)
    cluster.settle()
    cluster.now += timedelta(seconds=590)
    cluster.refused = set()
    cluster.reconcile()
    assert admission(cluster)["result"] == "Accepted"
    assert "startedAt" not in cluster.raw["status"]["rollout"]
    cluster.now += timedelta(seconds=60)
    cluster.settle()
    assert images(cluster) == ["engine:refused"]
    assert "failure" not in cluster.raw["status"]["rollout"]


@pytest.mark.parametrize("strategy", ["Auto", "Recreate"])
def test_a_full_quota_is_no_refusal(strategy: str) -> None:
    cluster = settled(2, strategy=strategy)
    cluster.quota = 2
    cluster.edit({"engine": {"image": "engine:2"}})
    for _ in range(2):
        cluster.settle()
        cluster.now += timedelta(seconds=61)
    cluster.settle()
    assert images(cluster) == 2 * ["engine:2"]


def test_without_the_permission_the_check_is_skipped() -> None:
    cluster = settled(1)
    cluster.dry_run = 403
    cluster.edit({"engine": {"image": "engine:2"}})
    cluster.reconcile()
    assert admission(cluster)["result"] == "Skipped"
    cluster.settle()
    assert images(cluster) == ["engine:2"]


@pytest.mark.parametrize("status", [0, 500, 504])
def test_errors_of_a_dry_run_do_not_hold_a_rollout_for_ever(status: int) -> None:
    cluster = settled(1)
    cluster.dry_run = status
    cluster.edit({"engine": {"image": "engine:2"}})
    for _ in range(4):
        cluster.settle()
        assert images(cluster) == ["engine:1"]
        assert admission(cluster)["result"] == "NoAnswer"
        cluster.now = next_check(cluster) or cluster.now
    cluster.settle()
    assert images(cluster) == ["engine:2"]


def test_an_outage_does_not_end_a_refusal() -> None:
    cluster = settled(1)
    cluster.edit(REFUSED)
    cluster.settle()
    cluster.dry_run = 500
    for _ in range(4):
        cluster.now = next_check(cluster) or cluster.now
        cluster.settle()
    assert admission(cluster)["result"] == "Refused"
    assert REFUSAL in admission(cluster)["message"]
    assert images(cluster) == ["engine:1"]


def test_a_scale_down_does_not_wait_for_a_refused_revision() -> None:
    cluster = settled(3)
    cluster.edit(REFUSED)
    cluster.settle()
    cluster.edit({"replicas": 1})
    cluster.settle()
    assert images(cluster) == ["engine:1"]


def test_auto_does_not_drain_for_pods_that_are_refused_without_an_event() -> None:
    cluster = settled(1, strategy="Auto")
    cluster.edit(REFUSED)
    for _ in range(3):
        cluster.settle()
        # Events are best effort.
        cluster.events.clear()
        cluster.now += timedelta(seconds=61)
        cluster.reconcile()
    assert admission(cluster)["result"] == "Refused"
    assert images(cluster) == ["engine:1"]
    assert len(cluster.routed()) == 1


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    replicas=st.integers(1, 3),
    strategy=st.sampled_from(["Auto", "Surge", "Recreate"]),
    steps=st.lists(st.integers(0, 5), max_size=80),
)
def test_all_replicas_serve_while_admission_refuses_a_revision(replicas: int, strategy: str, steps: list[int]) -> None:
    cluster = settled(replicas, strategy=strategy)
    cluster.edit(REFUSED)
    actions = (
        cluster.reconcile,
        cluster.run_controllers,
        cluster.run_kubelets,
        cluster.run_frontends,
        cluster.look,
        lambda: cluster.pass_time(61),
    )
    for step in steps:
        actions[step]()
        assert len(cluster.serving()) == replicas
    cluster.refused = set()
    cluster.edit({"rollout": {"strategy": strategy, "autoRollback": False}})
    for _ in range(3):
        cluster.settle()
        cluster.now += timedelta(minutes=5)
    assert images(cluster) == replicas * ["engine:refused"]
