"""What tools that wait for a model make of its status, for each state of the table in docs/conditions.md."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from minisgl_operator.api.conditions import ConditionType, Reason
from minisgl_operator.api.crd import crd
from minisgl_operator.api.objects import Ref
from minisgl_operator.facts.observed import NodeState, Observed, Unreachable
from minisgl_operator.render import names
from minisgl_operator.status.condition import Condition
from minisgl_operator.status.conditions_unsettled import unsettled
from minisgl_operator.status.status import status_of_invalid_spec
from minisgl_operator.status.transitions import events_for
from support.cluster.inference_models import CLAIM, HUB
from support.cluster.kstatus import ARGO_CD, argo_cd, kstatus
from support.cluster.scene import EARLIER, NOW, Scene

PAGE: Final = Path(__file__).parents[3] / "docs" / "conditions.md"
GITOPS: Final = PAGE.parent / "gitops.md"
AUTOSCALING: Final = {"minReplicas": 0, "maxReplicas": 2, "target": {"runningPerReplica": 4}, "idleSecondsToZero": 60}


def live(scene: Scene) -> dict[str, Any]:
    """The object with its status, as the API server has it."""
    return scene.raw | {"status": scene.status()}


def ready() -> Scene:
    return Scene(source=CLAIM)


def idle() -> Scene:
    scene = Scene({"autoscaling": AUTOSCALING}, source=CLAIM)
    for kind in ("StatefulSet", "Service"):
        scene.children.pop(Ref(kind, "qwen-r0"), None)
    scene.no_pods("qwen-r")
    scene.frontends_report()
    scene.raw["status"] = {"autoscaling": {"targetReplicas": 0}}
    return scene


def idle_without_a_frontend() -> Scene:
    scene = idle()
    scene.no_frontends()
    return scene


def idle_with_one_of_two_frontends() -> Scene:
    scene = Scene({"autoscaling": AUTOSCALING, "frontend": {"replicas": 2}}, source=CLAIM)
    scene.raw["status"] = {"autoscaling": {"targetReplicas": 0}}
    scene.child("Deployment", "qwen-frontend")["status"]["readyReplicas"] = 1
    scene.not_ready("frontend-1")
    return scene


def idle_with_a_failed_fetch() -> Scene:
    scene = Scene({"autoscaling": AUTOSCALING}, source=HUB)
    fail_fetch(scene)
    scene.raw["status"] = {"autoscaling": {"targetReplicas": 0}}
    return scene


def fail_fetch(scene: Scene) -> None:
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "lastTransitionTime": EARLIER}
    scene.child("Job", scene.job)["status"] = {"failed": 1, "conditions": [failed]}


def paused() -> Scene:
    scene = Scene({"replicas": 2, "rollout": {"paused": True}}, source=CLAIM)
    scene.outdate("qwen-r0", "qwen-r1")
    return scene


def with_frontends_that_start() -> Scene:
    scene = Scene({"frontend": {"replicas": 2}}, source=CLAIM)
    scene.child("Deployment", "qwen-frontend")["status"]["readyReplicas"] = 1
    scene.not_ready("frontend-1")
    return scene


def with_a_drain_that_waits() -> Scene:
    scene = Scene({"replicas": 2}, source=CLAIM)
    scene.nodes = {"gpu": NodeState(emptied=True), "other": NodeState()}
    scene.pods["qwen-r1-0"]["spec"]["nodeName"] = "gpu"
    scene.unschedulable("qwen-r0-0", "0/2 nodes are available: 1 node(s) were unschedulable.")
    scene.frontends_report("qwen-r0")
    for name in ("qwen-engine", "qwen-frontend"):
        scene.child("PodDisruptionBudget", name)["status"] = {"expectedPods": 1, "disruptionsAllowed": 0}
    assert scene.conditions()["Degraded"]["reason"] == "DrainBlocked"
    return scene


def suspended() -> Scene:
    scene = Scene({"suspend": True}, source=CLAIM)
    scene.no_frontends()
    return scene


def without_replicas() -> Scene:
    return Scene({"replicas": 0}, source=CLAIM)


def starting() -> Scene:
    scene = ready()
    scene.leader_reports("qwen-r0", phase="Loading")
    scene.no_frontends()
    return scene


def fetching() -> Scene:
    scene = Scene(source=HUB)
    scene.fetch_pod({})
    return scene


def without_a_node() -> Scene:
    scene = ready()
    scene.unschedulable("qwen-r0-0", "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")
    scene.no_frontends()
    return scene


def without_an_image() -> Scene:
    scene = ready()
    scene.waiting("qwen-r0-0", "ImagePullBackOff", 'Back-off pulling image "registry/nothing:1"')
    scene.no_frontends()
    return scene


def without_a_secret() -> Scene:
    scene = ready()
    scene.waiting("qwen-r0-0", "CreateContainerConfigError", 'secret "keys" not found')
    scene.no_frontends()
    return scene


def changing() -> Scene:
    scene = Scene({"replicas": 2}, source=CLAIM)
    scene.outdate("qwen-r1")
    return scene


def with_a_replica_down() -> Scene:
    scene = Scene({"replicas": 2}, source=CLAIM)
    scene.leader_reports("qwen-r0", phase="Failed", last_failure={"reason": "Crashed", "message": "no"})
    scene.frontends_report("qwen-r0")
    return scene


def unheard() -> Scene:
    scene = ready()
    scene.reports["frontend-0"] = Unreachable("timed out")
    return scene


def with_a_frontend_that_is_silent() -> Scene:
    scene = Scene({"frontend": {"replicas": 2}}, source=CLAIM)
    scene.reports["frontend-1"] = Unreachable("timed out")
    scene.raw["status"] = {"frontend": {"silent": [{"pod": "frontend-1", "since": "2026-01-01T11:00:00Z"}]}}
    return scene


def with_a_model_that_cannot_be_served() -> Scene:
    scene = ready()
    scene.leader_reports("qwen-r0", phase="Failed", last_failure={"reason": "InvalidModel", "message": "no such layer"})
    scene.frontends_report("qwen-r0")
    return scene


def with_failed_replicas() -> Scene:
    scene = ready()
    failure = {"rank": 0, "exit_code": 1, "reason": "Error", "message": "no"}
    scene.leader_reports("qwen-r0", phase="Failed", last_failure=failure)
    scene.frontends_report("qwen-r0")
    scene.no_frontends()
    return scene


STATES: Final[dict[str, tuple[Callable[[], Scene], ...]]] = {
    "serves": (ready, with_a_frontend_that_is_silent),
    "is held back": (paused,),
    "idle at zero": (idle, idle_with_one_of_two_frontends),
    "suspended": (suspended, without_replicas),
    "starts": (starting, fetching, idle_without_a_frontend, without_a_node, without_an_image, without_a_secret),
    "changes": (changing,),
    "serves in part": (with_a_replica_down, with_frontends_that_start, with_a_drain_that_waits),
    "does not report": (unheard,),
    "has failed": (with_a_model_that_cannot_be_served, with_failed_replicas, idle_with_a_failed_fetch),
}


def table() -> dict[str, tuple[str, str, str]]:
    """Ready, kstatus and Argo CD by state, as the page has them."""
    row = r"^\| (\w[\w ]+?)(?:: .*?)? \| (?:`(\w+)`.*?|none) \| `(\w+)` \| `(\w+)` \|$"
    rows = re.findall(row, PAGE.read_text(), re.MULTILINE)
    return {state: (ready, kstatus, argo) for state, ready, kstatus, argo in rows}


def test_the_table_has_every_state() -> None:
    assert table().keys() == {*STATES, "a change was given up", "an edit has not been seen", "is new"}


@pytest.mark.parametrize(("state", "make"), [(state, make) for state, each in STATES.items() for make in each])
def test_tools_judge_each_state_as_the_table_says(state: str, make: Callable[[], Scene]) -> None:
    found = live(make())
    conditions = {each["type"]: each for each in found["status"]["conditions"]}
    expected = table()[state]
    assert (conditions["Ready"]["status"], kstatus(found), argo_cd(found)[0]) == expected, conditions
    assert all(each["observedGeneration"] == 3 for each in conditions.values())
    # Each is there only while it is True, and never both.
    unsettled = {name: each["status"] for name, each in conditions.items() if name in ("Reconciling", "Stalled")}
    assert unsettled in ({}, {"Reconciling": "True"}, {"Stalled": "True"})
    newer = found | {"metadata": found["metadata"] | {"generation": 4}}
    assert (kstatus(newer), argo_cd(newer)[0]) == table()["an edit has not been seen"][1:]
    leaving = found | {"metadata": found["metadata"] | {"deletionTimestamp": "2026-01-01T11:00:00Z"}}
    assert kstatus(leaving) == "Terminating"


@pytest.mark.parametrize("reason", ["RolledBack", "ProgressDeadlineExceeded", "PodRefused", "UpgradeFailed"])
def test_a_change_that_was_given_up_has_failed_although_the_model_serves(reason: str) -> None:
    found = live(ready())
    cause = Condition("False", Reason(reason), "Correct the spec.")
    conditions = {
        ConditionType(each["type"]): Condition(each["status"], Reason(each["reason"]), each["message"])
        for each in found["status"]["conditions"]
    }
    added = unsettled("Ready", conditions | {ConditionType.PROGRESSING: cause}, None)
    assert added == {ConditionType.STALLED: cause._replace(status="True")}
    stalled = {"type": "Stalled", "status": "True", "reason": reason, "message": cause.message}
    found["status"]["conditions"].append(stalled)
    assert ("True", kstatus(found), argo_cd(found)[0]) == table()["a change was given up"]
    assert argo_cd(found)[1] == f"{reason}: Correct the spec."


def test_a_revision_that_cannot_be_fetched_has_failed_while_the_old_one_serves() -> None:
    scene = Scene(source=HUB)
    fail_fetch(scene)
    annotations = scene.child("StatefulSet", "qwen-r0")["spec"]["template"]["metadata"]["annotations"]
    annotations[names.CACHE_KEY_ANNOTATION] = "other"
    scene.outdate("qwen-r0")
    found = live(scene)
    conditions = {each["type"]: (each["status"], each["reason"]) for each in found["status"]["conditions"]}
    assert conditions["Ready"] == ("True", "Ready")
    assert (conditions["Ready"][0], kstatus(found), argo_cd(found)[0]) == table()["a change was given up"]


def test_an_idle_model_whose_spec_cannot_be_read_is_not_ready() -> None:
    refusal = type("Refusal", (Exception,), {})("spec.new is not known")
    scene = idle()
    found = status_of_invalid_spec(refusal, Observed(scene.raw), scene.status(), NOW)  # type: ignore[arg-type]
    conditions = {each["type"]: each["status"] for each in found["conditions"]}
    assert (conditions["Ready"], conditions["Stalled"], found["phase"]) == ("False", "True", "Failed")


def test_what_repeats_another_condition_makes_no_event() -> None:
    before = ready().status()
    after = with_a_replica_down().status()
    told = [(event.reason, event.action) for event in events_for(before, after)]
    assert told and not {"Reconciling", "Stalled"} & {action for _, action in told}


def test_a_spec_that_cannot_be_read_has_failed_until_it_can() -> None:
    scene = starting()
    before = scene.status()
    refusal = type("Refusal", (Exception,), {})("spec.new is not known")
    found = status_of_invalid_spec(refusal, Observed(scene.raw), before, NOW)  # type: ignore[arg-type]
    assert kstatus(scene.raw | {"status": found}) == "Failed"
    assert kstatus(scene.raw | {"status": scene.status(found)}) == "InProgress"


def test_the_page_for_argo_cd_has_the_check_of_the_chart() -> None:
    block = GITOPS.read_text().partition("serving.minisgl.io_InferenceModel: |\n")[2].partition("```")[0]
    assert textwrap.dedent(block) == ARGO_CD.read_text()


def test_a_new_model_is_in_progress_before_the_operator_has_seen_it() -> None:
    """With the status that the API server gives it, whose effect `tests/operator/cluster` shows."""
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    new = ready().raw | {"status": schema["properties"]["status"]["default"]}
    assert ("", kstatus(new), argo_cd(new)[0]) == table()["is new"]
    assert argo_cd(ready().raw)[0] == "Progressing"
