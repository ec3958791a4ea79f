"""Each problem is reported in its condition with the next step, in a message that does not change otherwise."""

from __future__ import annotations

import copy
import json
from datetime import timedelta
from typing import Any

import pytest

from minisgl_operator.api.objects import Ref
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.observed import NodeState, Readiness, Rejection, Unreachable
from minisgl_operator.plan.plan import Delete, plan
from minisgl_operator.render import names
from support.cluster.inference_models import CLAIM, DEFAULTS, HUB
from support.cluster.scene import NOW, Scene, fetch_scene

LATER = "2026-01-01T11:30:00Z"

GPU_TEXT = (
    "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes are available: 2 No preemption "
    "victims found for incoming pod."
)


def starting(spec: dict[str, Any] | None = None, source: dict[str, Any] | None = None) -> Scene:
    """A model of which no replica is ready yet."""
    scene = Scene(spec, source=source or CLAIM)
    scene.no_frontends()
    return scene


def expect(scene: Scene, kind: str, reason: str, *words: str, phase: str | None = None, status: str = "False") -> None:
    """Check the condition, and that Ready repeats it."""
    conditions = scene.conditions()
    found = conditions[kind]
    assert (found["status"], found["reason"]) == (status, reason), found
    for word in words:
        assert word in found["message"], found["message"]
    assert conditions["Ready"]["status"] == "False"
    assert conditions["Ready"]["reason"] == reason
    assert conditions["Ready"]["message"] == found["message"]
    if phase is not None:
        assert scene.status()["phase"] == phase


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("ErrImagePull", 'failed to pull and unpack image "registry/nothing:1": not found'),
        ("ImagePullBackOff", 'Back-off pulling image "registry/nothing:1": ErrImagePull: not found'),
        ("InvalidImageName", 'Failed to apply default image tag "registry/nothing:1"'),
        ("RegistryUnavailable", 'failed to pull image "registry/nothing:1": registry is unavailable'),
        ("SignatureValidationFailed", 'image "registry/nothing:1" has no valid signature'),
        ("ErrImageNeverPull", 'Container image "registry/nothing:1" is not present with pull policy of Never'),
    ],
)
def test_a_missing_engine_image_is_reported(reason: str, message: str) -> None:
    scene = starting({"engine": {"image": "registry/nothing:1"}})
    scene.waiting("qwen-r0-0", reason, message)
    expect(scene, "Scheduled", "ImagePullFailed", '"registry/nothing:1"', "spec.engine.image", phase="Pending")
    assert scene.conditions()["Degraded"]["reason"] == "ReplicasDown"


def test_a_missing_model_image_is_reported() -> None:
    scene = starting(source={"image": {"reference": "registry/model:1"}})
    scene.waiting("qwen-r0-0", "ErrImagePull", 'failed to pull image "registry/model:1": not found')
    expect(scene, "Scheduled", "ImagePullFailed", '"registry/model:1"', "spec.model.source.image.reference")


def test_a_missing_frontend_image_is_reported() -> None:
    scene = starting({"frontend": {"image": "registry/nothing:1"}})
    scene.waiting("frontend-0", "ImagePullBackOff", 'Back-off pulling image "registry/nothing:1"')
    expect(scene, "Scheduled", "ImagePullFailed", '"registry/nothing:1"', "spec.frontend.image")
    assert "frontend-0" not in scene.conditions()["Scheduled"]["message"], "the name is generated"
    assert scene.conditions()["Degraded"]["reason"] == "FrontendsDown"


def test_a_missing_new_frontend_image_leaves_the_endpoint_up() -> None:
    scene = Scene({"frontend": {"replicas": 2}}, source=CLAIM)
    scene.waiting("frontend-1", "ImagePullBackOff", 'Back-off pulling image "registry/nothing:1"')
    conditions = scene.conditions()
    assert conditions["Ready"]["status"] == "True"
    assert conditions["Scheduled"]["reason"] == "ImagePullFailed"
    assert scene.status()["phase"] == "Degraded"


@pytest.mark.parametrize(
    ("message", "reason", "words"),
    [
        ('secret "license" not found', "SecretNotFound", 'Secret "license" does not exist'),
        ("couldn't find key key in Secret team-a/license", "SecretNotFound", 'Secret "license" has no key "key"'),
        ('configmap "tuning" not found', "ConfigMapNotFound", 'ConfigMap "tuning" does not exist'),
        ("couldn't find key level in ConfigMap team-a/tuning", "ConfigMapNotFound", '"tuning" has no key "level"'),
    ],
)
def test_a_variable_with_a_missing_source_is_reported(message: str, reason: str, words: str) -> None:
    scene = starting()
    scene.waiting("qwen-r0-0", "CreateContainerConfigError", message)
    expect(scene, "Accepted", reason, words, "create it" if "does not exist" in words else "add it", phase="Failed")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            'MountVolume.SetUp failed for volume "keys" : secret "api-keys" not found',
            'Secret "api-keys" does not exist',
        ),
        (
            'MountVolume.SetUp failed for volume "keys" : references non-existent secret key: team-a',
            'no key "team-a"',
        ),
    ],
)
def test_missing_api_keys_are_reported(message: str, words: str) -> None:
    scene = starting({"frontend": {"auth": {"apiKeysSecretRef": {"name": "api-keys", "key": "team-a"}}}})
    scene.waiting("frontend-0", "ContainerCreating")
    scene.event(scene.pods["frontend-0"], "Scheduled", "assigned")
    assert scene.conditions()["Accepted"]["status"] == "True", "nothing is wrong so far"
    scene.event(scene.pods["frontend-0"], "FailedMount", message)
    expect(scene, "Accepted", "SecretNotFound", words)


@pytest.mark.parametrize(
    ("message", "reason", "words"),
    [
        ('"ca" : configmap "company-ca" not found', "ConfigMapNotFound", 'ConfigMap "company-ca" does not exist'),
        ('"ca" : configmap references non-existent config key: a', "ConfigMapNotFound", 'of volume "ca" has no key'),
        ('"own" : references non-existent secret key: x', "SecretNotFound", 'The Secret of volume "own" has no key'),
    ],
)
def test_a_missing_source_of_a_volume_is_reported(message: str, reason: str, words: str) -> None:
    scene = starting()
    scene.waiting("qwen-r0-0", "ContainerCreating")
    scene.event(scene.pods["qwen-r0-0"], "FailedMount", f"MountVolume.SetUp failed for volume {message}")
    expect(scene, "Accepted", reason, words)


def test_a_missing_hub_token_is_reported() -> None:
    scene = fetch_scene(tokenSecretRef={"name": "hub"})
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}
    container = {"image": "frontend:1", "state": {"waiting": waiting}}
    scene.not_ready("fetch-pod", phase="Pending", containerStatuses=[container])
    expect(scene, "Accepted", "SecretNotFound", 'Secret "hub" does not exist')


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("CreateContainerConfigError", "container has runAsNonRoot and image will run as root"),
        ("CreateContainerError", "context deadline exceeded"),
        ("RunContainerError", 'exec: "minisgl": executable file not found in $PATH'),
    ],
)
def test_a_container_that_cannot_start_is_reported(reason: str, message: str) -> None:
    scene = starting()
    scene.waiting("qwen-r0-0", reason, message)
    expect(scene, "Scheduled", "PodNotStarted", "Pod qwen-r0-0", message)


