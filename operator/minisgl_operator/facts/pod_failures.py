"""Reasons why pods cannot be created, scheduled, set up or kept running, from the messages of Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from minisgl_operator.api.conditions import Reason
from minisgl_operator.api.objects import Manifest, condition_of
from minisgl_operator.api.text import quote
from minisgl_operator.api.types import EngineSpec
from minisgl_operator.facts.observed import ObjectEvent
from minisgl_operator.facts.pods import added_container, component, containers, init_containers, is_unschedulable
from minisgl_operator.render import names

_NO_DEVICES: Final = "cannot allocate all claims"
"""What the scheduler says where free devices are missing for a resource claim."""
_IMAGE_REASONS: Final = frozenset(
    {
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImageInspectError",
        "ImagePullBackOff",
        "InvalidImageName",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
_START_REASONS: Final = frozenset(
    {"CreateContainerError", "PostStartHookError", "PreCreateHookError", "PreStartHookError", "RunContainerError"}
)

_MISSING_OBJECT: Final = re.compile(r"\b(secret|configmap) \"([^\"]+)\" not found", re.IGNORECASE)
_MISSING_KEY: Final = re.compile(r"couldn't find key (\S+) in (Secret|ConfigMap) \S*?([^/\s]+)$")
_MISSING_MOUNTED_KEY: Final = re.compile(
    r"volume \"([^\"]+)\" : (?:configmap )?references non-existent (secret|config) key: (\S+)"
)
_ATTACHED_VOLUME: Final = re.compile(r"for volume \"([^\"]+)\"")
_MISSING_PVC: Final = re.compile(r"persistentvolumeclaim \"([^\"]+)\" (not found|is being deleted)")
_LOST_PVC: Final = re.compile(r"persistentvolumeclaim \"([^\"]+)\" bound to non-existent persistentvolume \"([^\"]*)\"")
_PULLED_IMAGE: Final = re.compile(r"image \"([^\"]+)\"")
_QUOTA: Final = re.compile(r"exceeded quota: .*")
_REQUIRED_BY_QUOTA: Final = re.compile(r"failed quota: ([^:]+): must specify (.*)")
# Such as `limits.cpu for: engine,frontend`; several of these are separated by semicolons.
_REQUIRED_FIELD: Final = re.compile(r"([^\s;]+) for: ([^;]+)")
_INVALID: Final = re.compile(r"Pod \"([^\"]+)\" is invalid: (.*)")
_ABOVE_LIMIT: Final = re.compile(r"\.requests: Invalid value: \S+: must be less than or equal to (\S+) limit of")
# Names that controllers give to pods, whose ends are short.
_COMPONENT_OF_NAME: Final = {
    names.ENGINE: re.compile(r"-r\d+-\d+$"),
    names.FETCH: re.compile(r"-fetch-[0-9a-f]{16}-[^-]*$"),
    names.FRONTEND: re.compile(r"-frontend-[^-]+-[^-]*$"),
}
_NOT_FOUND: Final = {"Secret": Reason.SECRET_NOT_FOUND, "ConfigMap": Reason.CONFIG_MAP_NOT_FOUND}
_FORBIDDEN: Final = re.compile(r"is forbidden: (.*)")
_WEBHOOK_DOWN: Final = re.compile(r"failed calling webhook \"([^\"]+)\": .*")
_DENIED: Final = re.compile(r"admission webhook .* denied the request.*")


@dataclass(frozen=True)
class PodFailure:
    """`reason` is that of the condition which the failure makes False; the condition's file in status/ has the text.

    `message` quotes Kubernetes; for an image it is the container's, and for missing fields it lists them. `pod` is None
    when the failure is not about one pod. `subject` is the image that cannot be pulled, the object that is missing, the
    one that lacks `key`, the webhook that does not answer, the claim without its volume, the quota that requires
    fields, or the field with a request above the limit. `container`: the one that cannot start, if the operator does
    not set it.
    """

    reason: Reason
    message: str = ""
    pod: Manifest | None = None
    subject: str = ""
    key: str = ""
    container: str = ""


def failure_of_pod(pod: Manifest, events: Iterable[ObjectEvent], engine: EngineSpec) -> PodFailure | None:
    """The failure that keeps the pod from running; None without one so far."""
    if is_unschedulable(pod):
        return _scheduling(pod, engine)
    for container in (*init_containers(pod), *containers(pod)):
        waiting = (container.get("state") or {}).get("waiting")
        if waiting is None:
            continue
        reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
        added = added_container(pod, container)
        if reason in _IMAGE_REASONS:
            pulled = _PULLED_IMAGE.search(message)
            image = str(container.get("image") or "")
            subject = pulled.group(1) if pulled else image
            return PodFailure(Reason.IMAGE_PULL_FAILED, image, pod, subject, container=added)
        if reason == "CreateContainerConfigError":
            return _missing_reference(message) or _not_started(pod, message, added)
        if reason in _START_REASONS:
            return _not_started(pod, message, added)
        if reason == "CrashLoopBackOff" and component(pod) == names.FRONTEND:
            return PodFailure(Reason.CRASHED, message, pod)
        if reason == "ContainerCreating" and (problem := _volume_problem(events)):
            return _missing_reference(problem) or _not_started(pod, problem)
    return None


def _volume_problem(events: Iterable[ObjectEvent]) -> str:
    """The newest problem with a pod's volumes; empty without one. One that cannot be attached to the node is reported
    once, and then the kubelet says again and again that it waits for it: the former tells the cause."""
    not_attached: dict[str, str] = {}
    mount = ""
    for event in events:
        found = _ATTACHED_VOLUME.search(event.message)
        volume = found.group(1) if found else ""
        match event.reason:
            case "FailedAttachVolume":
                not_attached.pop(volume, None)
                not_attached[volume] = event.message
            case "SuccessfulAttachVolume" if volume:
                not_attached.pop(volume, None)
            case "SuccessfulAttachVolume":
                not_attached.clear()
            case "FailedMount":
                mount = event.message
    return next(reversed(not_attached.values()), mount)


def creation_failure(messages: Iterable[str]) -> PodFailure | None:
    """The failure that keeps pods from being created, from messages of their controllers and the API server."""
    messages = tuple(messages)
    if found := _fields_required_by_quota(messages):
        return found
    for message in messages:
        if quota := _QUOTA.search(message):
            return PodFailure(Reason.QUOTA_EXCEEDED, quote(quota.group()))
        if forbidden := _FORBIDDEN.search(message):
            return PodFailure(Reason.POD_REFUSED, quote(forbidden.group(1)))
        if invalid := _INVALID.search(message):
            pod, problem = invalid.groups()
            return PodFailure(Reason.POD_REFUSED, quote(problem), subject=_request_above_limit(pod, problem))
        if webhook := unavailable_webhook(message):
            name, problem = webhook
            return PodFailure(Reason.WEBHOOK_UNAVAILABLE, problem, subject=name)
        if denied := _DENIED.search(message):
            return PodFailure(Reason.POD_REFUSED, quote(denied.group()))
    return None


def unavailable_webhook(message: str) -> tuple[str, str] | None:
    """The webhook without whose answer the API server creates and changes nothing, and the problem in the API server's
    words; None if `message` says nothing of the kind."""
    found = _WEBHOOK_DOWN.search(message)
    return None if found is None else (found.group(1), quote(found.group()))


def refusal_of(stateful_set: Manifest, pods: int, events: Iterable[ObjectEvent]) -> PodFailure | None:
    """The failure that keeps the missing pods of a StatefulSet from being created; None if it lacks none. `pods`:
    number of those that exist."""
    failed = [event.message for event in events if event.reason == "FailedCreate"]
    return creation_failure(failed[-1:]) if pods < int(stateful_set["spec"]["replicas"]) else None


def _request_above_limit(pod: str, problem: str) -> str:
    """The spec's field with a request that a LimitRange does not allow; empty for other problems. `pod` is its name."""
    above = _ABOVE_LIMIT.search(problem)
    part = next((part for part, name in _COMPONENT_OF_NAME.items() if name.search(pod)), None)
    return f"spec.{part}.resources.requests.{above.group(1)}" if above and part else ""


