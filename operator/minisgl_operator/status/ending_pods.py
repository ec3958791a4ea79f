"""Conditions about deleted pods that do not terminate."""

from __future__ import annotations

from collections.abc import Iterable

from minisgl_operator.api.conditions import Reason
from minisgl_operator.api.objects import Manifest
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.lost_nodes import FORCE_DELETE_AFTER, NODE_LOST_AFTER, Ending
from minisgl_operator.facts.pods import node_of
from minisgl_operator.status.condition import Condition

_GRACE = f"{FORCE_DELETE_AFTER.total_seconds():.0f} s"
_LOST = f"{NODE_LOST_AFTER.total_seconds():.0f} s"
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
NO_NODES = (
    "The operator cannot read nodes, so it does not know whether this one is lost: allow it get, list and watch of "
    "nodes, which is the chart's value nodes.read."
)


def ending_pod(facts: Facts, pods: Iterable[Manifest]) -> Condition | None:
    """The condition of the first deleted pod that does not terminate; None if all of them may still do so in time."""
    for pod in pods:
        if (ending := facts.ending(pod)) is not None:
            return _condition(str(pod["metadata"]["name"]), str(node_of(pod)), ending)
    return None


def _condition(pod: str, node: str, ending: Ending) -> Condition:
    match ending:
        case "lost":
            message = (
                f"Pod {pod} was deleted, and its node {node} is lost: it does not exist, its kubelet has been silent "
                f"for {_LOST}, or it is tainted as out of service. {_GRACE} after its deletion the pod is deleted by "
                f"force, so that another node can run it. See `kubectl describe node {node}`."
            )
            return Condition("False", Reason.NODE_LOST, message)
        case "silent":
            message = (
                f"Pod {pod} was deleted, and the kubelet of its node {node} is silent (Ready is Unknown). The pod is "
                f"deleted by force once that has lasted for {_LOST}. If the node is off permanently, run "
                f"`kubectl delete node {node}`."
            )
            return Condition("False", Reason.NODE_LOST, message)
        case "not ready":
            cause = (
                f", which is not ready but whose kubelet runs, has not ended it within {_GRACE} after its grace period."
            )
            advice = (
                "Its devices may be in use, so it is not deleted by force. See the condition Ready in "
                f"`kubectl describe node {node}`, and restart the kubelet or the node. If the machine is off, run "
                f"`kubectl taint node {node} {_OUT_OF_SERVICE}`."
            )
        case "hangs":
            cause = f", which is ready, has not ended it within {_GRACE} after its grace period."
            advice = (
                "Its devices may be in use, so it is not deleted by force. See the kubelet's log on the node; restart "
                "the node if a process of the pod cannot be killed."
            )
        case "unknown":
            cause = f" has not confirmed its end within {_GRACE} after its grace period."
            advice = (
                f"{NO_NODES} If the node is off, run `kubectl delete node {node}`; if it runs, see its kubelet's log."
            )
    return Condition("False", Reason.POD_NOT_TERMINATING, f"Pod {pod} was deleted, but node {node}{cause} {advice}")
