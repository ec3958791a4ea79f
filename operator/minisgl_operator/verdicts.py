"""From facts to conditions: one function for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from minisgl_operator import names
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.conditions import Condition, Kind, Reason, clipped
from minisgl_operator.facts import Facts
from minisgl_operator.pod_troubles import crash_text, last_end
from minisgl_operator.render import model_files
from minisgl_operator.replicas import Replica, containers, waiting_reason

_LONGEST_QUOTE: Final = 400

# What of a model's own files no restart and no wait will change.
_REFUSALS: Final[Mapping[str, tuple[Reason, str]]] = {
    "InvalidModel": (
        Reason.INVALID_MODEL,
        "Name a model that is complete and of an architecture that is supported, in spec.model.source.",
    ),
    "TensorDoesNotDivideHeads": (
        Reason.TENSOR_DOES_NOT_DIVIDE_HEADS,
        "Set spec.parallelism.tensor to a number that divides them.",
    ),
}
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
        "The claim of the cache is full: make room on it, or delete the InferenceModel and create it again with a "
        "larger spec.model.cache.size.",
    ),
    "Unreachable": (
        Reason.HUB_UNREACHABLE,
        "The Hub does not answer: check spec.model.source.huggingFace.endpoint and that pods may reach it.",
    ),
}
# The worst first: it is the one that is told.
_ENGINE_REASONS: Final = (
    Reason.TENSOR_DOES_NOT_DIVIDE_HEADS,
    Reason.INVALID_MODEL,
    Reason.RESTART_BUDGET_EXHAUSTED,
    Reason.OUT_OF_MEMORY,
    Reason.CRASHED,
    Reason.RESTARTING,
    Reason.UNREACHABLE,
    Reason.LOADING,
    Reason.RENDEZVOUS,
    Reason.WAITING_FOR_PODS,
    Reason.DRAINING,
    Reason.WAITING_FOR_MODEL,
)


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
        said = clipped(refusal.message, _LONGEST_QUOTE)
        if refusal.status == 403 and "exceeded quota" not in refusal.message:
            message = f"The operator may not change {refusal.ref}: {said}. Give its role what is missing."
            return Condition(Kind.ACCEPTED, "False", Reason.FORBIDDEN, message)
        if refusal.status in (400, 422):
            message = f"The API server refuses {refusal.ref}: {said}. Correct the field of the spec that it comes from."
            return Condition(Kind.ACCEPTED, "False", Reason.REJECTED, message)
    for replica in facts.replicas:
        if (refused := _refused(facts, replica)) is not None:
            return Condition(Kind.ACCEPTED, "False", *refused)
    return facts.trouble(Kind.ACCEPTED) or Condition(Kind.ACCEPTED, "True", Reason.ACCEPTED, "The spec is valid.")


def model_cached(facts: Facts) -> Condition:
    """Whether engines can read the model's files."""
    if facts.fetch is None:
        message = f"{title(facts.model)} is mounted as it is."
        return Condition(Kind.MODEL_CACHED, "True", Reason.NOT_NEEDED, message)
    what, claim = title(facts.model), model_files.cache_claim(facts.model)
    if facts.cached:
        return Condition(Kind.MODEL_CACHED, "True", Reason.CACHED, f'{what} is on PersistentVolumeClaim "{claim}".')
    fetch = facts.fetch
    if fetch.phase == "Failed":
        said = f" ({clipped(fetch.message, _LONGEST_QUOTE)})" if fetch.message else ""
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


def engine_ready(facts: Facts) -> Condition:
    """Whether the ranks of all wanted replicas serve."""
    if not facts.replicas:
        return Condition(Kind.ENGINE_READY, "False", Reason.SUSPENDED, _asleep(facts))
    waiting = [replica for replica in facts.replicas if not replica.ready]
    if not waiting:
        message = f"{len(facts.replicas)} of {len(facts.replicas)} replicas are ready."
        return Condition(Kind.ENGINE_READY, "True", Reason.ENGINES_READY, message)
    # The first of equally bad ones is told.
    reason, message = min((_engine(facts, replica) for replica in waiting), key=lambda each: _rank(each[0]))
    if len(facts.replicas) > 1:
        message = f"{len(facts.replicas) - len(waiting)} of {len(facts.replicas)} replicas are ready. {message}"
    status = "Unknown" if reason is Reason.UNREACHABLE else "False"
    return Condition(Kind.ENGINE_READY, status, reason, message)  # type: ignore[arg-type]


