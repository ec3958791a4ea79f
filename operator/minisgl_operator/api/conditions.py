"""Types and reasons of the conditions of an InferenceModel: a stable interface for users and scripts."""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    """Condition types, in the order in which a model passes through them."""

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
    """All reasons of conditions. docs/conditions.md explains each one and its remedy."""

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
    WEBHOOK_UNAVAILABLE = "WebhookUnavailable"
    API_SERVER_ERROR = "ApiServerError"
    NAMESPACE_TERMINATING = "NamespaceTerminating"

    CACHED = "Cached"
    NOT_NEEDED = "NotNeeded"
    WAITING_FOR_FETCH = "WaitingForFetch"
    FETCH_SUSPENDED = "FetchSuspended"
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
    PARTLY_SCHEDULED = "PartlyScheduled"
    QUOTA_EXCEEDED = "QuotaExceeded"
    FIELDS_REQUIRED = "FieldsRequired"
    POD_REFUSED = "PodRefused"
    POD_NOT_STARTED = "PodNotStarted"
    POD_ENDED_BY_NODE = "PodEndedByNode"
    CLAIM_LOST = "ClaimLost"
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
    POD_NOT_TERMINATING = "PodNotTerminating"

    FRONTENDS_READY = "FrontendsReady"
    STARTING = "Starting"
    NO_REPLICA_ROUTABLE = "NoReplicaRoutable"

    READY = "Ready"
    SUSPENDED = "Suspended"
    SCALED_TO_ZERO = "ScaledToZero"
    UNREACHABLE = "Unreachable"

    UP_TO_DATE = "UpToDate"
    ROLLING_OUT = "RollingOut"
    ROLLED_BACK = "RolledBack"
    PAUSED = "Paused"
    UPGRADE_WAITING = "UpgradeWaiting"
    UPGRADE_FAILED = "UpgradeFailed"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    SCALING = "Scaling"

    ALL_REPLICAS_SERVE = "AllReplicasServe"
    REPLICAS_DOWN = "ReplicasDown"
    FRONTENDS_DOWN = "FrontendsDown"
    DRAIN_BLOCKED = "DrainBlocked"

    OPTIMAL = "Optimal"
    CROSS_POD_TCP = "CrossPodTCP"
    NO_PEER_ACCESS = "NoPeerAccess"
    UNKNOWN = "Unknown"