ATTACHED = (
    'Multi-Attach error for volume "pvc-1" Volume is already exclusively attached to one node and can\'t be attached '
    "to another",
    'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) qwen-r1-0',
    'Waiting for detach for volume "pvc-1" Volume is already exclusively attached to one node, waiting on detach '
    "before it can be attached to another node",
    'Waiting for detach for volume "pvc-1" Volume is already used by 1 pod(s) in different namespaces',
)
_SCRATCH = {"name": "scratch", "persistentVolumeClaim": {"claimName": "scratch"}}
WITH_CLAIM = {"podTemplate": {"volumes": [_SCRATCH]}}


@pytest.mark.parametrize("message", ATTACHED)
def test_a_volume_that_another_node_has_is_reported(message: str) -> None:
    scene = starting()
    scene.waiting("qwen-r0-0", "ContainerCreating")
    scene.event(scene.pods["qwen-r0-0"], "FailedAttachVolume", message)
    expect(scene, "Scheduled", "PodNotStarted", message, "set spec.model.source.pvc.accessMode: ReadWriteOnce")
    assert "podTemplate" not in scene.conditions()["Scheduled"]["message"]
    waits = "Unable to attach or mount volumes: unmounted volumes=[model]: timed out waiting for the condition"
    scene.event(scene.pods["qwen-r0-0"], "FailedMount", waits)
    expect(scene, "Scheduled", "PodNotStarted", message, "set spec.model.source.pvc.accessMode: ReadWriteOnce")
    scene.event(scene.pods["qwen-r0-0"], "SuccessfulAttachVolume", "AttachVolume.Attach succeeded")
    expect(scene, "Scheduled", "PodNotStarted", waits)


def test_a_volume_that_another_node_has_is_reported_although_others_of_the_pod_are_attached() -> None:
    scene = starting()
    scene.waiting("qwen-r0-0", "ContainerCreating")
    pod = scene.pods["qwen-r0-0"]
    scene.event(pod, "FailedAttachVolume", 'AttachVolume.Attach failed for volume "pvc-2" : rpc error: timed out')
    scene.event(pod, "FailedAttachVolume", ATTACHED[0])
    scene.event(pod, "SuccessfulAttachVolume", 'AttachVolume.Attach succeeded for volume "pvc-2" ')
    expect(scene, "Scheduled", "PodNotStarted", ATTACHED[0], "set spec.model.source.pvc.accessMode: ReadWriteOnce")
    scene.event(pod, "FailedMount", "Unable to attach or mount volumes")
    scene.event(pod, "SuccessfulAttachVolume", 'AttachVolume.Attach succeeded for volume "pvc-1" ')
    expect(scene, "Scheduled", "PodNotStarted", "Unable to attach or mount volumes")


@pytest.mark.parametrize(
    ("source", "model", "field"),
    [
        (CLAIM, {}, "spec.model.source.pvc.accessMode"),
        (HUB, {"cache": {"claimName": "theirs"}}, "spec.model.cache.accessMode"),
        (HUB, {}, ""),
        ({"image": {"reference": "registry/model:1"}}, {}, ""),
        ({"pvc": CLAIM["pvc"] | {"accessMode": "ReadWriteOnce"}}, {}, ""),
    ],
    ids=["claim", "claim as a cache", "cache", "image", "claim of one node"],
)
def test_the_advice_on_a_volume_that_another_node_has_names_fields_that_can_be_set(
    source: dict[str, Any], model: dict[str, Any], field: str
) -> None:
    scene = Scene({"engine": WITH_CLAIM, "model": model}, source=source)
    scene.waiting("qwen-r0-0", "ContainerCreating")
    scene.event(scene.pods["qwen-r0-0"], "FailedAttachVolume", ATTACHED[-1])
    message = scene.conditions()["Scheduled"]["message"]
    assert (f"set {field}: ReadWriteOnce" in message) if field else ("accessMode" not in message)
    assert 'spec.engine.podTemplate.volumes ("scratch") is ReadWriteOnce, name one that is ReadWriteMany' in message
    assert "podAffinity in spec.engine.affinity" in message


def test_a_volume_of_a_frontend_that_another_node_has_is_reported() -> None:
    scene = Scene({"frontend": WITH_CLAIM}, source=CLAIM)
    scene.waiting("frontend-0", "ContainerCreating")
    scene.event(scene.pods["frontend-0"], "FailedAttachVolume", ATTACHED[-1])
    message = scene.conditions()["Scheduled"]["message"]
    assert "spec.frontend.podTemplate.volumes" in message and "accessMode" not in message


@pytest.mark.parametrize(("text", "words"), [("not found", "does not exist"), ("is being deleted", "is being deleted")])
def test_a_missing_pvc_is_reported(text: str, words: str) -> None:
    scene = starting()
    scene.unschedulable("qwen-r0-0", f'0/2 nodes are available: persistentvolumeclaim "models" {text}. preemption: no')
    expect(scene, "Accepted", "ClaimNotFound", '"models"', words, "create it")


def test_missing_gpus_are_reported() -> None:
    scene = starting({"parallelism": {"tensor": 4}})
    scene.unschedulable("qwen-r0-0", GPU_TEXT)
    expect(
        scene,
        "Scheduled",
        "InsufficientGPU",
        "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
        "Free GPUs",
        phase="Pending",
    )
    assert "preemption" not in scene.conditions()["Scheduled"]["message"]
    assert scene.conditions()["EngineReady"]["reason"] == "WaitingForPods"


def test_missing_gpus_of_a_resource_claim_are_reported() -> None:
    claims = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu", "gpus": True}]
    scene = starting({"engine": {"podTemplate": {"resourceClaims": claims}}})
    scene.unschedulable("qwen-r0-0", "0/2 nodes are available: 2 cannot allocate all claims. still not schedulable")
    expect(scene, "Scheduled", "InsufficientGPU", "GPUs for its resource claim", "cannot allocate all claims")


def test_a_missing_node_is_reported() -> None:
    scene = starting()
    scene.unschedulable("qwen-r0-0", "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.")
    expect(scene, "Scheduled", "Unschedulable", "node affinity/selector", "nodeSelector")


HELD_TEXT = (
    "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) didn't match pod affinity rules. preemption: no"
)


def test_a_replica_that_does_not_fit_on_the_node_of_a_single_node_claim_is_reported() -> None:
    spec = {"replicas": 2, "parallelism": {"tensor": 4}, "model": {"cache": {"accessMode": "ReadWriteOnce"}}}
    scene = Scene(spec)
    # A fetch that has ended does not hold the claim.
    ended = copy.deepcopy(scene.pods["qwen-r0-0"]) | {"spec": {"nodeName": "another"}}
    ended["metadata"] |= {"name": "qwen-fetch-1", "uid": "ended", "labels": names.labels("qwen", names.FETCH)}
    ended["status"] = {"phase": "Succeeded", "conditions": []}
    scene.pods["ended"] = ended
    scene.unschedulable("qwen-r1-0", HELD_TEXT)
    found = scene.conditions()["Scheduled"]
    assert (found["status"], found["reason"]) == ("False", "InsufficientGPU")
    for words in (
        "Pod qwen-r1-0",
        'PersistentVolumeClaim "qwen-cache" is ReadWriteOnce',
        "2 replicas with 8 nvidia.com/gpu in all must fit on node node-0",
        "didn't match pod affinity rules",
        "lower spec.replicas",
    ):
        assert words in found["message"]


