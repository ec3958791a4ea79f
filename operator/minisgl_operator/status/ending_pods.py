"""Conditions about deleted pods that do not terminate."""

from __future__ import annotations

from collections.abc import Iterable

from minisgl_operator.api.conditions import Reason
from minisgl_operator.api.objects import Manifest
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.lost_nodes import FORCE_DELETE_AFTER, NODE_LOST_AFTER, Ending, finalizers
from minisgl_operator.facts.pods import component, node_of, replica_name
from minisgl_operator.render import names
from minisgl_operator.status.condition import Condition

_GRACE = f"{FORCE_DELETE_AFTER.total_seconds():.0f} s"
_LOST = f"{NODE_LOST_AFTER.total_seconds():.0f} s"
_CLAIM = (
    "It may still write to the claim, so it is not deleted by force, and no other fetch starts before it has ended."
)
NO_NODES = (
    "The operator cannot read nodes, so it does not know whether this one is lost: allow it get, list and watch of "
    "nodes, which is the chart's value nodes.read."
)


def ending_pod(facts: Facts, pods: Iterable[Manifest]) -> Condition | None:
    """The condition of the first deleted pod that does not terminate; None if all of them may still do so in time."""
    for pod in pods:
        if (ending := facts.ending(pod)) is not None:
            return _condition(pod, ending, _successor(facts, pod))
    return None


def _successor(facts: Facts, pod: Manifest) -> str:
    """Advice on how to get another replica without the devices of this pod; empty for pods that no wanted replica
    needs. A replica whose StatefulSet is being deleted no longer counts, and its pods keep their devices until they
    end. In the background it would be gone before its other pods are deleted, and be created again for them."""
    name = replica_name(pod)
    wanted = (each for each in facts.replicas if each.stateful_set is not None and not each.being_removed)
    if all(each.name != name for each in wanted):
        return ""
    command = f"kubectl delete statefulset {name} --cascade=foreground --wait=false"
    return f" To serve elsewhere meanwhile, run `{command}`: another replica is created."


def _kept_message(pod: Manifest) -> str:
    """A pod that has ended, and that its finalizers keep."""
    name, kept = pod["metadata"]["name"], ", ".join(finalizers(pod))
    return (
        f"Pod {name} was deleted and has ended, but its finalizers keep it: {kept}. The controller that set them has "
        "not removed them: see its state and its log. If it is gone for good, remove them: "
        f"`kubectl patch pod {name} --type=merge -p '{{\"metadata\":{{\"finalizers\":null}}}}'`. Until then no pod of "
        "this name can be created."
    )


def _condition(pod: Manifest, ending: Ending, successor: str) -> Condition:
    """`successor`: advice after that for a pod on a live node."""
    name, node = pod["metadata"]["name"], node_of(pod)
    fetches = component(pod) == names.FETCH
    use = _CLAIM if fetches else "Its devices may be in use, so it is not deleted by force."
    match ending:
        case "finalizer":
            return Condition("False", Reason.POD_NOT_TERMINATING, _kept_message(pod))
        case "lost":
            effect = (
                f"{use} Bring the node back, or run `kubectl delete node {node}` if it is off permanently."
                if fetches
                else f"{_GRACE} after its deletion the pod is deleted by force, so that another node can run it. See "
                f"`kubectl describe node {node}`."
            )
            message = (
                f"Pod {name} was deleted, and its node {node} is lost: it does not exist, its kubelet has been silent "
                f"for {_LOST}, or it is tainted as out of service and not ready. {effect}"
            )
            return Condition("False", Reason.NODE_LOST, message)
        case "silent":
            effect = use if fetches else f"The pod is deleted by force once that has lasted for {_LOST}."
            message = (
                f"Pod {name} was deleted, and the kubelet of its node {node} is silent (Ready is Unknown). {effect} If "
                f"the node is off permanently, run `kubectl delete node {node}`."
            )
            return Condition("False", Reason.NODE_LOST, message)
        case "not ready":
            cause = (
                f", which is not ready but whose kubelet runs, has not ended it within {_GRACE} after its grace period."
            )
            # No remedy for a machine that is off: its Ready becomes Unknown soon, which has a message of its own.
            advice = (
                f"{use} See the condition Ready in `kubectl describe node {node}`, and restart the kubelet or the node."
                f"{successor}"
            )
        case "hangs":
            cause = f", which is ready, has not ended it within {_GRACE} after its grace period."
            advice = (
                f"{use} See the kubelet's log on the node; restart the node if a process of the pod cannot be killed."
                f"{successor}"
            )
        case "unknown":
            cause = f" has not confirmed its end within {_GRACE} after its grace period."
            advice = (
                f"{NO_NODES} If the node is off, run `kubectl delete node {node}`; if it runs, see its kubelet's log."
            )
            if fetches:
                advice = f"{use} {advice}"
    return Condition("False", Reason.POD_NOT_TERMINATING, f"Pod {name} was deleted, but node {node}{cause} {advice}")
