"""From facts to conditions: one function for each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from minisgl_operator.facts.facts import Facts, cannot_grow
from minisgl_operator.facts.observed import Ref
from minisgl_operator.plan.plan import awaited_by_rollout, replaceable
from minisgl_operator.render import model_files, names
from minisgl_operator.status.conditions import Condition, Kind, Reason, quoted
from minisgl_operator.status.conditions_engine import asleep, engine_ready, refused

# What admission refuses, be it a LimitRange or a policy, is Forbidden too, and is no matter of the operator's role.
_LACKS_A_RIGHT: Final = re.compile(r'User ".*" cannot |cannot set blockOwnerDeletion|role lacks the verb')

_FETCH_REMEDIES: Final[Mapping[str, tuple[Reason, str]]] = {
    "AuthRequired": (
        Reason.AUTH_REQUIRED,
        "The Hub wants a token that may read it: accept the licence on the model's page, and name a Secret with a "
        "valid token in spec.model.source.huggingFace.tokenSecretRef.",
    ),
    "NotFound": (
        Reason.NOT_FOUND,
        "There is no such repository or revision, or it is private: correct spec.model.source.huggingFace, or give it "
        "a tokenSecretRef.",
    ),
    "RateLimited": (
        Reason.RATE_LIMITED,
        "The Hub asks for fewer requests (429): it goes on by itself; a token in tokenSecretRef raises the limit.",
    ),
    "NoSpace": (
        Reason.NO_SPACE,
        "The claim of the cache is full: make room on it, or raise spec.model.cache.size, which makes the claim grow "
        "where its StorageClass allows that.",
    ),
    "Unreachable": (
        Reason.HUB_UNREACHABLE,
        "The Hub does not answer: check spec.model.source.huggingFace.endpoint and that pods may reach it.",
    ),
}


def verdicts(facts: Facts) -> tuple[Condition, ...]:
    """All conditions, in the order of `Kind`."""
    first = (accepted(facts), model_cached(facts), scheduled(facts), engine_ready(facts), frontend_ready(facts))
    return (*first, ready(facts, first), progressing(facts), degraded(facts), interconnect_optimal(facts))


def accepted(facts: Facts) -> Condition:
    """Whether the spec can be served at all, as far as only the cluster can tell."""
    for ref, owner in sorted(facts.conflicts.items()):
        message = (
            f'{ref.kind} "{ref.name}" is there already and is not ours ({owner}). Delete it, or give the '
            "InferenceModel another name."
        )
        return Condition(Kind.ACCEPTED, "False", Reason.CONFLICT, message)
    for refusal in facts.outcome.refusals:
        said = quoted(refusal.message)
        if refusal.reason == Reason.NAMESPACE_TERMINATING.value:
            message = "The namespace is being deleted, and this InferenceModel with it."
            return Condition(Kind.ACCEPTED, "False", Reason.NAMESPACE_TERMINATING, message)
        if refusal.ref.kind == "PersistentVolumeClaim" and "can be resized" in refusal.message:
            return cannot_grow(refusal.ref.name, refusal.message)
        if refusal.status == 403 and _LACKS_A_RIGHT.search(refusal.message):
            message = f"The operator lacks a right on {refusal.ref.kind}: {said}. Give its role what is missing."
            return Condition(Kind.ACCEPTED, "False", Reason.FORBIDDEN, message)
        if refusal.status == 403 and "exceeded quota" not in refusal.message:
            message = (
                f"A rule of the cluster or of the namespace refuses {refusal.ref}: {said}. Change what it names, in "
                "the spec or in that rule."
            )
            return Condition(Kind.ACCEPTED, "False", Reason.REJECTED, message)
        if refusal.status in (400, 422):
            message = f"The API server refuses {refusal.ref}: {said}. Correct the field of the spec that it comes from."
            return Condition(Kind.ACCEPTED, "False", Reason.REJECTED, message)
    for replica in facts.replicas:
        if (found := refused(facts, replica)) is not None:
            return Condition(Kind.ACCEPTED, "False", *found)
    return facts.trouble(Kind.ACCEPTED) or Condition(Kind.ACCEPTED, "True", Reason.ACCEPTED, "The spec is valid.")


def model_cached(facts: Facts) -> Condition:
    """Whether engines can read the model's files."""
    if facts.fetch is None:
        message = f"{facts.title} is mounted as it is."
        return Condition(Kind.MODEL_CACHED, "True", Reason.NOT_NEEDED, message)
    what, claim = facts.title, model_files.cache_claim(facts.model)
    if facts.cached:
        return Condition(Kind.MODEL_CACHED, "True", Reason.CACHED, f'{what} is on PersistentVolumeClaim "{claim}".')
    if (node := facts.lost_with_fetch) is not None:
        message = (
            f"Node {node} does not say that the pod that fetches {what} has ended. It writes to the claim, so there is "
            f"no other one before that: bring the node back, or run `kubectl delete node {node}` when it is off for "
            "good."
        )
        return Condition(Kind.MODEL_CACHED, "False", Reason.NODE_LOST, message)
    fetch = facts.fetch
    # A fetch that tries again by itself says why, and is under way all the same.
    if fetch.phase == "Failed" or fetch.reason:
        said = f" ({quoted(fetch.message)})" if fetch.message else ""
        reason, remedy = _FETCH_REMEDIES.get(fetch.reason, (Reason.FETCH_FAILED, "The log of the fetch pod says more."))
        key = model_files.cache_key(facts.model)
        again = (
            f"It is tried again within 10 minutes, and at once after `kubectl delete job "
            f"{names.fetch(facts.model.name, key)}`."
            if fetch.given_up
            else "It is tried again by itself."
        )
        message = f"{what} could not be fetched{said}. {remedy} {again}"
        return Condition(Kind.MODEL_CACHED, "False", reason, message)
    if fetch.phase in ("Resolving", "Downloading"):
        message = f"{what} is being downloaded: {fetch.percent} %."
        return Condition(Kind.MODEL_CACHED, "False", Reason.DOWNLOADING, message)
    message = f"{what} has to be fetched; the pod that does it has not started."
    return Condition(Kind.MODEL_CACHED, "False", Reason.WAITING_FOR_FETCH, message)


