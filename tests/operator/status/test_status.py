"""The fields of the status."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from minisgl_operator.api.status import InferenceModelStatus
from minisgl_operator.api.text import truncate
from minisgl_operator.api.types import InferenceModel, InvalidSpec
from minisgl_operator.facts.observed import Observed, Unreachable
from minisgl_operator.render import names
from minisgl_operator.status.status import status_of_invalid_spec
from minisgl_operator.status.transitions import events_for
from support.cluster.inference_models import CLAIM, HUB, raw_model
from support.cluster.scene import EARLIER, NOW, OLD_REVISION, Scene, fetch_scene

TWO_PODS = {"parallelism": {"tensor": 2, "gpusPerPod": 1}, "engine": {"device": "cpu"}}
FAILURE = {
    "at": "2026-01-01T11:59:00Z",
    "rank": 1,
    "pod": "qwen-r0-1",
    "exit_code": -9,
    "reason": "Killed",
    "message": "last words",
}


def test_the_status_of_a_model_that_serves() -> None:
    scene = Scene(TWO_PODS | {"replicas": 2}, source=CLAIM)
    types = {"weights": "bfloat16", "kv_cache": "fp8_e4m3"}
    scene.leader_reports("qwen-r0", transport="gloo", data_types=types)
    status = scene.status()
    InferenceModelStatus.model_validate(status)
    conditions = {each["type"]: (each["status"], each["reason"]) for each in status.pop("conditions")}
    assert conditions == {
        "Accepted": ("True", "Accepted"),
        "ModelCached": ("True", "NotNeeded"),
        "Scheduled": ("True", "Scheduled"),
        "EngineReady": ("True", "EnginesReady"),
        "FrontendReady": ("True", "FrontendsReady"),
        "Ready": ("True", "Ready"),
        "Progressing": ("False", "UpToDate"),
        "Degraded": ("False", "AllReplicasServe"),
        "InterconnectOptimal": ("True", "Optimal"),
    }
    replicas = status.pop("replicaStatuses")
    assert status == {
        "observedGeneration": 3,
        "phase": "Ready",
        "replicas": 2,
        "readyReplicas": 2,
        "updatedReplicas": 2,
        "ranks": "4/4",
        "selector": "app.kubernetes.io/name=minisgl,app.kubernetes.io/instance=qwen,"
        "app.kubernetes.io/component=engine,apps.kubernetes.io/pod-index=0",
        "url": "http://qwen.team-a.svc/v1",
        "model": {
            **{"name": "models/qwen3-8b", "architecture": "Qwen3ForCausalLM"},
            **{"task": "generate", "maxModelLen": 40960},
        },
        "revision": scene.revision,
        "rollout": {"revision": scene.revision, "stableRevision": scene.revision},
        "frontend": {"replicas": 1, "readyReplicas": 1},
    }
    assert replicas[0] == {
        "name": "qwen-r0",
        "phase": "Ready",
        "revision": scene.revision,
        "readyRanks": 2,
        "ranks": 2,
        "nodes": ["node-0", "node-1"],
        "transport": "gloo",
        "dataTypes": {"weights": "bfloat16", "kvCache": "fp8_e4m3"},
        "epoch": [1767265200000, 1],
        "restarts": 0,
        "startupSeconds": 8.0,
        "timings": {"rendezvous": 0.5, "load": 3.0, "total": 8.0},
    }
    assert not {"transport", "dataTypes"} & set(replicas[1])


def test_deriving_twice_gives_the_same() -> None:
    scene = Scene(TWO_PODS, source=CLAIM)
    status = scene.status()
    assert scene.status(status, NOW + timedelta(hours=1)) == status


def test_the_time_of_a_transition_moves_only_when_the_status_flips() -> None:
    scene = Scene({"replicas": 2}, source=CLAIM)
    before = scene.status()
    scene.leader_reports("qwen-r1", phase="Loading")
    scene.frontends_report("qwen-r1")
    later = NOW + timedelta(minutes=5)
    after = {each["type"]: each for each in scene.status(before, later)["conditions"]}
    assert after["EngineReady"]["lastTransitionTime"] == "2026-01-01T12:05:00Z"
    assert after["Ready"]["lastTransitionTime"] == "2026-01-01T12:00:00Z"
    assert "1 of 2" in after["Ready"]["message"]


def test_every_condition_names_the_generation_that_it_is_about() -> None:
    status = Scene(source=CLAIM).status()
    assert status["observedGeneration"] == 3
    assert {each["observedGeneration"] for each in status["conditions"]} == {3}


def test_a_failed_rank_is_reported_with_its_last_output() -> None:
    scene = Scene(TWO_PODS, source=CLAIM)
    scene.leader_reports("qwen-r0", phase="Restarting", ready_ranks=1, restarts=1, last_failure=FAILURE)
    scene.frontends_report("qwen-r0")
    status = scene.status()
    InferenceModelStatus.model_validate(status)
    (replica,) = status["replicaStatuses"]
    assert replica["lastFailure"] == {
        "rank": 1,
        "pod": "qwen-r0-1",
        "reason": "Killed",
        "exitCode": -9,
        "message": "last words",
        "at": "2026-01-01T11:59:00Z",
    }
    assert (replica["phase"], replica["restarts"], status["ranks"]) == ("Restarting", 1, "1/2")
    assert status["phase"] == "Degraded"


def test_the_end_of_a_launcher_is_reported_from_its_container() -> None:
    scene = Scene(source=CLAIM)
    ended = {
        "exitCode": 137,
        "reason": "OOMKilled",
        "message": "tail\nof the log",
        "finishedAt": "2026-01-01T11:58:00Z",
    }
    scene.waiting("qwen-r0-0", "CrashLoopBackOff", lastState={"terminated": ended})
    (replica,) = scene.status()["replicaStatuses"]
    assert replica["phase"] == "Restarting"
    assert replica["lastFailure"] == {
        "pod": "qwen-r0-0",
        "reason": "OutOfMemory",
        "exitCode": 137,
        "message": "tail of the log",
        "at": "2026-01-01T11:58:00Z",
    }


@pytest.fixture(scope="module")
def thousand_replicas() -> Scene:
    """A model with a thousand replicas, whose reports and status each test replaces."""
    return Scene({"replicas": 1000}, source=CLAIM)


@pytest.mark.parametrize("text", ["x" * 4000, "\u20ac" * 4000, "\U0001f680" * 4000, '"\\\\' * 2000])
def test_the_status_of_a_thousand_failed_replicas_fits_into_one_object(text: str, thousand_replicas: Scene) -> None:
    scene = thousand_replicas
    failed = FAILURE | {"message": text}
    errors = [{"node": f"node-{'n' * 50}{number}", "error": truncate(text, 256), "count": 2} for number in range(8)]
    retries = []
    for index in range(1000):
        name = f"qwen-r{index}"
        scene.leader_reports(name, phase="Failed", restarts=5, last_failure=failed | {"pod": f"{name}-0"})
        retry = {"revision": scene.revision, "failures": 9, "leaderStart": 1767265200000 + index, "failedAt": EARLIER}
        retries.append({"name": name, "revision": scene.revision, "retry": retry | {"errors": errors}})
    scene.raw["status"] = {"replicaStatuses": retries}
    status = scene.status()
    assert len(json.dumps(status, separators=(",", ":"))) < 1 << 20
    InferenceModelStatus.model_validate(status)
    for replica in status["replicaStatuses"]:
        assert (replica["phase"], replica["retry"]["failures"]) == ("Failed", 9)
        assert replica["lastFailure"]["message"] and replica["retry"]["errors"][-1]["node"]
    scene.raw["status"] = status
    again = scene.raw["status"] = scene.status(status)
    assert not events_for(status, again), "no failure is new"
    # Errors of the last status are shorter now, which may leave more room for messages; then nothing changes any more.
    assert scene.status(again) == again


def test_the_status_of_a_few_replicas_keeps_all_texts() -> None:
    scene = Scene({"replicas": 20}, source=CLAIM)
    for index in range(20):
        scene.leader_reports(f"qwen-r{index}", phase="Failed", last_failure=FAILURE | {"message": "x" * 1000})
    assert all(len(each["lastFailure"]["message"]) == 1000 for each in scene.status()["replicaStatuses"])


def test_failures_of_replaced_pods_are_not_reported() -> None:
    scene = Scene(source=CLAIM)
    scene.waiting("qwen-r0-0", "CrashLoopBackOff", lastState={"terminated": {"exitCode": 1}})
    scene.pods["qwen-r0-0"]["metadata"]["labels"][names.REVISION_LABEL] = OLD_REVISION
    (replica,) = scene.status()["replicaStatuses"]
    assert replica["phase"] == "Draining"
    assert "lastFailure" not in replica


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        (None, None),
        ("fp8", None),
        ({"weights": 8, "bits": "4"}, None),
        ({"weights": "fp8-block", "kv_cache": None}, {"weights": "fp8-block"}),
        ({"weights": "w" * 2000, "kv_cache": "bfloat16"}, {"weights": "w" * 1023 + "…", "kvCache": "bfloat16"}),
    ],
)
def test_data_types_that_are_not_text_are_left_out(reported: object, expected: dict[str, str] | None) -> None:
    scene = Scene(source=CLAIM)
    scene.leader_reports("qwen-r0", data_types=reported)
    status = scene.status()
    InferenceModelStatus.model_validate(status)
    assert status["replicaStatuses"][0].get("dataTypes") == expected


def test_reported_fields_of_a_ready_replica_stay_while_it_does_not_answer() -> None:
    scene = Scene(TWO_PODS, source=CLAIM)
    types = {"weights": "fp8-channel", "kv_cache": "bfloat16"}
    scene.leader_reports("qwen-r0", transport="gloo", data_types=types, last_failure=FAILURE)
    before = scene.status()
    scene.reports["qwen-r0-0"] = Unreachable("timed out")
    assert scene.status(before) == before
    scene.not_ready("qwen-r0-0")
    (replica,) = scene.status(before)["replicaStatuses"]
    assert replica["phase"] == "Unknown"
    assert not {"transport", "dataTypes"} & set(replica)
    assert replica["lastFailure"]["message"] == "last words", "or it would be a new event"


def test_the_last_status_stays_until_ready_pods_were_probed() -> None:
    scene = Scene(source=CLAIM)
    before = scene.status()
    del scene.reports["frontend-0"]
    assert scene.status(before) == before
    older = before | {"observedGeneration": 2}
    assert scene.status(older) == older
    scene.reports["frontend-0"] = Unreachable("timed out")
    assert scene.conditions(before)["Ready"]["reason"] == "Unreachable"
    assert scene.conditions(before)["Ready"]["status"] == "Unknown"


def test_a_start_never_says_unreachable() -> None:
    """Containers listen some time after they run, and pass their startup probe between two probes of the operator."""
    scene = Scene(source=CLAIM)
    engine = scene.not_ready("qwen-r0-0")
    [container] = engine["status"]["containerStatuses"]
    silent = Unreachable("connection refused", while_starting=True)
    scene.reports |= {"qwen-r0-0": silent, "frontend-0": silent}
    seen: Any = {}
    for started, ready in ((False, "False"), (True, "False"), (True, "True")):
        container["started"] = started
        engine["status"]["conditions"] = [{"type": "Ready", "status": ready}]
        seen = scene.status(seen)
        assert "Unreachable" not in {each["reason"] for each in seen["conditions"]}, (started, ready)


def test_the_last_status_stays_until_a_failed_replica_was_probed_again() -> None:
    """After a start of the operator the status would otherwise show for a moment that pods have not started."""
    scene = Scene(source=CLAIM)
    scene.no_frontends()
    scene.leader_reports("qwen-r0", phase="Failed", ready=False, last_failure=FAILURE)
    before = scene.status()
    assert before["phase"] == "Failed"
    said = dict(scene.reports)
    for asked in ((), ("frontend-0",), ("qwen-r0-0",)):
        scene.reports = {name: said[name] for name in asked}
        assert scene.status(before) == before
    scene.reports = said | {"qwen-r0-0": Unreachable("timed out")}
    assert scene.conditions(before)["EngineReady"]["reason"] == "Unreachable"


def test_the_last_status_stays_until_a_fetch_pod_was_probed_again() -> None:
    scene = fetch_scene()
    running = {"name": "fetch", "state": {"running": {}}, "started": True}
    scene.pods["fetch-pod"]["status"]["containerStatuses"] = [running]
    scene.reports["fetch-pod"] = {"kind": "fetch", "phase": "Downloading", "percent": 40}
    before = scene.status()
    assert before["cache"] == {"phase": "Downloading", "percent": 40}
    del scene.reports["fetch-pod"]
    assert scene.status(before) == before


def test_a_pod_that_ended_before_its_first_probe_is_not_waited_for() -> None:
    """Its conditions may stay Ready if it was not ended by its kubelet."""
    scene = fetch_scene()
    before = scene.status()
    scene.pods["fetch-pod"]["status"] = {
        "phase": "Failed",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [{"name": "fetch", "state": {"terminated": {"exitCode": 2}}}],
    }
    job = next(body for ref, body in scene.children.items() if ref.kind == "Job")
    job["status"] = {"conditions": [{"type": "Failed", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    assert scene.status(before)["phase"] == "Failed"


def test_the_commit_stays_after_the_fetch_pod_is_deleted() -> None:
    scene = Scene()
    job = next(body for ref, body in scene.children.items() if ref.kind == "Job")
    left = '{"kind": "fetch", "phase": "Done", "percent": 100, "commit": "abc123"}'
    pod = fetch_scene().pods["fetch-pod"]
    pod["metadata"]["ownerReferences"][0]["uid"] = job["metadata"]["uid"]
    pod["status"] = {"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": {"message": left}}}]}
    scene.pods["fetch-pod"] = pod
    before = scene.status()
    assert before["model"]["commit"] == "abc123"
    assert before["model"]["name"] == "Qwen/Qwen3-8B@main"
    assert before["cache"] == {"phase": "Done", "percent": 100}
    del scene.pods["fetch-pod"]
    assert scene.status(before)["model"]["commit"] == "abc123"


def test_download_progress_is_reported_in_steps() -> None:
    scene = fetch_scene()
    for percent, told in ((0, 0), (42, 40), (44, 40), (45, 45), (99.9, 95)):
        scene.reports["fetch-pod"] = {"kind": "fetch", "phase": "Downloading", "percent": percent}
        status = scene.status()
        InferenceModelStatus.model_validate(status)
        assert status["cache"] == {"phase": "Downloading", "percent": told}
        assert status["phase"] == "Caching"


def test_an_invalid_spec_keeps_running_pods_and_their_status() -> None:
    raw = raw_model({"replicas": -1}, generation=4)
    try:
        InferenceModel.parse(raw)
        raise AssertionError
    except InvalidSpec as found:
        refusal = found
    before = Scene(source=CLAIM).status()
    status = status_of_invalid_spec(refusal, Observed(raw), before, NOW)
    InferenceModelStatus.model_validate(status)
    conditions = {each["type"]: each for each in status["conditions"]}
    assert conditions["Accepted"]["reason"] == "InvalidSpec"
    assert "spec.replicas" in conditions["Accepted"]["message"]
    assert conditions["Ready"]["status"] == "True"
    assert (status["phase"], status["observedGeneration"], status["readyReplicas"]) == ("Ready", 4, 1)
    fresh = status_of_invalid_spec(refusal, Observed(raw), {}, NOW)
    assert [(each["type"], each["status"]) for each in fresh["conditions"]] == [
        ("Accepted", "False"),
        ("Ready", "False"),
        ("Stalled", "True"),
    ]
    assert fresh["phase"] == "Failed"


def test_names_of_sources() -> None:
    image: dict[str, Any] = {"image": {"reference": "registry.example.com/model:1", "path": "model"}}
    named = {"pvc": {"claimName": "models"}}
    for source, name in (
        (HUB, "Qwen/Qwen3-8B@main"),
        (CLAIM, "models/qwen3-8b"),
        (named, "models"),
        (image, "registry.example.com/model:1/model"),
    ):
        assert Scene(source=source).status()["model"]["name"] == name


def test_a_long_source_name_is_truncated_to_the_limit_of_a_status() -> None:
    source = {"pvc": {"claimName": "c" * 253, "path": "p" * 1024}}
    InferenceModelStatus.model_validate(Scene(source=source).status())


def test_a_deleted_pod_that_ended_has_not_failed() -> None:
    scene = Scene()
    pod = scene.not_ready("qwen-r0-0", phase="Succeeded")
    pod["metadata"]["deletionTimestamp"] = EARLIER
    pod["status"]["containerStatuses"] = [{"state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}]
    del scene.reports["qwen-r0-0"]
    (replica,) = scene.status()["replicaStatuses"]
    assert "lastFailure" not in replica


def _row(status: dict[str, Any]) -> tuple[str, str, str]:
    """Columns of `kubectl get`."""
    ready = next(each["status"] for each in status["conditions"] if each["type"] == "Ready")
    return ready, status["phase"], status["ranks"]


@pytest.mark.parametrize(
    "said",
    [
        {"phase": "Loading", "ready": False, "ready_ranks": 0},
        {"phase": "Restarting", "ready": False, "ready_ranks": 1},
        {"phase": "Ready", "ready": True, "ready_ranks": 1},
    ],
    ids=["from before it was ready", "of a rank that died", "of a rank that just died"],
)
def test_ready_and_ranks_never_contradict_each_other(said: dict[str, Any]) -> None:
    """Kubelet, frontends and leader report at different times. While they disagree the model is not Ready."""
    scene = Scene(TWO_PODS, source=CLAIM)
    scene.reports["qwen-r0-0"] = {**scene.reports["qwen-r0-0"], **said}  # type: ignore[dict-item]
    status = scene.status()
    ready, phase, ranks = _row(status)
    assert ready == "False" and phase != "Ready" and ranks == f"{said['ready_ranks']}/2"
    assert status["readyReplicas"] == 0
    conditions = {each["type"]: each for each in status["conditions"]}
    assert conditions["EngineReady"]["status"] == "False"
    assert conditions["Ready"]["reason"] == conditions["EngineReady"]["reason"]
    scene.leader_reports("qwen-r0")
    assert _row(scene.status()) == ("True", "Ready", "2/2")


def test_ready_replicas_have_all_their_ranks_whether_their_launcher_answers_or_not() -> None:
    scene = Scene(TWO_PODS | {"replicas": 2}, source=CLAIM)
    scene.reports["qwen-r0-0"] = Unreachable("timeout")
    assert _row(scene.status()) == ("True", "Ready", "4/4")
    scene.reports["qwen-r1-0"] = {**scene.reports["qwen-r1-0"], "phase": "Loading", "ready": False, "ready_ranks": 0}  # type: ignore[dict-item]
    status = scene.status()
    assert (status["readyReplicas"], _row(status)[0], status["ranks"]) == (1, "True", "2/4")


def test_a_replica_has_its_old_number_of_ranks_until_the_edit_reaches_it() -> None:
    scene = Scene({"parallelism": {"tensor": 1}}, source=CLAIM)
    scene.leader_reports("qwen-r0", tensor=2, ready_ranks=2)
    assert _row(scene.status()) == ("True", "Ready", "2/2")


def test_a_claim_that_was_filled_beforehand_names_its_directory() -> None:
    scene = Scene({"model": {"cache": {"claimName": "filled", "accessMode": "ReadOnlyMany"}}})
    found = scene.conditions()["ModelCached"]
    assert (found["status"], found["reason"]) == ("True", "NotNeeded")
    directory = names.cache_key("Qwen/Qwen3-8B", "main", "https://huggingface.co")
    assert f"directory {directory} of the claim" in found["message"]
    assert '"filled"' in found["message"]
    assert scene.status()["phase"] == "Ready"
