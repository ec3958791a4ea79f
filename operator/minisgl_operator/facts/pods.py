"""The state of one pod, as the scheduler and the kubelet report it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from minisgl_operator.api.objects import Manifest, condition_of
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
        "RunContainerError",
    }
)


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


def waiting_reason(pod: Manifest) -> str:
    """The reason why the first waiting container waits; "" without one."""
    for container in containers(pod):
        waiting = (container.get("state") or {}).get("waiting")
        if waiting is not None:
            return str(waiting.get("reason") or "")
    return ""


def is_unschedulable(pod: Manifest) -> bool:
    found = condition_of(pod, "PodScheduled")
    return found is not None and found["status"] == "False" and found.get("reason") == "Unschedulable"


def cannot_run(pod: Manifest) -> bool:
    """True if the pod is unschedulable, or a container cannot start or keeps terminating."""
    return waiting_reason(pod) in _FAILED_WAITING_REASONS or is_unschedulable(pod)


def containers_started(pod: Manifest) -> bool:
    """True if all containers run and have passed their startup probe."""
    found = containers(pod)
    return bool(found) and all(container.get("started") for container in found)


def last_terminations(pod: Manifest) -> tuple[Mapping[str, Any], ...]:
    """The last termination of each container that has terminated."""
    found = []
    for container in containers(pod):
        states = (container.get("state") or {}, container.get("lastState") or {})
        ended = next((state["terminated"] for state in states if state.get("terminated") is not None), None)
        if ended is not None:
            found.append(ended)
    return tuple(found)


def has_rank_0(pod: Manifest) -> bool:
    """True for pod 0 of a replica. It is ready when all ranks serve; a member pod is ready once it has joined pod 0."""
    return bool(pod["metadata"]["labels"].get(names.POD_INDEX_LABEL) == "0")


def serves_status(pod: Manifest) -> bool:
    """True if the pod runs and has something to report: of an engine replica only the pod with rank 0."""
    if (pod.get("status") or {}).get("phase") != "Running":
        return False
    return component(pod) != names.ENGINE or has_rank_0(pod)
