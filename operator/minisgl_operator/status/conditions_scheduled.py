"""Scheduled: whether all pods that were created are on nodes, with their images and volumes."""

from __future__ import annotations

import re
from typing import Final

from minisgl_operator.api.conditions import Reason
from minisgl_operator.api.objects import Manifest
from minisgl_operator.api.types import InferenceModelSpec, ModelSpec
from minisgl_operator.facts.ended_pods import EndedPod
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.pod_failures import PodFailure
from minisgl_operator.facts.pods import component, node_of
from minisgl_operator.facts.replicas import Replica
from minisgl_operator.facts.rollout.gang import PARTIAL_START_TIMEOUT, exceeded_quota
from minisgl_operator.render import names, single_node
from minisgl_operator.status.condition import Condition, not_ours, pod_title, webhook_unavailable

# Kubernetes 1.33 begins the message with Multi-Attach error, 1.36 with Waiting for detach.
_ATTACHED_ELSEWHERE: Final = re.compile(r"Volume is already (exclusively attached|used by)")
_UNPLACED: Final = (Reason.INSUFFICIENT_GPU, Reason.UNSCHEDULABLE)
_RAISE_QUOTA: Final = "Raise the ResourceQuota, or request less in the spec."
_MOST_COUNTED: Final = 9
# What to do, by the reason with which a kubelet fails a pod. Resources give some of them their names.
_ADVICE: Final = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (
            r"UnexpectedAdmissionError$",
            "The kubelet could not allocate the pod's devices: see `kubectl describe node {node}` and the device "
            "plugin's pod there, which may have restarted or may report a device as unhealthy; `kubectl cordon {node}` "
            "lets the pod run elsewhere.",
        ),
        (
            r"OutOf",
            "The node has less free than the scheduler assumed, such as beside static pods or after a device was lost: "
            "see Allocatable in `kubectl describe node {node}`.",
        ),
        (
            r"(NodeShutdown|Terminated|Shutdown)$",
            "The node shuts down. Its pods run on other nodes, or when it is back: add a node if none has room.",
        ),
        (
            r"Preempting$",
            "The kubelet made room for a critical pod of the node: give the node more room, or set a priorityClassName "
            "in the spec.",
        ),
        (
            r"Evicted$",
            "The node ran short of what the message names: request as much as the pods use, or make room on {node}.",
        ),
        (
            r"Node(Affinity|Ports|Name)$|.*Selector",
            "The node does not match the pod any more, as after a change of its labels: see "
            "`kubectl describe node {node}`.",
        ),
        (
            r"(TopologyAffinity|SMTAlignment)",
            "The node's topology or CPU manager cannot align the devices and CPUs that the pod requests: change the "
            "requests, or the policy of the kubelet.",
        ),
    )
)
_OTHER_ADVICE: Final = "See `kubectl describe node {node}` and the kubelet's log there."


def scheduled(facts: Facts) -> Condition:
    failure = facts.pod_failure(
        Reason.NO_STORAGE_CLASS,
        Reason.CLAIM_LOST,
        Reason.INSUFFICIENT_GPU,
        Reason.UNSCHEDULABLE,
        Reason.IMAGE_PULL_FAILED,
        Reason.POD_NOT_STARTED,
        Reason.QUOTA_EXCEEDED,
        Reason.FIELDS_REQUIRED,
        Reason.POD_REFUSED,
        Reason.WEBHOOK_UNAVAILABLE,
    )
    if failure is not None and failure.reason is Reason.WEBHOOK_UNAVAILABLE:
        return webhook_unavailable("creates no pods", failure.subject, failure.message)
    if failure is not None:
        return Condition("False", failure.reason, _message(facts, failure))
    if facts.ended_pods:
        return Condition("False", Reason.POD_ENDED_BY_NODE, _ended_message(facts.ended_pods))
    if (paused := facts.gang.paused) is not None:
        return _paused(facts, paused)
    for replica in facts.replicas:
        if sum(bool(node_of(pod)) for pod in replica.pods) < replica.size:
            return Condition("False", Reason.PENDING, f"Pods of {replica.name} wait for a node.{_gates(replica)}")
    return Condition("True", Reason.SCHEDULED, "All pods that were created are on nodes.")


