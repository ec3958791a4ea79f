"""Events: one for each change, in order, and none without a change."""

from __future__ import annotations

from minisgl_operator.status.transitions import events_for
from support.cluster.inference_models import CLAIM
from support.cluster.scene import Scene, fetch_scene

FAILURE = {
    "at": "2026-01-01T11:59:00Z",
    "rank": 1,
    "pod": "qwen-r0-1",
    "exit_code": -9,
    "reason": "Killed",
    "message": "last words",
}


def test_the_first_status_of_a_model_that_is_fetched() -> None:
    scene = fetch_scene()
    scene.reports["fetch-pod"] = {"kind": "fetch", "phase": "Downloading", "percent": 3}
    notices = events_for({}, scene.status())
    assert [(notice.type, notice.reason) for notice in notices] == [
        ("Normal", "Accepted"),
        ("Normal", "Downloading"),
        ("Normal", "Scheduled"),
        ("Normal", "WaitingForModel"),
        ("Normal", "NoReplicaRoutable"),
        ("Normal", "Starting"),
    ]


def test_download_progress_is_not_an_event() -> None:
    scene = fetch_scene()
    scene.reports["fetch-pod"] = {"kind": "fetch", "phase": "Downloading", "percent": 3}
    before = scene.status()
    scene.reports["fetch-pod"] = {"kind": "fetch", "phase": "Downloading", "percent": 60}
    after = scene.status(before)
    assert before != after
    assert events_for(before, after) == ()


def test_an_unchanged_status_has_no_events() -> None:
    status = Scene(source=CLAIM).status()
    assert events_for(status, status) == ()


def test_a_failed_rank_is_one_warning_with_its_last_output() -> None:
    scene = Scene(source=CLAIM)
    before = scene.status()
    scene.leader_reports("qwen-r0", last_failure=FAILURE)
    (notice,) = events_for(before, scene.status(before))
    assert notice.type == "Warning"
    assert notice.reason == "RankFailed"
    assert notice.note == "qwen-r0: rank 1 in pod qwen-r0-1 ended with exit code -9 (Killed): last words"


def test_ready_that_repeats_another_condition_makes_no_second_event() -> None:
    scene = Scene(source=CLAIM)
    before = scene.status()
    scene.leader_reports("qwen-r0", phase="Failed", last_failure=FAILURE)
    scene.no_frontends()
    notices = events_for(before, scene.status(before))
    assert [(notice.type, notice.reason) for notice in notices] == [
        ("Warning", "RankFailed"),
        ("Warning", "RestartBudgetExhausted"),
        ("Normal", "NoReplicaRoutable"),
        ("Warning", "ReplicasDown"),
    ]


def test_recovery_is_a_normal_event() -> None:
    scene = Scene({"replicas": 2}, source=CLAIM)
    healthy = scene.status()
    scene.leader_reports("qwen-r0", phase="Restarting")
    scene.frontends_report("qwen-r0")
    ill = scene.status(healthy)
    notices = events_for(ill, healthy)
    assert {(notice.type, notice.reason) for notice in notices} == {
        ("Normal", "EnginesReady"),
        ("Normal", "AllReplicasServe"),
    }