def _fields_required_by_quota(messages: Iterable[str]) -> PodFailure | None:
    """The fields that a ResourceQuota requires of containers, which have the names of the spec's sections. The messages
    of all controllers are read: each names the fields of its own pods only."""
    quota, fields = "", set()
    for message in messages:
        if found := _REQUIRED_BY_QUOTA.search(message):
            quota = found.group(1)
            for resource, containers in _REQUIRED_FIELD.findall(found.group(2)):
                fields |= {f"spec.{container.strip()}.resources.{resource}" for container in containers.split(",")}
    return PodFailure(Reason.FIELDS_REQUIRED, ", ".join(sorted(fields)), subject=quota) if fields else None


def _scheduling(pod: Manifest, engine: EngineSpec) -> PodFailure:
    found = condition_of(pod, "PodScheduled")
    assert found is not None
    # The rest of the message lists possible evictions, and changes from attempt to attempt.
    text = quote(str(found.get("message") or "").split(" preemption:")[0])
    if lost := _LOST_PVC.search(text):
        return PodFailure(Reason.CLAIM_LOST, lost.group(2), subject=lost.group(1))
    if pvc := _MISSING_PVC.search(text):
        return PodFailure(Reason.CLAIM_NOT_FOUND, pvc.group(2), subject=f'PersistentVolumeClaim "{pvc.group(1)}"')
    short_of_gpus = (_NO_DEVICES if engine.claims_gpus else f"Insufficient {engine.gpu_resource_name}") in text
    return PodFailure(Reason.INSUFFICIENT_GPU if short_of_gpus else Reason.UNSCHEDULABLE, text, pod)


def _not_started(pod: Manifest, message: str, container: str = "") -> PodFailure:
    return PodFailure(Reason.POD_NOT_STARTED, quote(message), pod, container=container)


def _missing_reference(message: str) -> PodFailure | None:
    """The Secret or ConfigMap that a pod refers to and that does not exist, or lacks a key."""
    if found := _MISSING_OBJECT.search(message):
        kind = "Secret" if found.group(1).lower() == "secret" else "ConfigMap"
        return PodFailure(_NOT_FOUND[kind], subject=f'{kind} "{found.group(2)}"')
    if found := _MISSING_KEY.search(message):
        key, kind, name = found.groups()
        return PodFailure(_NOT_FOUND[kind], subject=f'{kind} "{name}"', key=key)
    if found := _MISSING_MOUNTED_KEY.search(message):
        volume, object, key = found.groups()
        kind = "Secret" if object == "secret" else "ConfigMap"
        subject = "The Secret with the API keys" if volume == names.KEYS_VOLUME else f'The {kind} of volume "{volume}"'
        return PodFailure(_NOT_FOUND[kind], subject=subject, key=key)
    return None