def _paused(facts: Facts, replica: Replica) -> Condition:
    """A replica whose pods were removed for a while, as not all of them got nodes."""
    removed = "All were removed, so that others can use their GPUs, and are created again after a pause."
    if quota := exceeded_quota(replica):
        message = (
            f"The namespace's quota leaves no room for all {facts.gang.pods} pods of {replica.name}: {quota}. "
            f"{removed} {_RAISE_QUOTA}"
        )
        return Condition("False", Reason.QUOTA_EXCEEDED, message)
    message = (
        f"Only some of the {facts.gang.pods} pods of {replica.name} got a node within "
        f"{PARTIAL_START_TIMEOUT.total_seconds():.0f} s. {removed} Free GPUs or add nodes for all of them, or lower "
        "spec.parallelism.tensor."
    )
    return Condition("False", Reason.PARTLY_SCHEDULED, message)


def _gates(replica: Replica) -> str:
    """The scheduling gates of the replica's pods, which a queue removes when it admits them; empty without any."""
    gates = sorted(
        {gate["name"] for pod in replica.pods for gate in (pod.get("spec") or {}).get("schedulingGates") or ()}
    )
    if not gates:
        return ""
    return f" They are held by the scheduling gates {', '.join(gates)} until the queue that set these admits them."


def _ended_message(ended: tuple[EndedPod, ...]) -> str:
    """Pods that ended for the same reason as the first one, and where."""
    first = ended[0]
    same = [each for each in ended if each.reason == first.reason]
    nodes = sorted({each.node for each in same})
    # Names of other pods are generated. Of those, a controller may leave behind any number.
    title = f"Pod {first.name}" if first.component == names.ENGINE else f"A {first.component} pod"
    more = len(same) - 1
    number = str(more) if more < _MOST_COUNTED else f"{_MOST_COUNTED} or more"
    verb = f"and {number} other{'s' if more > 1 else ''} were" if more else "was"
    where = f"node {nodes[0]}" if len(nodes) == 1 else f"{len(nodes)} nodes, such as {nodes[0]}"
    cause = first.message.rstrip(".") or "without a message"
    advice = next((text for reason, text in _ADVICE if reason.match(first.reason)), _OTHER_ADVICE)
    return (
        f"{title} {verb} refused or ended by {where} ({first.reason}): {cause}. {advice.format(node=nodes[0])} Such "
        "pods are created again without further action."
    )


def _message(facts: Facts, failure: PodFailure) -> str:
    if failure.pod is not None:
        return _pod_message(facts, failure, pod_title(failure.pod), component(failure.pod) or "")
    match failure.reason:
        case Reason.NO_STORAGE_CLASS:
            return (
                f'PersistentVolumeClaim "{failure.subject}" gets no volume: {failure.message}. Delete the '
                "InferenceModel and create it again with spec.model.cache.storageClassName set to one that "
                f"`kubectl get storageclass` lists and that offers {facts.model.spec.model.fetch_cache.access_mode}, "
                "or create a PersistentVolume for the claim."
            )
        case Reason.CLAIM_LOST:
            volume = f'PersistentVolume "{failure.message}"' if failure.message else "its PersistentVolume"
            return (
                f'PersistentVolumeClaim "{failure.subject}" is lost: {volume} does not exist any more, and with it its '
                "data. Restore the PersistentVolume, or delete the claim and its pods. The operator creates "
                "its own claim again and fetches the model anew."
            )
        case Reason.QUOTA_EXCEEDED:
            return f"The namespace's quota leaves no room: {failure.message}. {_RAISE_QUOTA}"
        case Reason.FIELDS_REQUIRED:
            return (
                f'ResourceQuota "{failure.subject}" counts resources that the pods do not set: set {failure.message}, '
                "or create a LimitRange with defaults in the namespace."
            )
        case Reason.POD_REFUSED if failure.subject:
            return (
                f"The API server rejects the pods: {failure.message}. The limit may be a LimitRange's: lower "
                f"{failure.subject}, set a limit in the spec, or raise the default of the LimitRange."
            )
    return f"The API server rejects the pods: {failure.message}. Change the spec or the policy of the namespace."


