"""The conditions of a model and their reasons: the words that people and scripts read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, Literal

_LONGEST_MESSAGE: Final = 1024
_LONGEST_QUOTE: Final = 400


class Kind(StrEnum):
    """The types of conditions, in the order in which a model passes through them."""

    ACCEPTED = "Accepted"
    MODEL_CACHED = "ModelCached"
    SCHEDULED = "Scheduled"
    ENGINE_READY = "EngineReady"
    FRONTEND_READY = "FrontendReady"
    READY = "Ready"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"
    INTERCONNECT_OPTIMAL = "InterconnectOptimal"


class Reason(StrEnum):
    """Every reason that a condition can have. docs/conditions.md says for each what it means and what to do."""

    ACCEPTED = "Accepted"
    INVALID_SPEC = "InvalidSpec"
    INVALID_MODEL = "InvalidModel"
    TENSOR_DOES_NOT_DIVIDE_HEADS = "TensorDoesNotDivideHeads"
    SECRET_NOT_FOUND = "SecretNotFound"
    CONFIG_MAP_NOT_FOUND = "ConfigMapNotFound"
    CLAIM_NOT_FOUND = "ClaimNotFound"
    CONFLICT = "Conflict"
    FORBIDDEN = "Forbidden"
    REJECTED = "Rejected"
    NAMESPACE_TERMINATING = "NamespaceTerminating"

    CACHED = "Cached"
    NOT_NEEDED = "NotNeeded"
    WAITING_FOR_FETCH = "WaitingForFetch"
    DOWNLOADING = "Downloading"
    AUTH_REQUIRED = "AuthRequired"
    NOT_FOUND = "NotFound"
    RATE_LIMITED = "RateLimited"
    NO_SPACE = "NoSpace"
    HUB_UNREACHABLE = "HubUnreachable"
    FETCH_FAILED = "FetchFailed"

    SCHEDULED = "Scheduled"
    PENDING = "Pending"
    INSUFFICIENT_GPU = "InsufficientGPU"
    UNSCHEDULABLE = "Unschedulable"
    QUOTA_EXCEEDED = "QuotaExceeded"
    POD_REFUSED = "PodRefused"
    POD_NOT_STARTED = "PodNotStarted"
    NO_STORAGE_CLASS = "NoStorageClass"
    IMAGE_PULL_FAILED = "ImagePullFailed"

    ENGINES_READY = "EnginesReady"
    WAITING_FOR_MODEL = "WaitingForModel"
    WAITING_FOR_PODS = "WaitingForPods"
    LOADING = "Loading"
    RENDEZVOUS = "Rendezvous"
    DRAINING = "Draining"
    RESTARTING = "Restarting"
    CRASHED = "Crashed"
    OUT_OF_MEMORY = "OutOfMemory"
    RESTART_BUDGET_EXHAUSTED = "RestartBudgetExhausted"
    NODE_LOST = "NodeLost"

    FRONTENDS_READY = "FrontendsReady"
    STARTING = "Starting"
    NO_REPLICA_ROUTABLE = "NoReplicaRoutable"

    READY = "Ready"
    SUSPENDED = "Suspended"
    UNREACHABLE = "Unreachable"

    UP_TO_DATE = "UpToDate"
    ROLLING_OUT = "RollingOut"
    SCALING = "Scaling"

    ALL_REPLICAS_SERVE = "AllReplicasServe"
    REPLICAS_DOWN = "ReplicasDown"
    FRONTENDS_DOWN = "FrontendsDown"

    OPTIMAL = "Optimal"
    CROSS_POD_TCP = "CrossPodTCP"
    UNKNOWN = "Unknown"


Verdict = Literal["True", "False", "Unknown"]


@dataclass(frozen=True)
class Condition:
    """What holds, why, and in words what to do next. A message has no times, counters or generated names: it changes
    only when the state does, or each write of the status would cause the next."""

    kind: Kind
    status: Verdict
    reason: Reason
    message: str


def as_status(
    conditions: Iterable[Condition], generation: int, previous: Mapping[str, Any], now: datetime
) -> list[dict[str, Any]]:
    """The conditions as they stand in the status. The time of a transition moves only when the status flips."""
    before = {condition["type"]: condition for condition in previous.get("conditions") or ()}
    result = []
    for condition in conditions:
        last = before.get(condition.kind.value)
        same = last is not None and last["status"] == condition.status
        result.append(
            {
                "type": condition.kind.value,
                "status": condition.status,
                "reason": condition.reason.value,
                "message": clipped(condition.message, _LONGEST_MESSAGE),
                "observedGeneration": generation,
                "lastTransitionTime": last["lastTransitionTime"] if last is not None and same else timestamp(now),
            }
        )
    return result


def timestamp(moment: datetime) -> str:
    """As Kubernetes writes times: UTC, whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def clipped(text: str, length: int) -> str:
    """On one line, of at most `length` characters, without what a terminal would act on."""
    printable = text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)
    line = " ".join(printable.split())
    return line if len(line) <= length else line[: length - 1] + "…"


def quoted(text: str) -> str:
    """What somebody else says, at the length at which a message quotes it."""
    return clipped(text, _LONGEST_QUOTE)