def test_replicas_on_cpus_that_do_not_fit_on_the_node_of_their_claim_are_reported() -> None:
    source = {"pvc": CLAIM["pvc"] | {"accessMode": "ReadWriteOnce"}}
    scene = starting({"engine": {"device": "cpu"}}, source)
    scene.unschedulable("qwen-r0-0", "0/1 nodes are available: 1 Insufficient memory.")
    expect(scene, "Scheduled", "Unschedulable", '"models" is ReadWriteOnce, so all replicas must fit on one node')


def test_a_pod_without_a_node_is_pending() -> None:
    scene = starting()
    scene.not_ready("qwen-r0-0", phase="Pending", containerStatuses=[])["spec"]["nodeName"] = None
    scene.reports.clear()
    scene.no_frontends()
    expect(scene, "Scheduled", "Pending", "qwen-r0", phase="Pending")


QUOTA = "exceeded quota: gpus, requested: requests.nvidia.com/gpu=4, used: requests.nvidia.com/gpu=6, limited: 8"


def test_an_exhausted_quota_for_engines_is_reported() -> None:
    scene = starting()
    scene.no_pods("qwen-r0")
    message = f'create Pod qwen-r0-0 in StatefulSet qwen-r0 failed error: pods "qwen-r0-0" is forbidden: {QUOTA}'
    scene.event(scene.child("StatefulSet", "qwen-r0"), "SuccessfulDelete", "delete Pod")
    scene.event(scene.child("StatefulSet", "qwen-r0"), "FailedCreate", message)
    expect(scene, "Scheduled", "QuotaExceeded", QUOTA, "Raise the ResourceQuota")


def test_an_exhausted_quota_for_frontends_is_reported() -> None:
    scene = starting()
    failure = {"type": "ReplicaFailure", "status": "True", "message": f'pods "qwen-frontend-x7" is forbidden: {QUOTA}'}
    scene.child("Deployment", "qwen-frontend")["status"]["conditions"] = [failure]
    expect(scene, "Scheduled", "QuotaExceeded", QUOTA)
    assert "x7" not in scene.conditions()["Scheduled"]["message"], "the name is generated"


def test_an_exhausted_quota_for_pvcs_is_reported() -> None:
    scene = starting()
    message = f'persistentvolumeclaims "qwen-cache" is forbidden: {QUOTA}'
    scene.rejections = _rejected("PersistentVolumeClaim", 403, message)
    expect(scene, "Scheduled", "QuotaExceeded", QUOTA)


def test_fields_that_a_quota_requires_are_named_for_all_pods() -> None:
    scene = starting()
    scene.no_pods("qwen-r0")
    required = "failed quota: team: must specify limits.cpu for: {0}; limits.memory for: {0}"
    message = f'create Pod qwen-r0-0 in StatefulSet qwen-r0 failed error: pods "qwen-r0-0" is forbidden: {required}'
    scene.event(scene.child("StatefulSet", "qwen-r0"), "FailedCreate", message.format("engine"))
    message = f'pods "qwen-frontend-x7" is forbidden: {required.format("frontend")}'
    failure = {"type": "ReplicaFailure", "status": "True", "message": message}
    scene.child("Deployment", "qwen-frontend")["status"]["conditions"] = [failure]
    fields = [f"spec.{part}.resources.limits.{each}" for part in ("engine", "frontend") for each in ("cpu", "memory")]
    expect(scene, "Scheduled", "FieldsRequired", '"team"', f"set {', '.join(fields)}", "LimitRange")


def test_fields_that_a_quota_requires_are_named_for_the_fetch_pod() -> None:
    scene = fetch_scene()
    scene.no_pods("fetch-pod")
    job = next(body for ref, body in scene.children.items() if ref.kind == "Job")
    job["status"] = {}
    required = "failed quota: team: must specify limits.cpu for: fetch; limits.memory for: fetch"
    scene.event(job, "FailedCreate", f'Error creating: pods "qwen-fetch-x7" is forbidden: {required}')
    fields = "spec.fetch.resources.limits.cpu, spec.fetch.resources.limits.memory"
    expect(scene, "Scheduled", "FieldsRequired", '"team"', f"set {fields}", "LimitRange")


def test_pods_rejected_by_a_policy_are_reported() -> None:
    scene = starting()
    scene.no_pods("qwen-r0")
    message = 'pods "qwen-r0-0" is forbidden: [maximum memory usage per Container is 1Gi, but limit is 4Gi]'
    scene.event(scene.child("StatefulSet", "qwen-r0"), "FailedCreate", message)
    expect(scene, "Scheduled", "PodRefused", "maximum memory usage per Container is 1Gi")


def test_a_request_above_a_limit_of_the_namespace_is_reported() -> None:
    """tests/operator/cluster reads the same message from an API server."""
    scene = starting()
    scene.no_pods("qwen-r0")
    above = 'Invalid value: "8Gi": must be less than or equal to memory limit of 4Gi'
    problem = f"spec.containers[0].resources.requests: {above}"
    message = f'create Pod qwen-r0-0 in StatefulSet qwen-r0 failed error: Pod "qwen-r0-0" is invalid: {problem}'
    scene.event(scene.child("StatefulSet", "qwen-r0"), "FailedCreate", message)
    expect(scene, "Scheduled", "PodRefused", "memory limit of 4Gi", "lower spec.engine.resources.requests.memory")


def test_an_invalid_pod_is_reported() -> None:
    scene = starting()
    scene.no_pods("qwen-r0")
    message = 'Pod "qwen-r0-0" is invalid: spec.tolerations[0].effect: Invalid value: "NoSchedule"'
    scene.event(scene.child("StatefulSet", "qwen-r0"), "FailedCreate", message)
    expect(scene, "Scheduled", "PodRefused", "spec.tolerations[0].effect")


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ("ProvisioningFailed", 'storageclass.storage.k8s.io "fast" not found'),
        ("FailedBinding", "no persistent volumes available for this claim and no storage class is set"),
    ],
)
def test_a_cache_without_a_volume_is_reported(event: str, message: str) -> None:
    scene = fetch_scene()
    claim = scene.child("PersistentVolumeClaim", "qwen-cache")
    claim["status"]["phase"] = "Pending"
    assert scene.conditions()["Scheduled"]["status"] == "True", "it may wait for its first pod"
    scene.event(claim, "WaitForFirstConsumer", "waiting")
    scene.unschedulable("fetch-pod", "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims.")
    assert scene.conditions()["Scheduled"]["reason"] == "Unschedulable", "no event explains it yet"
    scene.event(claim, event, message)
    conditions = scene.conditions()
    assert conditions["Scheduled"]["reason"] == "NoStorageClass"
    assert message in conditions["Scheduled"]["message"]
    assert "spec.model.cache.storageClassName" in conditions["Scheduled"]["message"]
    assert conditions["Ready"]["message"] == conditions["Scheduled"]["message"]


FETCH = [
    ("AuthRequired", "AuthRequired", "tokenSecretRef"),
    ("NotFound", "NotFound", "correct spec.model.source.huggingFace"),
    ("RateLimited", "RateLimited", "429"),
    ("NoSpace", "NoSpace", "spec.model.cache.size"),
    ("Unreachable", "HubUnreachable", "endpoint"),
    ("", "FetchFailed", "log of the fetch pod"),
]