def _pod_message(facts: Facts, failure: PodFailure, pod: str, part: str) -> str:
    claim = single_node.claim(facts.model)
    if claim is not None and part != names.FRONTEND and failure.reason in _UNPLACED:
        return _single_node_message(facts, failure, pod, claim)
    match failure.reason:
        case Reason.INSUFFICIENT_GPU:
            return (
                f"{pod} fits on no node with enough free {_gpus(facts)}. The scheduler "
                f"reports: {failure.message} Free GPUs, add a node, or lower spec.parallelism.gpusPerPod or "
                f"spec.replicas.{_release(facts, failure)}"
            )
        case Reason.UNSCHEDULABLE:
            return (
                f"{pod} fits on no node. The scheduler reports: {failure.message} Change resources, nodeSelector, "
                f"affinity or tolerations in the spec, or the nodes.{_release(facts, failure)}"
            )
        case Reason.IMAGE_PULL_FAILED if failure.container:
            return (
                f'Image "{failure.subject}" cannot be pulled for {pod}. {not_ours(failure.container)} The events of '
                "the pod contain the registry's response."
            )
        case Reason.IMAGE_PULL_FAILED:
            part = "engine" if part == names.ENGINE else "frontend"
            # The image that could not be pulled differs from the container's for an image volume.
            fields = (
                f"spec.{part}.image (or the operator's default), spec.{part}.imagePullSecrets"
                if failure.subject.startswith(failure.message)
                else "spec.model.source.image.reference"
            )
            # The cause alternates with the kubelet's back-off, and would change the message each time.
            return (
                f'Image "{failure.subject}" cannot be pulled for {pod}. Check {fields} and the registry; the events '
                "of the pod contain the registry's response."
            )
    if _ATTACHED_ELSEWHERE.search(failure.message) and (advice := _advice_on_claims(facts.model.spec, part)):
        return f"{pod} cannot start: {failure.message}. {advice}"
    if failure.container:
        return f"{pod} cannot start: {failure.message}. {not_ours(failure.container)}"
    return f"{pod} cannot start: {failure.message}"


def _advice_on_claims(spec: InferenceModelSpec, part: str) -> str:
    """The next step for a pod with a claim whose volume another node has; empty without a claim that may be meant."""
    found = []
    if (field := _access_mode(spec.model)) and part != names.FRONTEND:
        found.append(
            f"If the model's claim is ReadWriteOnce, set {field}: ReadWriteOnce, which holds the pods on one node."
        )
    templates = {
        names.ENGINE: spec.engine.pod_template,
        names.FRONTEND: spec.frontend.pod_template,
        names.FETCH: spec.fetch.pod_template,
    }
    volumes = templates[part].volumes if part in templates else ()
    claims = {each.persistent_volume_claim.claim_name for each in volumes if each.persistent_volume_claim is not None}
    if claims:
        listed = ", ".join(f'"{claim}"' for claim in sorted(claims))
        # Fetch pods have no affinity of their own.
        held = f", or hold the pods on one node by a podAffinity in spec.{part}.affinity"
        found.append(
            f"If a claim of spec.{part}.podTemplate.volumes ({listed}) is ReadWriteOnce, name one that is "
            f"ReadWriteMany{'' if part == names.FETCH else held}."
        )
    return " ".join(found)


def _access_mode(model: ModelSpec) -> str:
    """The field that says that the user's claim with the model is ReadWriteOnce; empty if it says so already, and for
    a claim of the operator's, which has its mode, or without a claim."""
    if model.source.pvc is not None:
        return "spec.model.source.pvc.accessMode" if model.source.pvc.access_mode != "ReadWriteOnce" else ""
    cache = model.cache
    if not model.source.is_remote or cache is None or cache.claim_name is None:
        return ""
    return "spec.model.cache.accessMode" if cache.access_mode != "ReadWriteOnce" else ""


def _single_node_message(facts: Facts, failure: PodFailure, pod: str, claim: str) -> str:
    """A pod that cannot follow the others to the node of their ReadWriteOnce claim."""
    spec = facts.model.spec
    nodes = {node_of(each) for each in facts.observed.pods if _holds_claim(each)} - {None}
    node = f"node {min(map(str, nodes))}, where the claim is in use" if nodes else "one node"
    if spec.engine.device == "cpu":
        needed = "all replicas"
    else:
        gpus = facts.wanted * spec.parallelism.tensor
        needed = f"{facts.wanted} replicas with {gpus} {_gpus(facts)} in all"
    return (
        f'{pod} cannot be placed: PersistentVolumeClaim "{claim}" is ReadWriteOnce, so {needed} must fit on {node}. '
        f"The scheduler reports: {failure.message} Free resources there, use a larger node, lower spec.replicas (to 0, "
        f"to move to another node), or use a claim that is ReadWriteMany.{_release(facts, failure)}"
    )


def _gpus(facts: Facts) -> str:
    engine = facts.model.spec.engine
    return "GPUs for its resource claim" if engine.claims_gpus else engine.gpu_resource_name


def _holds_claim(pod: Manifest) -> bool:
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return component(pod) in (names.ENGINE, names.FETCH) and not ended


def _release(facts: Facts, failure: PodFailure) -> str:
    """Fate of the other pods of the replica, if they have nodes."""
    if facts.gang.is_partly_placed(failure.pod):
        return (
            f" If no other pod of its replica gets a node within {PARTIAL_START_TIMEOUT.total_seconds():.0f} s, all of "
            "them are removed and created again after a pause."
        )
    return ""
