"""Replicas that have used up their restarts: new attempts, their pauses, and what the status keeps."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from minisgl_operator.api.status import InferenceModelStatus
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.observed import Unreachable
from minisgl_operator.plan.plan import Delete, plan
from support.cluster.inference_models import CLAIM, DEFAULTS
from support.cluster.scene import NOW, Scene

FAILURE = {
    "at": "2026-01-01T11:59:00Z",
    "rank": 0,
    "pod": "qwen-r0-0",
    "exit_code": 1,
    "reason": "Error",
    "message": "CUDA error at 0x7f3a: 12 pages",
}


class Life:
    """One replica that fails again and again; each status is stored, as the operator does."""

    def __init__(self, spec: dict[str, Any] | None = None) -> None:
        self.scene = Scene(spec or {}, source=CLAIM)
        self.now = NOW
        self.starts = 0
        self.restarts = 0
        self.scene.raw["status"] = {}

    def fail(self, **failure: Any) -> None:
        """Let a new leader use up its restarts."""
        self.starts += 1
        self.scene.leader_reports(
            "qwen-r0", phase="Failed", ready=False, epoch=[self.starts, 6], restarts=5, last_failure=FAILURE | failure
        )

    def serve(self) -> None:
        self.starts += 1
        for pod in self.scene.pods.values():
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": self.now.isoformat()}
            pod["status"]["conditions"] = [ready]
        self.scene.leader_reports("qwen-r0", epoch=[self.starts, 1])

    def restart(self, **failure: Any) -> None:
        """Let the ranks of a replica that serves fail, and serve again before the kubelet's next probe."""
        self.restarts += 1
        self.scene.leader_reports(
            "qwen-r0",
            epoch=[self.starts, 1 + self.restarts],
            restarts=self.restarts,
            last_failure=FAILURE | {"at": self.now.isoformat()} | failure,
        )

    @property
    def facts(self) -> Facts:
        return Facts(self.scene.model, self.scene.observed(), DEFAULTS, self.now)

    def reconcile(self, seconds: float = 0) -> dict[str, Any]:
        """The replica's retries in the new status, after this time; {} without any."""
        self.now += timedelta(seconds=seconds)
        status = self.scene.status(self.scene.raw["status"], self.now)
        InferenceModelStatus.model_validate(status)
        self.scene.raw["status"] = status
        return dict(status["replicaStatuses"][0].get("retry") or {})

    def deleted(self) -> list[str]:
        return [step.ref.name for step in plan(self.facts) if isinstance(step, Delete)]

    def message(self) -> str:
        found = {each["type"]: each["message"] for each in self.scene.raw["status"]["conditions"]}
        return str(found["EngineReady"])


def seconds(retry: dict[str, Any]) -> float:
    """The pause before the next attempt."""
    at = {name: datetime.fromisoformat(retry[name]) for name in ("failedAt", "retryAt")}
    return (at["retryAt"] - at["failedAt"]).total_seconds()


def test_the_pause_doubles_with_each_failure_up_to_an_hour() -> None:
    life = Life()
    pauses = []
    for number in range(1, 10):
        life.fail()
        retry = life.reconcile()
        assert retry["failures"] == number
        pauses.append(seconds(retry))
        assert life.reconcile(pauses[-1] - 1) == retry and life.deleted() == []
        assert life.facts.next_retry == life.now + timedelta(seconds=1)
        life.reconcile(1)
        assert life.deleted() == ["qwen-r0-0"]
    assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]


def test_pods_that_are_being_deleted_are_left_alone() -> None:
    life = Life()
    life.fail()
    life.reconcile()
    life.reconcile(60)
    life.scene.pods["qwen-r0-0"]["metadata"]["deletionTimestamp"] = "2026-01-01T12:01:00Z"
    assert life.deleted() == []
    assert life.facts.next_retry is None
    assert "retryAt" not in life.reconcile()


def test_a_new_pod_that_starts_keeps_the_count_without_a_time_for_the_next_attempt() -> None:
    life = Life()
    life.fail()
    life.reconcile()
    life.reconcile(60)
    life.scene.leader_reports("qwen-r0", phase="Loading", ready=False, epoch=[99, 1])
    retry = life.reconcile(5)
    assert retry["failures"] == 1 and "retryAt" not in retry
    assert life.deleted() == []
    life.starts = 99
    life.fail()
    assert life.reconcile()["failures"] == 2


def test_a_restart_of_the_operator_changes_neither_count_nor_time() -> None:
    life = Life()
    life.fail()
    retry = life.reconcile()
    life.scene.reports.pop("qwen-r0-0")
    assert life.reconcile(30)["failures"] == 1
    life.starts = 0
    life.fail()
    assert life.reconcile(10) == retry


def test_a_replica_that_serves_for_a_while_begins_again_from_zero() -> None:
    life = Life({"recovery": {"windowSeconds": 100}})
    life.fail()
    life.reconcile()
    life.serve()
    assert life.reconcile(159)["failures"] == 1
    assert life.reconcile(1) == {}