@pytest.mark.parametrize(("said", "reason", "words"), FETCH)
def test_a_failed_fetch_that_retries_is_reported(said: str, reason: str, words: str) -> None:
    scene = fetch_scene()
    scene.reports["fetch-pod"] = {"kind": "fetch", "phase": "Failed", "reason": said, "message": "what the Hub said"}
    expect(scene, "ModelCached", reason, "Qwen/Qwen3-8B@main", "(what the Hub said)", words, "retried automatically")
    assert scene.status()["phase"] == "Caching"


FETCH_FROM_A_BUCKET = [
    ("AuthRequired", "AuthRequired", "spec.model.source.s3.secretName"),
    ("NotFound", "NotFound", "correct spec.model.source.s3"),
    ("RateLimited", "RateLimited", "the fetch continues"),
    ("NoSpace", "NoSpace", "spec.model.cache.size"),
    ("Unreachable", "S3Unreachable", "spec.model.source.s3.endpoint"),
    ("", "FetchFailed", "log of the fetch pod"),
]


@pytest.mark.parametrize(("said", "reason", "words"), FETCH_FROM_A_BUCKET)
def test_a_failed_fetch_from_a_bucket_says_what_to_do_about_the_bucket(said: str, reason: str, words: str) -> None:
    scene = Scene(source={"s3": {"uri": "s3://models/qwen3"}})
    scene.fetch_pod({})
    scene.reports["fetch-pod"] = {"kind": "fetch", "phase": "Failed", "reason": said, "message": "what the store said"}
    expect(scene, "ModelCached", reason, "s3://models/qwen3", "(what the store said)", words, "retried automatically")
    assert scene.status()["phase"] == "Caching"
    assert "Hub" not in scene.conditions()["ModelCached"]["message"]


NO_SPACE = {
    "kind": "fetch",
    "phase": "Failed",
    "reason": "NoSpace",
    "message": "no space",
    "needed_bytes": 66 * 2**30,
    "free_bytes": 30 * 2**30,
}


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        ({}, ("Revisions that replicas use are kept", "Raise spec.model.cache.size to 138Gi or more")),
        ({"retain": True, "size": "200Gi"}, ("Nothing is removed", "spec.model.cache.size to 238Gi or more")),
        ({"claimName": "theirs"}, ("claimName names", "expand the claim itself", "cache.size does not apply")),
    ],
    ids=str,
)
def test_a_claim_that_is_too_small_is_reported_before_the_download(cache: dict[str, Any], words: Any) -> None:
    scene = Scene({"model": {"cache": cache}})
    scene.fetch_pod({})
    scene.reports["fetch-pod"] = NO_SPACE
    claim = cache.get("claimName", "qwen-cache")
    figures = f'needs 66.0 GiB, and 30.0 GiB are free on PersistentVolumeClaim "{claim}"'
    expect(scene, "ModelCached", "NoSpace", figures, *words, "retried automatically")


def test_a_full_claim_is_reported_by_its_current_size() -> None:
    scene = Scene({})
    scene.fetch_pod({})
    scene.child("PersistentVolumeClaim", "qwen-cache")["spec"]["resources"]["requests"]["storage"] = "1Ti"
    scene.reports["fetch-pod"] = NO_SPACE | {"needed_bytes": 700 * 2**20, "free_bytes": 100 * 2**20}
    expect(scene, "ModelCached", "NoSpace", "0.7 GiB, and 100.0 MiB are free", "spec.model.cache.size to 1025Gi")


REFUSED = "minisgl {}: error: unrecognized arguments: {} (see minisgl {} --help)\n"
"""Last output of an image with a flag that it does not have."""


def test_an_image_that_is_too_old_to_fetch_is_reported() -> None:
    scene = fetch_scene()
    output = REFUSED.format("models fetch", "--owner qwen --share-files", "models fetch")
    ended = {"exitCode": 2, "reason": "Error", "message": output}
    scene.not_ready("fetch-pod", phase="Failed", containerStatuses=[{"name": "fetch", "state": {"terminated": ended}}])
    job = next(body for ref, body in scene.children.items() if ref.kind == "Job")
    failed = {"type": "Failed", "status": "True", "lastTransitionTime": NOW.isoformat()}
    job["status"] = {"failed": 1, "conditions": [failed]}
    condition = scene.conditions()["ModelCached"]
    assert condition["reason"] == "FetchFailed"
    assert "--owner qwen --share-files" in condition["message"]
    assert "spec.frontend.image" in condition["message"]
    assert "within 10 minutes" in condition["message"]


def test_a_frontend_image_that_is_too_old_for_a_flag_is_reported() -> None:
    scene = Scene()
    ended = {"exitCode": 2, "reason": "Error", "message": REFUSED.format("frontend", "--leave-timeout 20", "frontend")}
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    container = {"name": "frontend", "state": waiting, "lastState": {"terminated": ended}}
    scene.not_ready("frontend-0", containerStatuses=[container])
    message = scene.conditions()["FrontendReady"]["message"]
    assert "--leave-timeout 20" in message
    assert "spec.frontend.image" in message


def test_a_delayed_fetch_is_reported_with_its_reason() -> None:
    scene = fetch_scene()
    report = {"kind": "fetch", "phase": "Downloading", "percent": 40, "reason": "RateLimited", "message": "429"}
    scene.reports["fetch-pod"] = report
    expect(scene, "ModelCached", "RateLimited", "retried automatically", phase="Caching")
    scene.reports["fetch-pod"] = report | {"reason": "", "message": ""}
    expect(scene, "ModelCached", "Downloading", "40 %")


@pytest.mark.parametrize(("said", "reason", "words"), FETCH)
def test_a_permanently_failed_fetch_is_reported(said: str, reason: str, words: str) -> None:
    scene = fetch_scene()
    job = next(ref for ref in scene.children if ref.kind == "Job")
    failed = {"type": "Failed", "status": "True", "lastTransitionTime": "2026-01-01T12:00:00Z"}
    scene.children[job]["status"] = {"failed": 1, "conditions": [failed]}
    left = f'{{"kind": "fetch", "phase": "Failed", "reason": "{said}", "message": "", "percent": 12}}'
    ended = {"state": {"terminated": {"exitCode": 2, "message": left}}}
    scene.not_ready("fetch-pod", phase="Failed", containerStatuses=[ended])
    expect(scene, "ModelCached", reason, words, f"kubectl delete job {job.name}", phase="Failed")
    assert scene.status()["cache"] == {"phase": "Failed", "percent": 10}


_WRITES = ("Pod fetch-pod", "node-d", "may still write to the claim, so it is not deleted by force", "no other fetch")


def ending_fetch() -> Scene:
    """A deleted fetch pod whose kubelet has had all its time."""
    scene = fetch_scene()
    scene.pods["fetch-pod"]["metadata"]["deletionTimestamp"] = (NOW - timedelta(seconds=60)).isoformat()
    return scene


