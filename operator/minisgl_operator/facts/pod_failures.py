"""Why a pod does not run, read from what scheduler and kubelet say about it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from minisgl_operator.facts.observed import Manifest, ObjectEvent
from minisgl_operator.facts.replicas import component, condition, containers, unschedulable
from minisgl_operator.render import names
from minisgl_operator.status.conditions import Condition, Kind, Reason, quoted

_IMAGE_REASONS: Final = frozenset({"ErrImageNeverPull", "ErrImagePull", "ImagePullBackOff", "InvalidImageName"})

_MISSING_OBJECT: Final = re.compile(r"\b(secret|configmap) \"([^\"]+)\" not found", re.IGNORECASE)
_MISSING_KEY: Final = re.compile(r"couldn't find key (\S+) in (Secret|ConfigMap) \S*?([^/\s]+)$")
_MISSING_MOUNTED_KEY: Final = re.compile(r"references non-existent secret key: (\S+)")
_MISSING_CLAIM: Final = re.compile(r"persistentvolumeclaim \"([^\"]+)\" (not found|is being deleted)")
_PULLED_IMAGE: Final = re.compile(r"image \"([^\"]+)\"")
_QUOTA: Final = re.compile(r"exceeded quota: .*")
_FORBIDDEN: Final = re.compile(r"is forbidden: (.*)")


def trouble_of(pod: Manifest, events: Iterable[ObjectEvent], gpu_resource: str) -> Condition | None:
    """What keeps a pod from running, as the condition that it makes false; None when nothing is wrong so far."""
    if unschedulable(pod):
        return _scheduling(pod, gpu_resource)
    for container in containers(pod):
        waiting = (container.get("state") or {}).get("waiting")
        if waiting is None:
            continue
        reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
        if reason in _IMAGE_REASONS:
            return _image(pod, container, message)
        if reason == "CreateContainerConfigError":
            return missing_reference(message) or _not_started(pod, message)
        if reason in ("CreateContainerError", "RunContainerError"):
            return _not_started(pod, message)
        if reason == "CrashLoopBackOff" and component(pod) == names.FRONTEND:
            return Condition(Kind.FRONTEND_READY, "False", Reason.CRASHED, crash_text(pod))
        if reason == "ContainerCreating":
            mounts = [event for event in events if event.reason in ("FailedMount", "FailedAttachVolume")]
            if mounts:
                return missing_reference(mounts[-1].message) or _not_started(pod, mounts[-1].message)
    return None


def refused_pods(messages: Iterable[str]) -> Condition | None:
    """Why pods were not even made, from what their controllers say."""
    for message in messages:
        if quota := _QUOTA.search(message):
            return Condition(
                Kind.SCHEDULED,
                "False",
                Reason.QUOTA_EXCEEDED,
                f"The namespace's quota leaves no room: {quoted(quota.group())}. Raise the "
                "ResourceQuota, or ask for less in the spec.",
            )
        if forbidden := _FORBIDDEN.search(message):
            return Condition(
                Kind.SCHEDULED,
                "False",
                Reason.POD_REFUSED,
                f"The API server refuses the pods: {quoted(forbidden.group(1))}. Change what it "
                "names, in the spec or in the policy of the namespace.",
            )
    return None


def missing_reference(message: str) -> Condition | None:
    """A Secret or ConfigMap that a pod needs and that is not there."""
    if found := _MISSING_OBJECT.search(message):
        kind = "Secret" if found.group(1).lower() == "secret" else "ConfigMap"
        return _missing(kind, f'{kind} "{found.group(2)}" does not exist in this namespace: create it')
    if found := _MISSING_KEY.search(message):
        key, kind, name = found.groups()
        return _missing(kind, f'{kind} "{name}" has no key "{key}": add it')
    if found := _MISSING_MOUNTED_KEY.search(message):
        return _missing("Secret", f'The Secret of the API keys has no key "{found.group(1)}": add it')
    return None


def crash_text(pod: Manifest) -> str:
    """Which container of the pod ended, how, and its last words."""
    name = _title(pod)
    for container in containers(pod):
        ended = last_end(container)
        if ended is not None:
            words = quoted(str(ended.get("message") or ""))
            how = f"exit code {ended.get('exitCode')}" + (f" ({ended['reason']})" if ended.get("reason") else "")
            said = f": {words}" if words else ""
            return f"{name} keeps ending with {how}{said}. Its log says more; correct the spec."
    return f"{name} keeps ending. Its log says more; correct the spec."


def last_end(container: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How the container last ended, None when it never did."""
    for state in ("state", "lastState"):
        ended = (container.get(state) or {}).get("terminated")
        if ended is not None:
            return dict(ended)
    return None


def _scheduling(pod: Manifest, gpu_resource: str) -> Condition:
    found = condition(pod, "PodScheduled")
    assert found is not None
    # What would have to be evicted follows, and changes from attempt to attempt.
    text = quoted(str(found.get("message") or "").split(" preemption:")[0])
    if claim := _MISSING_CLAIM.search(text):
        name, what = claim.groups()
        problem = "does not exist in this namespace" if what == "not found" else "is being deleted"
        return Condition(
            Kind.ACCEPTED,
            "False",
            Reason.CLAIM_NOT_FOUND,
            f'PersistentVolumeClaim "{name}" {problem}: create it, or name another one in the spec.',
        )
    if f"Insufficient {gpu_resource}" in text:
        return Condition(
            Kind.SCHEDULED,
            "False",
            Reason.INSUFFICIENT_GPU,
            f"{_title(pod)} finds no node with enough free {gpu_resource}. The scheduler says: {text} Free GPUs, add a "
            "node, or lower spec.parallelism.gpusPerPod or spec.replicas.",
        )
    return Condition(
        Kind.SCHEDULED,
        "False",
        Reason.UNSCHEDULABLE,
        f"{_title(pod)} finds no node. The scheduler says: {text} Change resources, nodeSelector, affinity or "
        "tolerations in the spec, or the nodes.",
    )


def _image(pod: Manifest, container: Mapping[str, Any], message: str) -> Condition:
    asked = str(container.get("image") or "")
    pulled = _PULLED_IMAGE.search(message)
    image = pulled.group(1) if pulled else asked
    part = "engine" if component(pod) == names.ENGINE else "frontend"
    if not image.startswith(asked):
        fields = "spec.model.source.image.reference"
    else:
        fields = f"spec.{part}.image (or the operator's default), spec.{part}.imagePullSecrets"
    # The cause alternates with the kubelet's back-off, and would make the message flicker.
    return Condition(
        Kind.SCHEDULED,
        "False",
        Reason.IMAGE_PULL_FAILED,
        f'Image "{image}" cannot be pulled for {_title(pod)}. Check {fields} and the registry; the events of the pod '
        "have the registry's answer.",
    )


def _not_started(pod: Manifest, message: str) -> Condition:
    return Condition(
        Kind.SCHEDULED,
        "False",
        Reason.POD_NOT_STARTED,
        f"{_title(pod)} cannot start: {quoted(message)}",
    )


def _missing(kind: str, text: str) -> Condition:
    reason = Reason.SECRET_NOT_FOUND if kind == "Secret" else Reason.CONFIG_MAP_NOT_FOUND
    return Condition(Kind.ACCEPTED, "False", reason, f"{text}, or name another one in the spec.")


def _title(pod: Manifest) -> str:
    """Names of a replica's pods are fixed. Others are generated, and would make the message flicker."""
    part = component(pod)
    return f"Pod {pod['metadata']['name']}" if part == names.ENGINE else f"A {part} pod"