def scheduled(facts: Facts) -> Condition:
    """Whether every pod that should be there is on a node and has its image."""
    if (trouble := facts.trouble(Kind.SCHEDULED)) is not None:
        return trouble
    for replica in facts.replicas:
        made = 0 if replica.stateful_set is None else replica.stateful_set["spec"]["replicas"]
        placed = sum(bool(pod["spec"].get("nodeName")) for pod in replica.pods)
        if placed < made:
            message = f"Pods of {replica.name} wait for a node."
            return Condition(Kind.SCHEDULED, "False", Reason.PENDING, message)
    return Condition(Kind.SCHEDULED, "True", Reason.SCHEDULED, "All pods that were made are on nodes.")


def frontend_ready(facts: Facts) -> Condition:
    """Whether all frontends can answer requests."""
    if (trouble := facts.trouble(Kind.FRONTEND_READY)) is not None:
        return trouble
    wanted, up = facts.model.spec.frontend.replicas, facts.ready_frontends
    if up >= wanted:
        message = f"{wanted} of {wanted} frontends can answer."
        return Condition(Kind.FRONTEND_READY, "True", Reason.FRONTENDS_READY, message)
    if not facts.replicas:
        return Condition(Kind.FRONTEND_READY, "False", Reason.SUSPENDED, asleep(facts))
    if facts.routing.reported and not any(replica.routed_by_any for replica in facts.replicas):
        message = "No frontend can reach a replica that serves; none takes requests until then. See EngineReady."
        return Condition(Kind.FRONTEND_READY, "False", Reason.NO_REPLICA_ROUTABLE, message)
    message = f"{up} of {wanted} frontends can answer; the others are starting."
    return Condition(Kind.FRONTEND_READY, "False", Reason.STARTING, message)


def ready(facts: Facts, before: tuple[Condition, ...]) -> Condition:
    """Whether the endpoint answers: a frontend routes to a replica, and the Service has a frontend to send requests to.
    That does not mean that all is as wished."""
    if not facts.replicas:
        return Condition(Kind.READY, "False", Reason.SUSPENDED, asleep(facts))
    # The endpoint's own name may be one that is not ours.
    if facts.routable and facts.ready_frontends and Ref("Service", facts.model.name) not in facts.conflicts:
        message = f"{facts.routable} of {len(facts.replicas)} replicas can be reached at {facts.url}."
        return Condition(Kind.READY, "True", Reason.READY, message)
    failing = next((condition for condition in before if condition.status != "True"), None)
    if failing is not None:
        return Condition(Kind.READY, "False", failing.reason, failing.message)
    if not facts.routing.reported:
        message = "No frontend tells the operator which replicas it reaches. Check the NetworkPolicies between them."
        return Condition(Kind.READY, "Unknown", Reason.UNREACHABLE, message)
    message = "The replicas are ready, but no frontend has reached one so far."
    return Condition(Kind.READY, "False", Reason.NO_REPLICA_ROUTABLE, message)