def test_a_fetch_pod_that_its_live_node_does_not_end_is_reported() -> None:
    """Deleting the node would make the operator treat it as gone, with the pod still writing."""
    scene = ending_fetch()
    scene.pods["fetch-pod"]["metadata"]["deletionTimestamp"] = (NOW - timedelta(seconds=59)).isoformat()
    assert scene.conditions()["ModelCached"]["reason"] == "WaitingForFetch"
    scene = ending_fetch()
    expect(scene, "ModelCached", "PodNotTerminating", *_WRITES, "node-d, which is ready", "restart the node")
    assert "delete node" not in scene.conditions()["ModelCached"]["message"]
    assert scene.nodes is not None
    scene.nodes["node-d"] = NodeState("False", NOW - timedelta(hours=1))
    expect(scene, "ModelCached", "PodNotTerminating", *_WRITES, "restart the kubelet or the node")
    assert "delete node" not in scene.conditions()["ModelCached"]["message"]


@pytest.mark.parametrize("state", [None, NodeState("Unknown", NOW), NodeState("Unknown", NOW - timedelta(hours=1))])
def test_a_fetch_pod_on_a_lost_or_silent_node_is_reported(state: NodeState | None) -> None:
    scene = ending_fetch()
    scene.nodes = {} if state is None else {"node-d": state}
    expect(scene, "ModelCached", "NodeLost", *_WRITES, "off permanently", "kubectl delete node node-d`")
    assert "is deleted by force" not in scene.conditions()["ModelCached"]["message"]


def test_a_fetch_pod_that_does_not_end_on_a_node_that_cannot_be_read_is_reported() -> None:
    scene = ending_fetch()
    scene.nodes = None
    expect(scene, "ModelCached", "PodNotTerminating", *_WRITES, "cannot read nodes", "nodes.read", "if it runs")


_RESIZE = 'PersistentVolumeClaim "qwen-cache" cannot be expanded'


def test_a_storage_class_without_expansion_is_reported() -> None:
    scene = fetch_scene()
    said = (
        'persistentvolumeclaims "qwen-cache" is forbidden: only dynamically provisioned pvc can be resized and the '
        "storageclass that provisions the pvc must support resize"
    )
    scene.rejections = (Rejection(Ref("PersistentVolumeClaim", "qwen-cache"), 403, "Forbidden", said),)
    expect(scene, "Accepted", "Rejected", _RESIZE, "must support resize", "allowVolumeExpansion", "create it again")


@pytest.mark.parametrize("kind", ["ControllerResizeError", "NodeResizeError"])
def test_a_failed_volume_expansion_is_reported(kind: str) -> None:
    scene = fetch_scene()
    claim = scene.child("PersistentVolumeClaim", "qwen-cache")
    claim["status"]["conditions"] = [{"type": kind, "status": "True", "message": "the pool is full"}]
    expect(scene, "Accepted", "Rejected", _RESIZE, "the pool is full")
    claim["status"]["conditions"] = [{"type": "Resizing", "status": "True"}]
    assert scene.conditions()["Accepted"]["status"] == "True"


def test_a_fetch_pod_without_a_report_counts_as_not_started() -> None:
    scene = fetch_scene()
    for left in ("Traceback (most recent call last)", '{"kind": "other"}', "[1]", ""):
        scene.not_ready("fetch-pod", containerStatuses=[{"state": {"terminated": {"message": left}}}])
        assert scene.conditions()["ModelCached"]["reason"] == "WaitingForFetch"


def test_a_new_fetch_attempt_keeps_the_previous_reason_until_it_makes_progress() -> None:
    scene = fetch_scene()
    report = {"kind": "fetch", "phase": "Failed", "reason": "RateLimited", "message": "too many requests"}
    ended = {"state": {"terminated": {"exitCode": 1, "message": json.dumps(report)}}}
    scene.pods["fetch-pod"]["status"] |= {"phase": "Failed", "containerStatuses": [ended]}
    older = scene.pods["fetch-pod"]["metadata"]
    labels = older["labels"]
    scene.pods["next-pod"] = {
        "kind": "Pod",
        "metadata": {**older, "name": "next-pod", "uid": "next", "labels": labels, "creationTimestamp": LATER},
        "spec": {"nodeName": "node-0"},
        "status": {"phase": "Running", "conditions": [], "containerStatuses": []},
    }
    expect(scene, "ModelCached", "RateLimited", "too many requests")
    scene.reports["next-pod"] = {"kind": "fetch", "phase": "Resolving", "percent": 0, "reason": "", "message": ""}
    expect(scene, "ModelCached", "RateLimited", "too many requests")
    scene.reports["next-pod"] = {"kind": "fetch", "phase": "Downloading", "percent": 7, "reason": "", "message": ""}
    expect(scene, "ModelCached", "Downloading", "5 %")


def test_a_fetch_that_has_not_started_is_pending() -> None:
    scene = fetch_scene()
    del scene.children[next(ref for ref in scene.children if ref.kind == "Job")]
    scene.no_pods("fetch")
    expect(scene, "ModelCached", "WaitingForFetch", phase="Caching")
    assert scene.status()["cache"] == {"phase": "Pending", "percent": 0}
    assert scene.conditions()["EngineReady"]["reason"] == "WaitingForModel"


def failure(reason: str, message: str = "last words", **more: Any) -> dict[str, Any]:
    found = {"at": "2026-01-01T11:59:00Z", "rank": 1, "pod": "qwen-r0-1", "exit_code": 1}
    return found | {"reason": reason, "message": message} | more


@pytest.mark.parametrize(
    ("reason", "message", "words"),
    [
        ("TensorDoesNotDivideHeads", "tensor 3 does not divide 32 heads", "Set spec.parallelism.tensor"),
        ("InvalidModel", "config.json is missing", "spec.model.source"),
    ],
)
def test_a_model_that_contradicts_the_spec_is_rejected(reason: str, message: str, words: str) -> None:
    scene = starting({"parallelism": {"tensor": 3}})
    scene.leader_reports("qwen-r0", phase="Failed", last_failure=failure(reason, message))
    expect(scene, "Accepted", reason, message, words, phase="Failed")
    assert scene.conditions()["EngineReady"]["reason"] == reason


def test_an_engine_out_of_memory_is_reported() -> None:
    for device, words in (("auto", "maxModelLen, or raise spec.parallelism.tensor"), ("cpu", "limits.memory")):
        scene = starting({"engine": {"device": device}})
        said = failure("OutOfMemory", "CUDA out of memory")
        scene.leader_reports("qwen-r0", phase="Restarting", restarts=1, last_failure=said)
        expect(scene, "EngineReady", "OutOfMemory", "CUDA out of memory", words, "restart automatically")
        scene.leader_reports("qwen-r0", phase="Failed", restarts=6, last_failure=said)
        expect(scene, "EngineReady", "OutOfMemory", words, "kubectl logs qwen-r0-0", phase="Failed")


def test_a_rank_that_restarts_is_reported() -> None:
    scene = starting()
    said = failure("Killed", exit_code=-9)
    for phase in ("Restarting", "Rendezvous", "Loading"):
        scene.leader_reports("qwen-r0", phase=phase, restarts=1, last_failure=said)
        expect(scene, "EngineReady", "Restarting", "rank 1 ended with exit code -9 (Killed): last words")
    scene.leader_reports("qwen-r0", phase="Restarting")
    expect(scene, "EngineReady", "Restarting")