def frontend_ready(facts: Facts) -> Condition:
    """Whether all frontends can answer requests."""
    if (trouble := facts.trouble(Kind.FRONTEND_READY)) is not None:
        return trouble
    wanted, up = facts.model.spec.frontend.replicas, facts.ready_frontends
    if up >= wanted:
        message = f"{wanted} of {wanted} frontends can answer."
        return Condition(Kind.FRONTEND_READY, "True", Reason.FRONTENDS_READY, message)
    if not facts.replicas:
        return Condition(Kind.FRONTEND_READY, "False", Reason.SUSPENDED, _asleep(facts))
    if facts.routing.reported and not any(replica.routed_by_any for replica in facts.replicas):
        message = "No frontend can reach a replica that serves; requests get 503 until then. See EngineReady."
        return Condition(Kind.FRONTEND_READY, "False", Reason.NO_REPLICA_ROUTABLE, message)
    message = f"{up} of {wanted} frontends can answer; the others are starting."
    return Condition(Kind.FRONTEND_READY, "False", Reason.STARTING, message)


def ready(facts: Facts, before: tuple[Condition, ...]) -> Condition:
    """Whether the endpoint answers: a frontend routes to a replica. That does not mean that all is as wished."""
    if not facts.replicas:
        return Condition(Kind.READY, "False", Reason.SUSPENDED, _asleep(facts))
    # The endpoint's own objects may be the ones that are not ours.
    if facts.routable and before[0].reason is not Reason.CONFLICT:
        message = f"{facts.routable} of {len(facts.replicas)} replicas can be reached at {url(facts.model)}."
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
        others = [replica.name for replica in facts.replicas if not replica.serving and replica.name not in outdated]
        if not facts.cached:
            waits = "It begins when the model is cached."
        elif others:
            waits = f"It goes on when {others[0]} serves."
        else:
            waits = "One replica is replaced after the other."
        message = f"Replicas with an old revision: {_list(outdated)}. {waits}"
        return Condition(Kind.PROGRESSING, "True", Reason.ROLLING_OUT, message)
    if _frontends_roll_out(facts):
        message = "Frontend pods are being replaced; engines are not touched."
        return Condition(Kind.PROGRESSING, "True", Reason.ROLLING_OUT, message)
    if facts.leaving:
        message = "Pods of replicas that are no longer wanted end their last requests."
        return Condition(Kind.PROGRESSING, "True", Reason.SCALING, message)
    if not facts.replicas:
        return Condition(Kind.PROGRESSING, "False", Reason.SUSPENDED, _asleep(facts))
    starting = [replica.name for replica in facts.replicas if not replica.ready and not facts.failing(replica)]
    if starting:
        reason = Reason.SCALING if facts.routable else Reason.STARTING
        message = f"Replicas that are starting: {_list(starting)}."
        return Condition(Kind.PROGRESSING, "True", reason, message)
    return Condition(Kind.PROGRESSING, "False", Reason.UP_TO_DATE, "Nothing is under way.")


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


def title(model: InferenceModel) -> str:
    """The model's source in words."""
    source = model.spec.model.source
    if source.hugging_face is not None:
        return f"{source.hugging_face.repo}@{source.hugging_face.revision}"
    if source.pvc is not None:
        return f"{source.pvc.claim_name}/{source.pvc.path}".rstrip("/")
    assert source.image is not None
    return f"{source.image.reference}/{source.image.path}".rstrip("/")


def url(model: InferenceModel) -> str:
    return f"http://{model.name}.{model.metadata.namespace}.svc/v1"


def failure_text(failure: Mapping[str, Any]) -> str:
    """A rank's end in words: `rank 1 ended with exit code -9 (Killed): its last words`."""
    rank = "a rank" if failure.get("rank") is None else f"rank {failure['rank']}"
    code = "" if failure.get("exit_code") is None else f" with exit code {failure['exit_code']}"
    words = clipped(str(failure.get("message") or ""), _LONGEST_QUOTE)
    return f"{rank} ended{code} ({failure.get('reason') or 'Error'})" + (f": {words}" if words else "")