def test_the_failures_of_a_replica_that_starts_slowly_are_kept_until_it_has_served_for_a_while() -> None:
    life = Life({"recovery": {"windowSeconds": 600}})
    life.fail()
    life.reconcile()
    life.scene.leader_reports("qwen-r0", phase="Loading", ready=False, epoch=[99, 1])
    life.reconcile(60 + 700)
    life.serve()
    assert life.reconcile()["failures"] == 1
    assert life.reconcile(600 + 59)["failures"] == 1
    assert life.reconcile(1) == {}


def test_a_replica_that_always_starts_slowly_and_fails_soon_waits_longer_and_its_node_is_named() -> None:
    life = Life({"recovery": {"windowSeconds": 600}})
    pauses = []
    for _ in range(3):
        life.fail()
        retry = life.reconcile()
        pauses.append(seconds(retry))
        life.reconcile(pauses[-1] + 700)
        life.serve()
        life.reconcile(120)
    assert pauses == [60, 120, 240]
    life.fail()
    life.reconcile()
    assert "The same error came again on node node-0" in life.message()


def test_each_restart_begins_the_time_again_after_which_failures_are_forgotten() -> None:
    life = Life({"recovery": {"windowSeconds": 100}})
    life.fail()
    life.reconcile()
    life.serve()
    for _ in range(3):
        assert life.reconcile(159)["failures"] == 1
        life.restart()
    assert life.reconcile(159)["failures"] == 1
    assert life.reconcile(1) == {}


def test_failures_are_kept_while_the_leader_does_not_answer() -> None:
    life = Life({"recovery": {"windowSeconds": 100}})
    life.fail()
    life.reconcile()
    life.serve()
    report = life.scene.reports["qwen-r0-0"]
    life.scene.reports["qwen-r0-0"] = Unreachable("timed out")
    assert life.reconcile(999)["failures"] == 1
    life.scene.reports["qwen-r0-0"] = report
    assert life.reconcile() == {}


@pytest.mark.parametrize("at", ["", None, "2026-01-01T12:00:00"])
def test_a_restart_without_a_valid_time_changes_nothing(at: object) -> None:
    life = Life({"recovery": {"windowSeconds": 100}})
    life.fail()
    life.reconcile()
    life.serve()
    life.restart(at=at)
    assert life.reconcile(159)["failures"] == 1
    assert life.reconcile(1) == {}


def test_a_clock_that_is_ahead_keeps_the_count() -> None:
    life = Life({"recovery": {"windowSeconds": 100}})
    life.fail()
    life.reconcile()
    life.serve()
    life.restart(at="9999-12-31T23:59:59Z")
    assert life.reconcile(999)["failures"] == 1


def test_failures_of_another_revision_do_not_count() -> None:
    life = Life()
    life.fail()
    life.reconcile()
    life.scene.raw["status"]["replicaStatuses"][0]["retry"]["revision"] = "0000000000"
    assert life.reconcile(600)["failures"] == 1
    assert life.deleted() == []


@pytest.mark.parametrize("reason", ["InvalidModel", "TensorDoesNotDivideHeads"])
def test_a_model_that_cannot_be_served_is_not_tried_again(reason: str) -> None:
    life = Life()
    life.fail(reason=reason)
    assert life.reconcile() == {}
    assert life.facts.next_retry is None


def test_the_condition_names_the_node_on_which_the_same_error_came_twice() -> None:
    life = Life()
    life.fail()
    life.reconcile()
    assert "It is tried again after a pause" in life.message()
    assert "node-0" not in life.message()
    life.fail(message="CUDA error at 0x9bcd: 99 pages")
    retry = life.reconcile(60)
    assert retry["errors"] == [{"node": "node-0", "error": "Error: CUDA error at #: # pages", "count": 2}]
    assert "The same error came again on node node-0" in life.message()
    assert "kubectl cordon node-0" in life.message()


def test_another_error_or_another_node_is_counted_apart() -> None:
    life = Life()
    life.fail()
    life.reconcile()
    life.fail(message="out of luck")
    life.reconcile(60)
    life.scene.pods["qwen-r0-0"]["spec"]["nodeName"] = "node-7"
    life.fail()
    errors = life.reconcile(120)["errors"]
    assert [(each["node"], each["count"]) for each in errors] == [("node-0", 1), ("node-0", 1), ("node-7", 1)]
    assert "cordon" not in life.message()


def test_a_failure_without_a_known_node_is_counted_too() -> None:
    life = Life()
    life.fail(pod="gone")
    assert life.reconcile()["failures"] == 1
    life.starts += 1
    life.scene.leader_reports("qwen-r0", phase="Failed", ready=False, epoch=[50, 6], last_failure=None)
    retry = life.reconcile(60)
    assert retry["failures"] == 2 and "errors" not in retry


def test_all_pods_of_a_replica_are_created_again() -> None:
    life = Life({"parallelism": {"tensor": 2, "gpusPerPod": 1}})
    life.fail()
    life.reconcile()
    life.reconcile(60)
    assert life.deleted() == ["qwen-r0-0", "qwen-r0-1"]