def test_an_exhausted_restart_budget_is_reported() -> None:
    scene = starting({"recovery": {"maxRestarts": 2, "windowSeconds": 60}})
    scene.leader_reports("qwen-r0", phase="Failed", restarts=3, max_restarts=2, last_failure=failure("Error"))
    words = ("2 restarts within 60 s", "exit code 1", "kubectl delete pod -l serving.minisgl.io/replica=qwen-r0")
    expect(scene, "EngineReady", "RestartBudgetExhausted", *words, phase="Failed")
    scene.leader_reports("qwen-r0", phase="Failed")
    expect(scene, "EngineReady", "RestartBudgetExhausted", "has failed", "It is tried again after a pause")


def test_a_crashing_launcher_is_reported() -> None:
    scene = starting()
    ended = {"exitCode": 2, "reason": "Error", "message": "unknown option --x"}
    scene.waiting("qwen-r0-0", "CrashLoopBackOff", lastState={"terminated": ended})
    expect(scene, "EngineReady", "Crashed", "Pod qwen-r0-0", "exit code 2", "unknown option --x")
    ended |= {"exitCode": 137, "reason": "OOMKilled"}
    scene.waiting("qwen-r0-0", "CrashLoopBackOff", lastState={"terminated": ended})
    expect(scene, "EngineReady", "OutOfMemory", "limits.memory")
    scene.waiting("qwen-r0-0", "CrashLoopBackOff")
    expect(scene, "EngineReady", "Crashed", "keeps terminating.")


def test_a_crashing_frontend_is_reported() -> None:
    scene = starting()
    ended = {"exitCode": 2, "message": "unknown option --x"}
    scene.waiting("frontend-0", "CrashLoopBackOff", lastState={"terminated": ended})
    expect(scene, "FrontendReady", "Crashed", "A frontend pod", "exit code 2: unknown option --x")


def test_an_unreachable_launcher_is_reported() -> None:
    scene = starting()
    scene.not_ready("qwen-r0-0")
    scene.reports["qwen-r0-0"] = Unreachable("timed out")
    found = scene.conditions()["EngineReady"]
    assert (found["status"], found["reason"]) == ("Unknown", "Unreachable")
    scene.leader_reports("qwen-r0", phase="SomethingNew")
    assert scene.conditions()["EngineReady"]["reason"] == "Unreachable"
    del scene.reports["qwen-r0-0"]
    assert scene.conditions()["EngineReady"]["reason"] == "WaitingForPods"


@pytest.mark.parametrize(
    ("phase", "reason"), [("Waiting", "Rendezvous"), ("Rendezvous", "Rendezvous"), ("Loading", "Loading")]
)
def test_a_starting_replica_is_reported(phase: str, reason: str) -> None:
    scene = starting()
    scene.leader_reports("qwen-r0", phase=phase)
    expect(scene, "EngineReady", reason, phase="Starting")
    assert scene.conditions()["Progressing"]["reason"] == "Starting"
    assert scene.conditions()["Degraded"]["status"] == "False"


SUCCESSOR = "run `kubectl delete statefulset qwen-r0 --cascade=foreground --wait=false`: another replica is created"


def not_terminating() -> Scene:
    """A pod that was deleted, whose kubelet has a minute left after the grace period, and whose launcher is silent."""
    scene = starting()
    pod = scene.not_ready("qwen-r0-0")
    pod["metadata"] |= {"deletionTimestamp": NOW.isoformat(), "deletionGracePeriodSeconds": 330}
    scene.reports["qwen-r0-0"] = Unreachable("timed out")
    return scene


def test_a_pod_that_its_live_node_does_not_end_is_reported() -> None:
    scene = not_terminating()
    assert scene.conditions()["EngineReady"]["reason"] == "Unreachable"
    # A busy node may be slightly late.
    stamp = scene.pods["qwen-r0-0"]["metadata"]
    stamp["deletionTimestamp"] = (NOW - timedelta(seconds=59)).isoformat()
    assert scene.conditions()["EngineReady"]["reason"] == "Unreachable"
    stamp["deletionTimestamp"] = (NOW - timedelta(seconds=60)).isoformat()
    words = ("Pod qwen-r0-0", "node-0, which is ready", "not deleted by force", "restart the node")
    expect(scene, "EngineReady", "PodNotTerminating", *words, SUCCESSOR)


@pytest.mark.parametrize("ready", ["True", "False"])
def test_a_pod_that_does_not_end_and_has_no_stateful_set_gets_no_advice_to_delete_it(ready: Readiness) -> None:
    scene = not_terminating()
    scene.nodes = {"node-0": NodeState(ready, None if ready == "True" else NOW)}
    scene.pods["qwen-r0-0"]["metadata"]["deletionTimestamp"] = (NOW - timedelta(seconds=60)).isoformat()
    assert SUCCESSOR in scene.conditions()["EngineReady"]["message"]
    del scene.children[Ref("StatefulSet", "qwen-r0")]
    found = scene.conditions()["Degraded"]
    assert found["reason"] == "PodNotTerminating" and "Pod qwen-r0-0" in found["message"]
    assert "delete statefulset" not in found["message"]


@pytest.mark.parametrize("nodes", [{}, {"node-0": NodeState()}, {"node-0": NodeState("Unknown", NOW)}, None])
@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_a_finalizer_keeps_is_not_blamed_on_its_node(phase: str, nodes: dict[str, NodeState] | None) -> None:
    scene = starting()
    pod = scene.not_ready("qwen-r0-0", phase=phase)
    pod["metadata"] |= {
        "deletionTimestamp": "2026-01-01T11:00:00Z",
        "deletionGracePeriodSeconds": 0,
        "finalizers": ["kueue.x-k8s.io/managed", "example.com/audit"],
    }
    scene.nodes = nodes
    expect(scene, "EngineReady", "PodNotTerminating", "kueue.x-k8s.io/managed, example.com/audit", "kubectl patch pod")
    message = scene.conditions()["EngineReady"]["message"]
    assert "node" not in message
    facts = Facts(scene.model, scene.observed(), DEFAULTS, NOW)
    assert not [step for step in plan(facts) if isinstance(step, Delete)], "force would change nothing"
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T11:59:30Z"
    assert scene.conditions()["EngineReady"]["reason"] != "PodNotTerminating", "its controller has a moment"


def test_a_pod_that_runs_on_a_lost_node_is_lost_whatever_its_finalizers() -> None:
    scene = starting()
    pod = scene.not_ready("qwen-r0-0")
    pod["metadata"] |= {"deletionTimestamp": LATER, "deletionGracePeriodSeconds": 30, "finalizers": ["example.com/a"]}
    scene.nodes = {}
    assert scene.conditions()["EngineReady"]["reason"] == "NodeLost"


@pytest.mark.parametrize("phase", ["Waiting", "Rendezvous", "Loading"])
def test_a_replica_that_lost_a_process_is_degraded_until_it_serves_again(phase: str) -> None:
    scene = Scene({"replicas": 2}, source=CLAIM)
    scene.leader_reports("qwen-r0", phase=phase, restarts=1, epoch=[1767265200000, 2], last_failure=failure("Killed"))
    scene.frontends_report("qwen-r0")
    conditions = scene.conditions()
    assert (conditions["Degraded"]["status"], conditions["Degraded"]["reason"]) == ("True", "ReplicasDown")
    assert "qwen-r0" in conditions["Degraded"]["message"]
    assert (conditions["Ready"]["status"], scene.status()["phase"]) == ("True", "Degraded")
    scene.leader_reports("qwen-r0", phase=phase)
    assert scene.conditions()["Degraded"]["status"] == "False", "its first start is no failure"


