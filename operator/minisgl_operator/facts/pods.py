"""The state of one pod, as the scheduler and the kubelet report it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from minisgl_operator.api.objects import Manifest, condition_of, parse_time
from minisgl_operator.render import names

# A container in one of these states has never run, or keeps terminating.
_FAILED_WAITING_REASONS: Final = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImageInspectError",
        "ImagePullBackOff",
        "InvalidImageName",
        "PostStartHookError",
        "PreCreateHookError",
        "PreStartHookError",
        "RegistryUnavailable",
        "RunContainerError",
        "SignatureValidationFailed",
    }
)

_READINESS_LAG: Final = timedelta(minutes=1)
"""Longest time from the end of a container until the kubelet has reported its pod as not ready."""


def component(manifest: Manifest) -> str | None:
    """`engine`, `frontend` or `fetch`, from the labels."""
    return (manifest["metadata"].get("labels") or {}).get(names.COMPONENT_LABEL)


def replica_name(pod: Manifest) -> str | None:
    """The replica that an engine pod belongs to."""
    return (pod["metadata"].get("labels") or {}).get(names.REPLICA_LABEL)


def revision_of(labelled: Mapping[str, Any]) -> str | None:
    """The revision in the labels of a pod, a Job or a pod template."""
    found = (labelled["metadata"].get("labels") or {}).get(names.REVISION_LABEL)
    return None if found is None else str(found)


def node_of(pod: Manifest) -> str | None:
    """The node that the pod is bound to."""
    return (pod.get("spec") or {}).get("nodeName")


def containers(pod: Manifest) -> tuple[Mapping[str, Any], ...]:
    """Statuses of the pod's containers; empty until the kubelet has reported them."""
    return tuple((pod.get("status") or {}).get("containerStatuses") or ())


def init_containers(pod: Manifest) -> tuple[Mapping[str, Any], ...]:
    """Statuses of the pod's init containers, all of which others have added: sidecars and what admission injects."""
    return tuple((pod.get("status") or {}).get("initContainerStatuses") or ())


def added_container(pod: Manifest, container: Mapping[str, Any]) -> str:
    """The name of a container that is not the operator's; "" for its own one, which has the name of the component."""
    name = str(container.get("name") or "")
    return "" if name == component(pod) else name


def failing_container(pod: Manifest) -> Mapping[str, Any] | None:
    """The first container that cannot start or keeps terminating. Init containers come first: others wait for them."""
    found = (*init_containers(pod), *containers(pod))
    return next((each for each in found if _waiting_reason(each) in _FAILED_WAITING_REASONS), None)


def waiting_reason(pod: Manifest) -> str:
    """The reason why a container waits, one that cannot start first; "" without one."""
    failing = failing_container(pod)
    waiting = containers(pod) if failing is None else (failing,)
    return next((reason for each in waiting if (reason := _waiting_reason(each))), "")


def _waiting_reason(container: Mapping[str, Any]) -> str:
    return str(((container.get("state") or {}).get("waiting") or {}).get("reason") or "")


def is_unschedulable(pod: Manifest) -> bool:
    found = condition_of(pod, "PodScheduled")
    return found is not None and found["status"] == "False" and found.get("reason") == "Unschedulable"


def is_ended_by_node(pod: Manifest) -> bool:
    """True if a kubelet has refused the pod or ended it. Such a pod never runs again."""
    status = pod.get("status") or {}
    return status.get("phase") == "Failed" and bool(status.get("reason"))


def cannot_run(pod: Manifest) -> bool:
    """True if the pod is unschedulable, or a container cannot start or keeps terminating."""
    return failing_container(pod) is not None or is_unschedulable(pod)


def containers_started(pod: Manifest) -> bool:
    """True if all containers run and have passed their startup probe."""
    found = containers(pod)
    return bool(found) and all(container.get("started") for container in found)


def containers_run(pod: Manifest) -> bool:
    """True if a container runs, whether it has started or not."""
    return any((container.get("state") or {}).get("running") is not None for container in containers(pod))


def last_terminations(pod: Manifest) -> tuple[Mapping[str, Any], ...]:
    """The last termination of each container that has terminated, that of one that keeps terminating first. Init
    containers that have done their work do not count."""
    failing, found = failing_container(pod), []
    others = [each for each in (*init_containers(pod), *containers(pod)) if each is not failing]
    for container in (*(() if failing is None else (failing,)), *others):
        states = (container.get("state") or {}, container.get("lastState") or {})
        ended = next((state["terminated"] for state in states if state.get("terminated") is not None), None)
        if ended is not None and (ended.get("exitCode") != 0 or container not in init_containers(pod)):
            found.append(ended)
    return tuple(found)


def lost_process(pod: Manifest) -> bool:
    """True if a container has exited with an error, and the pod has not been ready since: then it stopped being ready
    because of that exit, or was not ready before."""
    stamp = (condition_of(pod, "Ready") or {}).get("lastTransitionTime")
    changed = None if stamp is None else parse_time(stamp)
    for ended in last_terminations(pod):
        finished = ended.get("finishedAt")
        is_old = changed is not None and finished is not None and parse_time(finished) + _READINESS_LAG < changed
        if ended.get("exitCode") != 0 and not is_old:
            return True
    return False


def has_rank_0(pod: Manifest) -> bool:
    """True for pod 0 of a replica. It is ready when all ranks serve; a member pod is ready once it has joined pod 0."""
    return bool(pod["metadata"]["labels"].get(names.POD_INDEX_LABEL) == "0")


def serves_status(pod: Manifest) -> bool:
    """True if the pod runs and has something to report: of an engine replica only the pod with rank 0."""
    if (pod.get("status") or {}).get("phase") != "Running":
        return False
    return component(pod) != names.ENGINE or has_rank_0(pod)


_MESSAGE: Final = re.compile(r": error: unrecognized arguments: (.+?)(?: \(see |$)", re.MULTILINE)


def unknown_flags(output: str) -> str:
    """The arguments that a command has refused, as in an image of an earlier version, from its last output; empty
    without any."""
    found = _MESSAGE.search(output)
    return "" if found is None else found.group(1)
