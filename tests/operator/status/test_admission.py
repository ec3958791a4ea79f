"""Refusals of pods in dry runs: what they show in the status."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from minisgl_operator.facts.observed import DryRun
from minisgl_operator.facts.pod_failures import creation_failure
from minisgl_operator.facts.rollout.admission import Admission, admission_of
from minisgl_operator.status.admission import refusal
from support.cluster.inference_models import CLAIM
from support.cluster.scene import Scene

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
POLICY = "pods \"r0-0\" is forbidden: ValidatingAdmissionPolicy 'gpus' with binding 'team' denied request: too many"


def outdated(**rollout: Any) -> Scene:
    scene = Scene({"rollout": {"strategy": "Recreate"} | rollout}, source=CLAIM)
    scene.outdate("qwen-r0")
    return scene


def test_a_refusal_names_its_author_and_the_next_step() -> None:
    scene = outdated()
    scene.admission("Refused", POLICY)
    status = scene.status()
    conditions = {each["type"]: each for each in status["conditions"]}
    found = conditions["Progressing"]
    assert (found["status"], found["reason"]) == ("False", "PodRefused")
    assert 'qwen-r0. ValidatingAdmissionPolicy "gpus" refuses pods of the current revision' in found["message"]
    assert POLICY in found["message"] and 'its binding "team"' in found["message"]
    assert conditions["Ready"]["status"] == "True" and status["phase"] == "Ready"


@pytest.mark.parametrize(
    ("message", "author", "remedy"),
    [
        (
            'pods "a-r0-0" is forbidden: violates PodSecurity "restricted:latest": host namespaces (hostPID=true)',
            'Pod Security of the namespace ("restricted:latest")',
            "pod-security.kubernetes.io/enforce",
        ),
        (POLICY, 'ValidatingAdmissionPolicy "gpus"', "or the policy"),
        (
            'admission webhook "validate.kyverno.svc-fail" denied the request: policy disallow-latest-tag',
            'The admission webhook "validate.kyverno.svc-fail"',
            "the policy behind the webhook",
        ),
        (
            'pods "a-r0-0" is forbidden: maximum memory usage per Container is 1Gi, but limit is 8Gi',
            "A LimitRange of the namespace",
            "spec.engine.resources",
        ),
        (
            'pods "a-r0-0" is forbidden: failed quota: cpus: must specify limits.cpu for: engine',
            'ResourceQuota "cpus"',
            "spec.engine.resources",
        ),
        (
            'pods "a-r0-0" is forbidden: no PriorityClass with name high was found',
            "Priority admission",
            "spec.engine.priorityClassName",
        ),
        (
            'pods "a-r0-0" is forbidden: pod rejected: RuntimeClass "nvidia" not found',
            "RuntimeClass admission",
            "spec.engine.runtimeClassName",
        ),
        ("pods are forbidden on Fridays", "The API server", "the policy of the cluster"),
    ],
)
def test_authors_of_refusals(message: str, author: str, remedy: str) -> None:
    found, step = refusal(message)
    assert found == author
    assert remedy in step


def test_an_unanswered_and_a_skipped_check_are_explained() -> None:
    scene = outdated()
    assert scene.conditions()["Progressing"]["message"].endswith("checked a pod of the current revision in a dry run.")
    scene.admission("NoAnswer", "the webhook timed out")
    assert "The last attempt failed: the webhook timed out." in scene.conditions()["Progressing"]["message"]
    scene.admission("Skipped", "the operator may not create pods")
    found = scene.conditions()["Progressing"]
    assert found["reason"] == "RollingOut"
    assert "It was not checked before whether admission accepts their pods" in found["message"]


def test_a_result_of_another_revision_does_not_count() -> None:
    scene = outdated()
    scene.admission("Refused", POLICY)
    scene.raw["status"]["rollout"]["admission"]["revision"] = "0000000001"
    assert scene.conditions()["Progressing"]["reason"] == "RollingOut"


@pytest.mark.parametrize(
    ("status", "reason", "message", "result"),
    [
        (201, "", "", "Accepted"),
        (409, "AlreadyExists", 'pods "a-r0-0" already exists', "Accepted"),
        (403, "Forbidden", 'pods "a-r0-0" is forbidden: exceeded quota: gpus, requested: pods=1', "Accepted"),
        (403, "Forbidden", 'pods "a-r0-0" is forbidden: failed quota: q: must specify limits.cpu', "Refused"),
        (403, "Forbidden", POLICY, "Refused"),
        (422, "Invalid", 'Pod "a-r0-0" is invalid: spec.containers[0].image: Required value', "Refused"),
        (400, "BadRequest", 'admission webhook "a" denied the request: no', "Refused"),
        (400, "BadRequest", 'admission webhook "a" does not support dry run', "Skipped"),
        (
            403,
            "Forbidden",
            'pods is forbidden: User "system:serviceaccount:a:b" cannot create resource "pods" in API group "" in the '
            'namespace "c"',
            "Skipped",
        ),
        (403, "NamespaceTerminating", 'pods "a" is forbidden: unable to create new content', "NoAnswer"),
        (409, "Conflict", "try again", "NoAnswer"),
        (500, "InternalError", 'failed calling webhook "a": connection refused', "NoAnswer"),
        (504, "Timeout", "request did not complete", "NoAnswer"),
        (0, "NoAnswer", "POST: timed out", "NoAnswer"),
    ],
)
def test_responses_to_a_dry_run(status: int, reason: str, message: str, result: str) -> None:
    answer = DryRun("abc", status, reason, message)
    assert admission_of("abc", {}, answer, NOW).result == result
    assert admission_of("another", {}, answer, NOW) == Admission("another")


def test_pods_that_a_webhook_refuses_are_explained() -> None:
    message = 'create Pod a-r0-0 in StatefulSet a-r0 failed error: admission webhook "w" denied the request: no latest'
    failure = creation_failure([message])
    assert failure is not None
    assert (failure.reason, failure.message) == ("PodRefused", 'admission webhook "w" denied the request: no latest')