def test_a_replica_whose_launcher_exited_is_degraded_until_it_serves_again() -> None:
    scene = Scene({"replicas": 2}, source=CLAIM)
    scene.leader_reports("qwen-r0", phase="Loading")
    scene.frontends_report("qwen-r0")
    container = scene.pods["qwen-r0-0"]["status"]["containerStatuses"][0]
    ended = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-01-01T11:50:00Z"}
    container |= {"restartCount": 1, "lastState": {"terminated": ended}}
    scene.pods["qwen-r0-0"]["status"]["conditions"] = not_ready_since("2026-01-01T11:50:02Z")
    assert scene.conditions()["Degraded"]["reason"] == "ReplicasDown"
    scene = Scene({"replicas": 2}, source=CLAIM)
    scene.pods["qwen-r0-0"]["status"]["containerStatuses"][0] |= container | {"state": {"running": {}}}
    assert scene.conditions()["Degraded"]["status"] == "False", "it serves again"


@pytest.mark.parametrize(
    ("exit_code", "finished_at"), [(137, "2026-01-01T09:00:00Z"), (0, "2026-01-01T11:50:00Z")], ids=["old", "complete"]
)
def test_a_replica_that_served_after_a_container_ended_or_lost_none_has_lost_no_process(
    exit_code: int, finished_at: str
) -> None:
    scene = Scene({"replicas": 2}, source=CLAIM)
    scene.leader_reports("qwen-r0", phase="Waiting")
    scene.frontends_report("qwen-r0")
    pod = scene.pods["qwen-r0-0"]
    ended = {"exitCode": exit_code, "finishedAt": finished_at}
    pod["status"]["containerStatuses"][0] |= {"restartCount": 1, "lastState": {"terminated": ended}}
    pod["status"]["conditions"] = not_ready_since("2026-01-01T11:50:02Z")
    assert scene.conditions()["Degraded"]["status"] == "False"


def test_a_replica_that_has_restarted_is_not_degraded_once_its_leader_says_that_it_serves() -> None:
    scene = Scene({"replicas": 2}, source=CLAIM)
    scene.leader_reports("qwen-r0", restarts=1, last_failure=failure("Killed"))
    scene.frontends_report("qwen-r0")
    scene.not_ready("qwen-r0-0")
    assert scene.conditions()["Degraded"]["status"] == "False"


def not_ready_since(moment: str) -> list[dict[str, str]]:
    return [{"type": "Ready", "status": "False", "lastTransitionTime": moment}]


def test_a_pod_on_a_silent_node_is_reported() -> None:
    scene = not_terminating()
    assert scene.nodes is not None
    scene.nodes["node-0"] = NodeState("Unknown", NOW - timedelta(seconds=299))
    expect(scene, "EngineReady", "NodeLost", "Pod qwen-r0-0", "node-0 is silent", "kubectl delete node node-0")
    scene.nodes["node-0"] = NodeState("Unknown", NOW - timedelta(seconds=300))
    expect(scene, "EngineReady", "NodeLost", "node node-0 is lost", "by force", "kubectl describe node node-0")


def test_a_pod_on_a_node_that_reports_that_it_is_not_ready_is_reported() -> None:
    scene = not_terminating()
    assert scene.nodes is not None
    scene.nodes["node-0"] = NodeState("False", NOW - timedelta(hours=1))
    assert scene.conditions()["EngineReady"]["reason"] == "Unreachable", "the kubelet has time left"
    scene.pods["qwen-r0-0"]["metadata"]["deletionTimestamp"] = (NOW - timedelta(seconds=60)).isoformat()
    words = ("Pod qwen-r0-0", "node-0, which is not ready but whose kubelet runs", "not deleted by force")
    expect(scene, "EngineReady", "PodNotTerminating", *words, "restart the kubelet or the node", SUCCESSOR)
    message = scene.conditions()["EngineReady"]["message"]
    assert "delete node" not in message and "taint" not in message


def test_a_pod_on_a_live_node_is_not_reported_as_lost_for_a_taint() -> None:
    scene = not_terminating()
    scene.nodes = {"node-0": NodeState(out_of_service=True)}
    scene.pods["qwen-r0-0"]["metadata"]["deletionTimestamp"] = (NOW - timedelta(seconds=60)).isoformat()
    expect(scene, "EngineReady", "PodNotTerminating", "node-0, which is ready", "not deleted by force")


@pytest.mark.parametrize(
    "state",
    [None, NodeState("Unknown", NOW, out_of_service=True), NodeState("False", NOW, out_of_service=True)],
    ids=["gone", "out of service", "out of service, not ready"],
)
def test_a_pod_on_a_lost_node_is_reported(state: NodeState | None) -> None:
    scene = not_terminating()
    scene.nodes = {} if state is None else {"node-0": state}
    expect(scene, "EngineReady", "NodeLost", "Pod qwen-r0-0", "node node-0 is lost", "60 s after its deletion")


def test_an_operator_that_cannot_read_nodes_says_so() -> None:
    scene = not_terminating()
    scene.nodes = None
    scene.pods["qwen-r0-0"]["metadata"]["deletionTimestamp"] = (NOW - timedelta(seconds=60)).isoformat()
    expect(scene, "EngineReady", "PodNotTerminating", "Pod qwen-r0-0", "node-0", "cannot read nodes", "nodes.read")


def test_a_frontend_that_does_not_end_is_reported() -> None:
    scene = Scene(source=CLAIM)
    scene.pods["frontend-9"] = copy.deepcopy(scene.pods["frontend-0"])
    scene.pods["frontend-9"]["metadata"] |= {
        "name": "frontend-9",
        "deletionTimestamp": (NOW - timedelta(seconds=60)).isoformat(),
    }
    found = scene.conditions()["Degraded"]
    assert (found["status"], found["reason"]) == ("True", "PodNotTerminating")
    assert "Pod frontend-9" in found["message"] and "node-0" in found["message"]
    assert "statefulset" not in found["message"]


def test_a_draining_replica_is_reported() -> None:
    scene = starting()
    scene.leader_reports("qwen-r0", phase="Draining")
    expect(scene, "EngineReady", "Draining")


def test_frontends_without_a_routable_replica_are_reported() -> None:
    scene = starting()
    expect(scene, "FrontendReady", "NoReplicaRoutable", "none accepts requests")
    scene.child("Deployment", "qwen-frontend")["status"]["readyReplicas"] = 1
    found = scene.conditions()["Ready"]
    assert (found["status"], found["reason"]) == ("False", "NoReplicaRoutable")


def test_a_frontend_that_is_not_in_the_service_yet_counts_as_starting() -> None:
    scene = Scene(source=CLAIM)
    assert scene.conditions()["Ready"]["status"] == "True"
    scene.child("Deployment", "qwen-frontend")["status"]["readyReplicas"] = 0
    expect(scene, "FrontendReady", "Starting")
    found = scene.conditions()["Ready"]
    assert (found["status"], found["reason"]) == ("False", "Starting"), "clients would find no endpoint"


def test_starting_frontends_are_reported() -> None:
    scene = starting({"frontend": {"replicas": 2}})
    scene.reports = {name: said for name, said in scene.reports.items() if not name.startswith("frontend")}
    expect(scene, "FrontendReady", "Starting", "0 of 2 frontends")
    del scene.children[Ref("Deployment", "qwen-frontend")]
    expect(scene, "FrontendReady", "Starting", "0 of 2 frontends")