def progressing(facts: Facts) -> Condition:
    """Whether anything is under way to what the spec says."""
    outdated = [replica.name for replica in facts.replicas if facts.outdated(replica)]
    if outdated:
        message = f"Replicas with an old revision: {_list(outdated)}. {_rollout_waits(facts)}"
        return Condition(Kind.PROGRESSING, "True", Reason.ROLLING_OUT, message)
    if _frontends_roll_out(facts):
        message = "Frontend pods are being replaced; engines are not touched."
        return Condition(Kind.PROGRESSING, "True", Reason.ROLLING_OUT, message)
    if facts.leaving:
        message = "Pods of replicas that are no longer wanted end their last requests."
        return Condition(Kind.PROGRESSING, "True", Reason.SCALING, message)
    if not facts.replicas:
        return Condition(Kind.PROGRESSING, "False", Reason.SUSPENDED, asleep(facts))
    starting = [replica.name for replica in facts.replicas if not replica.ready and not facts.failing(replica)]
    if starting:
        reason = Reason.SCALING if facts.routable else Reason.STARTING
        message = f"Replicas that are starting: {_list(starting)}."
        return Condition(Kind.PROGRESSING, "True", reason, message)
    return Condition(Kind.PROGRESSING, "False", Reason.UP_TO_DATE, "Nothing is under way.")


def _rollout_waits(facts: Facts) -> str:
    """What has to be so before the next replica is replaced."""
    if not facts.cached:
        return "It begins when the model is cached."
    awaited = awaited_by_rollout(facts.replicas, facts.revision)
    if awaited and not replaceable(facts.replicas, facts.revision):
        first = min(awaited, key=lambda replica: (facts.outdated(replica), replica.index))
        if not first.ready:
            return f"It goes on when {first.name} has come up."
        if not facts.routing.reported:
            return (
                "It goes on when the frontends tell the operator which replicas they reach. Check the NetworkPolicies "
                "between them."
            )
        return (
            f"It goes on when every frontend can send requests to {first.name}. If that takes long, see `kubectl logs "
            f"deployment/{names.frontend(facts.model.name)}`: they may not reach it, or be unable to use its tokenizer "
            "files."
        )
    waiting = [replica.name for replica in facts.replicas if replica.waits_for_files and not facts.outdated(replica)]
    if waiting:
        return (
            f"One replica is replaced after the other. New ones with other tokenizer files ({_list(waiting)}) get "
            "requests as soon as they are the most."
        )
    return "One replica is replaced after the other."


def degraded(facts: Facts) -> Condition:
    """Whether something that should serve does not."""
    down = [replica.name for replica in facts.replicas if facts.failing(replica)]
    if down:
        message = f"Replicas that are down: {_list(down)}. See EngineReady and Scheduled for why."
        return Condition(Kind.DEGRADED, "True", Reason.REPLICAS_DOWN, message)
    if facts.failing_frontends:
        message = "A frontend pod is down. See FrontendReady and Scheduled for why."
        return Condition(Kind.DEGRADED, "True", Reason.FRONTENDS_DOWN, message)
    return Condition(Kind.DEGRADED, "False", Reason.ALL_REPLICAS_SERVE, "Nothing that has started is down.")


def interconnect_optimal(facts: Facts) -> Condition:
    """Whether ranks talk to each other as fast as they could."""
    kind = Kind.INTERCONNECT_OPTIMAL
    parallelism = facts.model.spec.parallelism
    if parallelism.tensor == 1:
        return Condition(kind, "True", Reason.OPTIMAL, "A replica is one rank.")
    if facts.model.spec.engine.device == "cpu":
        return Condition(kind, "True", Reason.OPTIMAL, "Ranks on CPUs have no faster transport than theirs.")
    if parallelism.pods == 1:
        return Condition(kind, "True", Reason.OPTIMAL, "All ranks of a replica are in one pod.")
    transports = {
        replica.name: str(replica.report.get("transport") or "")
        for replica in facts.replicas
        if replica.ready and replica.report is not None
    }
    slow = [f"{name} ({transport})" for name, transport in transports.items() if transport.startswith("NET/Socket")]
    if slow:
        message = (
            f"Ranks in separate pods talk over TCP: {_list(slow)}. Remove gpusPerPod, or set interconnect: SharedPod, "
            "so that they share a pod and its NVLink."
        )
        return Condition(kind, "False", Reason.CROSS_POD_TCP, message)
    if len(transports) < len(facts.replicas) or not all(transports.values()):
        message = "Not every replica has told what its ranks talk through."
        return Condition(kind, "Unknown", Reason.UNKNOWN, message)
    return Condition(kind, "True", Reason.OPTIMAL, f"Ranks talk over {', '.join(sorted(set(transports.values())))}.")


def _frontends_roll_out(facts: Facts) -> bool:
    if facts.frontend is None:
        return False
    status = facts.frontend.get("status") or {}
    updated, there = int(status.get("updatedReplicas") or 0), int(status.get("replicas") or 0)
    return there > 0 and updated < there


def _list(items: list[str]) -> str:
    """At most three of them, so that a thousand replicas stay readable."""
    shown = ", ".join(items[:3])
    return shown if len(items) <= 3 else f"{shown} and {len(items) - 3} more"
