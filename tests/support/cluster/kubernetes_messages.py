"""Messages of three Kubernetes minors that the operator reads by patterns, each with the source that writes it.

The texts are those that the sources below format, with names of our own. `python -m support.cluster.kubernetes_messages
DIRECTORY` checks that the sources still contain the formats; DIRECTORY is Go's module cache (`$(go env GOMODCACHE)`),
with k8s.io/kubernetes, k8s.io/apiserver and k8s.io/apimachinery of each version, as of `go mod download`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from minisgl_operator.api.conditions import Reason

Version = Literal["1.31.14", "1.33.6", "1.36.4"]
VERSIONS: Final[tuple[Version, ...]] = ("1.31.14", "1.33.6", "1.36.4")

Place = Literal[
    "PodScheduled",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "ImageInspectError",
    "CreateContainerConfigError",
    "FailedMount",
    "FailedAttachVolume",
    "FailedCreate",
    "ReplicaFailure",
    "FailedBinding",
    "ProvisioningFailed",
    "rejection of Job",
    "rejection of PersistentVolumeClaim",
]
"""Condition, waiting reason, or reason of the Event that has the message; or the kind that the API server rejected."""

_SCHEDULER: Final = "kubernetes/pkg/scheduler/framework"
_PLUGINS: Final = f"{_SCHEDULER}/plugins"
_NO_VICTIMS: Final = "preemption: 0/3 nodes are available: 3 No preemption victims found for incoming pod."
_NOT_HELPFUL: Final = "preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."
_RECONCILER: Final = "kubernetes/pkg/controller/volume/attachdetach/reconciler/reconciler.go"
_FIT: Final = (f"{_SCHEDULER}/types.go", '"0/%v nodes are available"')


@dataclass(frozen=True)
class Message:
    """`words` are in the message of the condition with this reason. `sources`: file (module and path) and format."""

    place: Place
    text: str
    reason: Reason
    words: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]
    versions: tuple[Version, ...] = VERSIONS


MESSAGES: Final[tuple[Message, ...]] = (
    Message(
        "PodScheduled",
        f"0/3 nodes are available: 3 Insufficient nvidia.com/gpu. {_NO_VICTIMS}",
        Reason.INSUFFICIENT_GPU,
        ("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",),
        (_FIT, (f"{_PLUGINS}/noderesources/fit.go", '"Insufficient %v"')),
    ),
    Message(
        "PodScheduled",
        "0/3 nodes are available: 1 node(s) had untolerated taint {nvidia.com/gpu: present}, 2 Insufficient "
        f"nvidia.com/gpu. {_NO_VICTIMS}",
        Reason.INSUFFICIENT_GPU,
        ("1 node(s) had untolerated taint {nvidia.com/gpu: present}",),
        (
            (f"{_PLUGINS}/tainttoleration/taint_toleration.go", '"node(s) had untolerated taint {%s: %s}"'),
            (f"{_PLUGINS}/defaultpreemption/default_preemption.go", '"preemption: "+msg'),
        ),
        ("1.31.14", "1.33.6"),
    ),
    Message(
        "PodScheduled",
        f"0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient nvidia.com/gpu. {_NO_VICTIMS}",
        Reason.INSUFFICIENT_GPU,
        ("1 node(s) had untolerated taint(s)",),
        (
            (f"{_PLUGINS}/tainttoleration/taint_toleration.go", '"node(s) had untolerated taint(s)"'),
            (f"{_PLUGINS}/defaultpreemption/default_preemption.go", '"preemption: "+msg'),
        ),
        ("1.36.4",),
    ),
    Message(
        "PodScheduled",
        f"0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector. {_NOT_HELPFUL}",
        Reason.UNSCHEDULABLE,
        ("didn't match Pod's node affinity/selector.",),
        ((f"{_PLUGINS}/nodeaffinity/node_affinity.go", '"node(s) didn\'t match Pod\'s node affinity/selector"'),),
    ),
    Message(
        "PodScheduled",
        f"0/3 nodes are available: 3 node(s) had volume node affinity conflict. {_NOT_HELPFUL}",
        Reason.UNSCHEDULABLE,
        ("had volume node affinity conflict.",),
        ((f"{_PLUGINS}/volumebinding/binder.go", '"node(s) had volume node affinity conflict"'),),
        ("1.31.14",),
    ),
    Message(
        "PodScheduled",
        f"0/3 nodes are available: 3 node(s) didn't match PersistentVolume's node affinity. {_NOT_HELPFUL}",
        Reason.UNSCHEDULABLE,
        ("didn't match PersistentVolume's node affinity.",),
        ((f"{_PLUGINS}/volumebinding/binder.go", '"node(s) didn\'t match PersistentVolume\'s node affinity"'),),
        ("1.33.6", "1.36.4"),
    ),
    Message(
        "PodScheduled",
        f'0/3 nodes are available: persistentvolumeclaim "models" not found. {_NOT_HELPFUL}',
        Reason.CLAIM_NOT_FOUND,
        ('PersistentVolumeClaim "models" does not exist',),
        (_FIT, ("apimachinery/pkg/api/errors/errors.go", '"%s %q not found"')),
    ),
    Message(
        "PodScheduled",
        f'0/3 nodes are available: persistentvolumeclaim "models" is being deleted. {_NOT_HELPFUL}',
        Reason.CLAIM_NOT_FOUND,
        ('PersistentVolumeClaim "models" is being deleted',),
        ((f"{_PLUGINS}/volumebinding/volume_binding.go", '"persistentvolumeclaim %q is being deleted"'),),
    ),
    Message(
        "ImagePullBackOff",
        'Back-off pulling image "engine:1"',
        Reason.IMAGE_PULL_FAILED,
        ('Image "engine:1"',),
        (("kubernetes/pkg/kubelet/images/image_manager.go", '"Back-off pulling image %q"'),),
        ("1.31.14",),
    ),
    Message(
        "ImagePullBackOff",
        'Back-off pulling image "engine:1": ErrImagePull: rpc error: code = NotFound desc = failed to pull and unpack '
        'image "docker.io/library/engine:1": not found',
        Reason.IMAGE_PULL_FAILED,
        ('Image "engine:1"',),
        (
            ("kubernetes/pkg/kubelet/images/image_manager.go", '"Back-off pulling image %q"'),
            ("kubernetes/pkg/kubelet/images/image_manager.go", 'fmt.Sprintf("%s: %s", msg, prevPullErrMsg)'),
        ),
        ("1.33.6", "1.36.4"),
    ),
    Message(
        "ErrImageNeverPull",
        'Container image "engine:1" is not present with pull policy of Never',
        Reason.IMAGE_PULL_FAILED,
        ('Image "engine:1"',),
        (("kubernetes/pkg/kubelet/images/image_manager.go", '"Container image %q is not present with pull policy'),),
    ),
    Message(
        "InvalidImageName",
        'Failed to apply default image tag "engine:1": couldn\'t parse image name "engine:1": invalid reference format',
        Reason.IMAGE_PULL_FAILED,
        ('Image "',),
        (("kubernetes/pkg/kubelet/images/image_manager.go", '"Failed to apply default image tag %q: %v"'),),
    ),
    Message(
        "ImageInspectError",
        'Failed to inspect image "engine:1": rpc error: code = Unknown desc = stream corrupted',
        Reason.IMAGE_PULL_FAILED,
        ('Image "engine:1"',),
        (
            ("kubernetes/pkg/kubelet/images/image_manager.go", '"Failed to inspect image %q: %v"'),
            ("kubernetes/pkg/kubelet/images/types.go", 'errors.New("ImageInspectError")'),
        ),
    ),
    Message(
        "CreateContainerConfigError",
        'secret "hub" not found',
        Reason.SECRET_NOT_FOUND,
        ('Secret "hub" does not exist',),
        (("apimachinery/pkg/api/errors/errors.go", '"%s %q not found"'),),
    ),
    Message(
        "CreateContainerConfigError",
        'configmap "settings" not found',
        Reason.CONFIG_MAP_NOT_FOUND,
        ('ConfigMap "settings" does not exist',),
        (("apimachinery/pkg/api/errors/errors.go", '"%s %q not found"'),),
    ),
    Message(
        "CreateContainerConfigError",
        "couldn't find key token in Secret team-a/hub",
        Reason.SECRET_NOT_FOUND,
        ('Secret "hub" has no key "token"',),
        (("kubernetes/pkg/kubelet/kubelet_pods.go", "\"couldn't find key %v in Secret %v/%v\""),),
    ),
    Message(
        "CreateContainerConfigError",
        "couldn't find key level in ConfigMap team-a/settings",
        Reason.CONFIG_MAP_NOT_FOUND,
        ('ConfigMap "settings" has no key "level"',),
        (("kubernetes/pkg/kubelet/kubelet_pods.go", "\"couldn't find key %v in ConfigMap %v/%v\""),),
    ),
    Message(
        "FailedMount",
        'MountVolume.SetUp failed for volume "keys" : secret "keys" not found',
        Reason.SECRET_NOT_FOUND,
        ('Secret "keys" does not exist',),
        (
            (
                "kubernetes/pkg/volume/util/operationexecutor/operation_generator.go",
                'GenerateError("MountVolume.SetUp failed"',
            ),
            ("kubernetes/pkg/volume/util/operationexecutor/operation_executor.go", '"%v for volume %q %v"'),
        ),
    ),
    Message(
        "FailedMount",
        'MountVolume.SetUp failed for volume "keys" : references non-existent secret key: keys',
        Reason.SECRET_NOT_FOUND,
        ('The Secret with the API keys has no key "keys"',),
        (("kubernetes/pkg/volume/secret/secret.go", '"references non-existent secret key: %s"'),),
    ),
    Message(
        "FailedMount",
        'MountVolume.SetUp failed for volume "ca" : configmap references non-existent config key: ca.pem',
        Reason.CONFIG_MAP_NOT_FOUND,
        ('The ConfigMap of volume "ca" has no key "ca.pem"',),
        (("kubernetes/pkg/volume/configmap/configmap.go", '"configmap references non-existent config key: %s"'),),
    ),
    Message(
        "FailedAttachVolume",
        'Multi-Attach error for volume "pvc-1" Volume is already exclusively attached to one node and can\'t be '
        "attached to another",
        Reason.POD_NOT_STARTED,
        ("Multi-Attach error", "set spec.model.source.pvc.accessMode: ReadWriteOnce"),
        ((_RECONCILER, '"Multi-Attach error", "Volume is already exclusively attached to one node'),),
        ("1.31.14", "1.33.6"),
    ),
    Message(
        "FailedAttachVolume",
        'Waiting for detach for volume "pvc-1" Volume is already exclusively attached to one node, waiting on detach '
        "before it can be attached to another node",
        Reason.POD_NOT_STARTED,
        ("Waiting for detach", "set spec.model.source.pvc.accessMode: ReadWriteOnce"),
        ((_RECONCILER, '"Waiting for detach", "Volume is already exclusively attached to one node'),),
        ("1.36.4",),
    ),
    Message(
        "FailedAttachVolume",
        'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) qwen-r1-0',
        Reason.POD_NOT_STARTED,
        ("Multi-Attach error", "qwen-r1-0", "set spec.model.source.pvc.accessMode: ReadWriteOnce"),
        ((_RECONCILER, '"Multi-Attach error", msg'), (_RECONCILER, '"Volume is already used by pod(s) %s"')),
        ("1.31.14", "1.33.6"),
    ),
    Message(
        "FailedAttachVolume",
        'Waiting for detach for volume "pvc-1" Volume is already used by pod(s) qwen-r1-0',
        Reason.POD_NOT_STARTED,
        ("Waiting for detach", "qwen-r1-0", "set spec.model.source.pvc.accessMode: ReadWriteOnce"),
        ((_RECONCILER, '"Waiting for detach", msg'), (_RECONCILER, '"Volume is already used by pod(s) %s"')),
        ("1.36.4",),
    ),
    Message(
        "FailedCreate",
        'create Pod qwen-r0-0 in StatefulSet qwen-r0 failed error: pods "qwen-r0-0" is forbidden: exceeded quota: '
        "gpus, requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=4, limited: "
        "requests.nvidia.com/gpu=4",
        Reason.QUOTA_EXCEEDED,
        ("exceeded quota: gpus, requested: requests.nvidia.com/gpu=1",),
        (
            ("apiserver/pkg/admission/plugin/resourcequota/controller.go", '"exceeded quota: %s, requested: %s, used'),
            ("kubernetes/pkg/controller/statefulset/stateful_pod_control.go", '"%s Pod %s in StatefulSet %s failed'),
        ),
    ),
    Message(
        "FailedCreate",
        'create Pod qwen-r0-0 in StatefulSet qwen-r0 failed error: pods "qwen-r0-0" is forbidden: failed quota: '
        "limits: must specify limits.cpu for: engine; limits.memory for: engine",
        Reason.FIELDS_REQUIRED,
        ("spec.engine.resources.limits.cpu, spec.engine.resources.limits.memory",),
        (
            ("apiserver/pkg/admission/plugin/resourcequota/controller.go", '"failed quota: %s: %v"'),
            ("kubernetes/pkg/quota/v1/evaluator/core/pods.go", '"must specify %s", strings.Join(errorMessages, "; ")'),
        ),
    ),
    Message(
        "FailedCreate",
        'create Pod qwen-r0-0 in StatefulSet qwen-r0 failed error: Pod "qwen-r0-0" is invalid: spec.containers[0].'
        'resources.requests: Invalid value: "8Gi": must be less than or equal to memory limit of 4Gi',
        Reason.POD_REFUSED,
        ("memory limit of 4Gi", "spec.engine.resources.requests.memory"),
        (
            ("apimachinery/pkg/api/errors/errors.go", '"%s %q is invalid: %v"'),
            ("kubernetes/pkg/apis/core/validation/validation.go", '"must be less than or equal to %s limit of %s"'),
        ),
    ),
    Message(
        "ReplicaFailure",
        'pods "qwen-frontend-6d5-" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true',
        Reason.POD_REFUSED,
        ('violates PodSecurity "restricted:latest"',),
        (("apimachinery/pkg/api/errors/errors.go", '"%s %q is forbidden: %v"'),),
    ),
    Message(
        "FailedBinding",
        "no persistent volumes available for this claim and no storage class is set",
        Reason.NO_STORAGE_CLASS,
        ("no storage class is set",),
        (
            (
                "kubernetes/pkg/controller/volume/persistentvolume/pv_controller.go",
                '"no persistent volumes available for this claim and no storage class is set"',
            ),
        ),
    ),
    Message(
        "ProvisioningFailed",
        'storageclass.storage.k8s.io "fast" not found',
        Reason.NO_STORAGE_CLASS,
        ('storageclass.storage.k8s.io "fast" not found',),
        (
            ("kubernetes/pkg/controller/volume/persistentvolume/pv_controller.go", "events.ProvisioningFailed, err.Er"),
            ("apimachinery/pkg/api/errors/errors.go", '"%s %q not found"'),
        ),
    ),
    Message(
        "rejection of Job",
        'jobs.batch is forbidden: User "system:serviceaccount:minisgl-system:minisgl-operator" cannot create resource '
        '"jobs" in API group "batch" in the namespace "team-a"',
        Reason.FORBIDDEN,
        ("lacks a permission on Job",),
        (
            (
                "apiserver/pkg/endpoints/handlers/responsewriters/errors.go",
                '"User %q cannot %s resource %q in API group %q in the namespace %q"',
            ),
        ),
    ),
    Message(
        "rejection of Job",
        'jobs.batch "qwen-fetch" is forbidden: cannot set blockOwnerDeletion if an ownerReference refers to a resource '
        "you can't set finalizers on: , <nil>",
        Reason.FORBIDDEN,
        ("lacks a permission on Job",),
        (("kubernetes/plugin/pkg/admission/gc/gc_admission.go", '"cannot set blockOwnerDeletion if an ownerRef'),),
    ),
    Message(
        "rejection of PersistentVolumeClaim",
        'persistentvolumeclaims "qwen-cache" is forbidden: only dynamically provisioned pvc can be resized and the '
        "storageclass that provisions the pvc must support resize",
        Reason.REJECTED,
        ("cannot be expanded to spec.model.cache.size",),
        (
            (
                "kubernetes/plugin/pkg/admission/storage/persistentvolume/resize/admission.go",
                '"only dynamically provisioned pvc can be resized and "+',
            ),
        ),
    ),
)

WAITING_REASONS: Final[dict[str, str]] = {
    "CrashLoopBackOff": "pkg/kubelet/container/sync_result.go",
    "RunContainerError": "pkg/kubelet/container/sync_result.go",
    "CreateContainerConfigError": "pkg/kubelet/kuberuntime/kuberuntime_container.go",
    "PreCreateHookError": "pkg/kubelet/kuberuntime/kuberuntime_container.go",
    "CreateContainerError": "pkg/kubelet/kuberuntime/kuberuntime_container.go",
    "PreStartHookError": "pkg/kubelet/kuberuntime/kuberuntime_container.go",
    "PostStartHookError": "pkg/kubelet/kuberuntime/kuberuntime_container.go",
    "ImagePullBackOff": "pkg/kubelet/images/types.go",
    "ImageInspectError": "pkg/kubelet/images/types.go",
    "ErrImagePull": "pkg/kubelet/images/types.go",
    "ErrImageNeverPull": "pkg/kubelet/images/types.go",
    "InvalidImageName": "pkg/kubelet/images/types.go",
}
"""Reasons with which the kubelet of each of these versions keeps a container waiting after a failure, and the file."""


def missing_formats(modules: Path) -> list[str]:
    """Formats that are not in the sources of a version."""
    wanted = [(file, form, message.versions) for message in MESSAGES for file, form in message.sources]
    wanted += [(f"kubernetes/{file}", f'errors.New("{word}")', VERSIONS) for word, file in WAITING_REASONS.items()]
    missing = []
    for file, form, versions in wanted:
        module, _, path = file.partition("/")
        for version in versions:
            tag = f"v{version}" if module == "kubernetes" else f"v0.{version.partition('.')[2]}"
            source = modules / "k8s.io" / f"{module}@{tag}" / path
            if not source.exists() or form not in source.read_text():
                missing.append(f"{source}: {form}")
    return missing


if __name__ == "__main__":
    problems = missing_formats(Path(sys.argv[1]))
    print("\n".join(problems) or f"all formats of {', '.join(VERSIONS)} are in the sources")
    sys.exit(bool(problems))