def test_a_child_name_taken_by_another_owner_is_a_conflict() -> None:
    scene = Scene(source=CLAIM)
    del scene.children[Ref("Service", "qwen")]
    scene.conflicting = {Ref("Service", "qwen"): "Deployment other"}
    expect(scene, "Accepted", "Conflict", 'Service "qwen"', "Deployment other", "rename", phase="Failed")


def test_a_conflict_of_one_replica_leaves_the_endpoint_up() -> None:
    scene = Scene({"replicas": 2}, source=CLAIM)
    del scene.children[Ref("Service", "qwen-r1")]
    scene.conflicting = {Ref("Service", "qwen-r1"): "InferenceModel qwen-r1"}
    conditions = scene.conditions()
    assert conditions["Accepted"]["reason"] == "Conflict"
    assert conditions["Ready"]["status"] == "True"


def test_a_taken_name_that_is_not_wanted_is_no_conflict() -> None:
    scene = Scene(source=CLAIM)
    scene.conflicting = {Ref("StatefulSet", "qwen-r1"): "nobody"}
    assert scene.conditions()["Accepted"]["status"] == "True"


def test_a_child_with_another_controller_is_a_conflict() -> None:
    scene = Scene(source=CLAIM)
    owner = {"kind": "InferenceModel", "name": "other", "uid": "other", "controller": True}
    scene.child("Service", "qwen")["metadata"]["ownerReferences"] = [owner]
    expect(scene, "Accepted", "Conflict", "InferenceModel other")


def _rejected(kind: str, status: int, message: str, reason: str = "Refused") -> tuple[Rejection, ...]:
    return (Rejection(Ref(kind, "qwen-x"), status, reason, message),)


def test_a_missing_permission_is_reported() -> None:
    scene = starting()
    scene.rejections = _rejected("StatefulSet", 403, 'statefulsets.apps is forbidden: User "x" cannot patch resource')
    expect(scene, "Accepted", "Forbidden", "permission on StatefulSet", "cannot patch resource", "role")


@pytest.mark.parametrize(
    "message",
    [
        'persistentvolumeclaims "qwen-x" is forbidden: maximum storage usage per PersistentVolumeClaim is 50Gi, but '
        "request is 100Gi",
        'admission webhook "validation.gatekeeper.sh" denied the request: [owner] label "cost-center" is missing',
    ],
)
def test_a_child_rejected_by_admission_is_not_reported_as_a_missing_permission(message: str) -> None:
    scene = starting()
    scene.rejections = _rejected("PersistentVolumeClaim", 403, message)
    expect(scene, "Accepted", "Rejected", "PersistentVolumeClaim qwen-x", message, "Change the spec or the policy")


def test_a_quota_that_has_yet_to_count_rejects_nothing() -> None:
    scene = Scene(source=CLAIM)
    said = 'services "qwen" is forbidden: status unknown for quota: objects, resources: count/services'
    scene.rejections = _rejected("Service", 403, said)
    assert scene.conditions()["Accepted"]["status"] == "True"


def test_a_terminating_namespace_is_reported() -> None:
    scene = starting()
    message = "services is forbidden: unable to create new content in namespace team-a because it is being terminated"
    scene.rejections = _rejected("Service", 403, message, "NamespaceTerminating")
    expect(scene, "Accepted", "NamespaceTerminating", "is being deleted")


@pytest.mark.parametrize("status", [400, 422])
def test_a_rejected_child_is_reported(status: int) -> None:
    scene = starting()
    scene.rejections = _rejected("StatefulSet", status, "spec.template.spec.affinity: Invalid value")
    expect(scene, "Accepted", "Rejected", "affinity: Invalid value", "Correct the field")


WEBHOOK_DOWN = (
    'Internal error occurred: failed calling webhook "validate.example.com": failed to call webhook: Post '
    '"https://policy.example.svc:443/validate?timeout=10s": no endpoints available for service "policy"'
)


@pytest.mark.parametrize("status", [500, 503, 504])
@pytest.mark.parametrize("kind", ["Deployment", "Job", "PersistentVolumeClaim", "Service", "StatefulSet"])
def test_a_webhook_that_does_not_answer_is_named(kind: str, status: int) -> None:
    scene = starting()
    scene.rejections = _rejected(kind, status, WEBHOOK_DOWN)
    words = ('"validate.example.com"', "no endpoints available", "failurePolicy", kind)
    expect(scene, "Accepted", "WebhookUnavailable", *words, phase="Failed")


def test_a_webhook_that_keeps_pods_from_being_created_is_named() -> None:
    scene = starting()
    scene.no_pods("qwen-r0")
    stateful_set = scene.child("StatefulSet", "qwen-r0")
    stateful_set["status"]["replicas"] = 0
    message = f"create Pod qwen-r0-0 in StatefulSet qwen-r0 failed error: {WEBHOOK_DOWN}"
    scene.event(stateful_set, "FailedCreate", message)
    expect(scene, "Scheduled", "WebhookUnavailable", "creates no pods", '"validate.example.com"', "failurePolicy")


def test_a_webhook_that_keeps_frontends_from_being_created_is_named() -> None:
    scene = starting()
    failed = {"type": "ReplicaFailure", "status": "True", "message": WEBHOOK_DOWN}
    scene.child("Deployment", "qwen-frontend")["status"]["conditions"] = [failed]
    expect(scene, "Scheduled", "WebhookUnavailable", '"validate.example.com"')


def test_a_webhook_that_is_down_does_not_make_a_revision_fail() -> None:
    scene = Scene({"replicas": 2}, source=CLAIM)
    scene.outdate("qwen-r0")
    scene.no_pods("qwen-r1")
    stateful_set = scene.child("StatefulSet", "qwen-r1")
    stateful_set["status"]["replicas"] = 0
    scene.event(stateful_set, "FailedCreate", WEBHOOK_DOWN)
    assert "failedRevision" not in scene.status()
    scene.events.clear()
    scene.event(stateful_set, "FailedCreate", 'admission webhook "validate.example.com" denied the request: no')
    assert scene.status()["failedRevision"] == scene.revision


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_api_server_that_answers_with_errors_is_reported(status: int) -> None:
    scene = Scene(source=CLAIM)
    scene.rejections = _rejected("StatefulSet", status, "the server has received too many requests")
    found = scene.conditions()["Accepted"]
    assert (found["status"], found["reason"]) == ("Unknown", "ApiServerError")
    for word in ("StatefulSet", f"status {status}", "too many requests"):
        assert word in found["message"]
    assert scene.conditions()["Ready"]["status"] == "True", "what serves goes on"


def test_a_busy_api_server_is_not_reported() -> None:
    scene = Scene(source=CLAIM)
    scene.rejections = _rejected("StatefulSet", 409, "the object has been modified")
    assert scene.conditions()["Accepted"]["status"] == "True"


def test_quoted_text_is_short_and_on_one_line() -> None:
    scene = starting()
    scene.leader_reports("qwen-r0", phase="Failed", last_failure=failure("InvalidModel", "bad\n\x1b[31m" + "x" * 5000))
    found = scene.conditions()["Accepted"]["message"]
    assert len(found) <= 1024
    assert "\n" not in found
    assert "\x1b" not in found