def _engine(facts: Facts, replica: Replica) -> tuple[Reason, str]:
    """Why a replica is not ready."""
    name, phase = replica.name, facts.phase(replica)
    if (refused := _refused(facts, replica)) is not None:
        return refused
    if phase == "Draining":
        return Reason.DRAINING, f"{name} ends its last requests before its pods are replaced."
    for pod in replica.pods:
        if waiting_reason(pod) == "CrashLoopBackOff":
            ends = [end for container in containers(pod) if (end := last_end(container)) is not None]
            if any(end.get("reason") == "OOMKilled" for end in ends):
                return Reason.OUT_OF_MEMORY, f"{crash_text(pod)} Raise spec.engine.resources.limits.memory."
            return Reason.CRASHED, crash_text(pod)
    report = replica.report
    if report is None or phase == "Unknown":
        if phase == "Unknown":
            return Reason.UNREACHABLE, f"{name} does not tell the operator how it is. Check the NetworkPolicies."
        if not facts.cached and not replica.pods:
            return Reason.WAITING_FOR_MODEL, f"{name} starts when the model is cached."
        return Reason.WAITING_FOR_PODS, f"Pods of {name} have not started."
    failure = report.get("last_failure")
    if isinstance(failure, Mapping) and (phase in ("Failed", "Restarting") or report.get("restarts")):
        return _after_failure(facts, replica, report, failure)
    if phase in ("Waiting", "Rendezvous"):
        return Reason.RENDEZVOUS, f"The ranks of {name} wait for each other."
    if phase == "Restarting":
        return Reason.RESTARTING, f"The ranks of {name} start again."
    if phase == "Failed":
        return Reason.RESTART_BUDGET_EXHAUSTED, f"{name} has given up. {_after_giving_up(replica)}"
    return Reason.LOADING, f"{name} loads the model."


def _after_failure(
    facts: Facts, replica: Replica, report: Mapping[str, Any], failure: Mapping[str, Any]
) -> tuple[Reason, str]:
    what = f"{replica.name}: {failure_text(failure)}."
    given_up = report.get("phase") == "Failed"
    next_step = _after_giving_up(replica) if given_up else "Its ranks start again by themselves."
    if failure.get("reason") == "OutOfMemory":
        remedy = (
            "Raise spec.engine.resources.limits.memory, or lower spec.model.maxModelLen."
            if facts.model.spec.engine.device == "cpu"
            else "Lower spec.model.maxModelLen, or raise spec.parallelism.tensor."
        )
        return Reason.OUT_OF_MEMORY, f"{what} {remedy} {next_step}"
    if not given_up:
        return Reason.RESTARTING, f"{what} {next_step}"
    recovery = facts.model.spec.recovery
    budget = (
        f"It has used up its {recovery.max_restarts} restarts within {recovery.window_seconds} s, or failed in a way "
        "that no restart cures."
    )
    return Reason.RESTART_BUDGET_EXHAUSTED, f"{what} {budget} {next_step}"


def _after_giving_up(replica: Replica) -> str:
    return (
        f"Its pods are kept as they are: see `kubectl logs {replica.name}-0`. Correct the spec, or try again with "
        f"`kubectl delete pod -l {names.REPLICA_LABEL}={replica.name}`."
    )


def _refused(facts: Facts, replica: Replica) -> tuple[Reason, str] | None:
    """What the model's own files say against the spec. Only of pods that were made from the present spec."""
    report = replica.report
    if report is None or report.get("phase") != "Failed" or facts.outdated(replica):
        return None
    failure = report.get("last_failure")
    if not isinstance(failure, Mapping) or failure.get("reason") not in _REFUSALS:
        return None
    reason, remedy = _REFUSALS[str(failure["reason"])]
    return reason, f"{clipped(str(failure.get('message') or failure['reason']), _LONGEST_QUOTE)}. {remedy}"


def _frontends_roll_out(facts: Facts) -> bool:
    if facts.frontend is None:
        return False
    status = facts.frontend.get("status") or {}
    updated, there = int(status.get("updatedReplicas") or 0), int(status.get("replicas") or 0)
    return there > 0 and updated < there


def _rank(reason: Reason) -> int:
    return _ENGINE_REASONS.index(reason)


def _asleep(facts: Facts) -> str:
    if facts.model.spec.suspend:
        return "spec.suspend is true: the model has no engine pods until it is set to false."
    return f"spec.replicas is 0: `kubectl scale imodel/{facts.model.name} --replicas=1` starts the model."


def _list(items: list[str]) -> str:
    """At most three of them, so that a thousand replicas stay readable."""
    shown = ", ".join(items[:3])
    return shown if len(items) <= 3 else f"{shown} and {len(items) - 3} more"
