"""Status of an InferenceModel. An absent field was not observed yet."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import Field

from minisgl_operator.api.base import ApiModel, Integer, Unique

MAX_MESSAGE: Final = 8192
"""Maximum length of a message in characters; the API server rejects a status with a longer one."""
_MAX_COUNT: Final = 2**31 - 1
_MAX_LONG: Final = 2**53 - 1
"""The largest integer that the API server, which stores bounds as floating-point numbers, represents exactly."""

Text = Annotated[str, Field(max_length=1024)]
Message = Annotated[str, Field(max_length=MAX_MESSAGE)]
Count = Annotated[Integer, Field(ge=0, le=_MAX_COUNT)]

Phase = Literal["Pending", "Caching", "Starting", "Ready", "Updating", "Degraded", "Idle", "Suspended", "Failed"]


class Condition(ApiModel):
    """One aspect of the state of the InferenceModel, for users and `kubectl wait`."""

    type: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Z][A-Za-z]*$")]
    """Accepted, ModelCached, Scheduled, EngineReady, FrontendReady, Ready, Progressing, Degraded, InterconnectOptimal,
    RouteAccepted, Reconciling or Stalled."""
    status: Literal["True", "False", "Unknown"]
    """Status of the condition."""
    reason: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Z][A-Za-z]*$")]
    """Reason as one word, which is stable between versions."""
    message: Message
    """Explanation of the reason, and the next step."""
    observed_generation: Integer | None = Field(default=None, ge=0, le=_MAX_LONG)
    """metadata.generation that the condition was derived from."""
    last_transition_time: datetime
    """Time of the last change of status."""


class ServedModel(ApiModel):
    """The model that is served."""

    name: Text | None = None
    """Source of the model: repository, claim or image."""
    commit: Text | None = None
    """Commit on the Hub that the revision was resolved to."""
    architecture: Text | None = None
    """Architecture in the model's configuration."""
    task: Text | None = None
    """What the model is served for: generate, embed, rerank or classify."""
    max_model_len: Count | None = None
    """Maximum length of prompt and answer together, in tokens."""


class CacheStatus(ApiModel):
    """Fetch of the model from the Hub."""

    phase: Text | None = None
    """Pending, Resolving, Downloading, Done or Failed."""
    percent: Annotated[Integer, Field(ge=0, le=100)] | None = None
    """Downloaded part of the model, in percent."""


class LastFailure(ApiModel):
    """The last failure of a rank."""

    rank: Count | None = None
    """The rank."""
    pod: Text | None = None
    """Pod of the rank."""
    node: Text | None = None
    """Node that refused the pod or ended it, such as for want of memory; absent for a failure of a process."""
    reason: Text | None = None
    """Reason as one word."""
    exit_code: Annotated[Integer, Field(ge=-_MAX_COUNT, le=_MAX_COUNT)] | None = None
    """Exit code of the process; negative: the signal that killed it."""
    message: Message | None = None
    """Last output of the process."""
    at: datetime | None = None
    """Time of the failure."""


class NodeErrorStatus(ApiModel):
    """An error with which a replica failed on a node."""

    node: Text
    """The node."""
    error: Text
    """The error, with # for each number."""
    count: Count
    """Failures of the replica with this error on this node."""


class RetryStatus(ApiModel):
    """Failures of a replica after all its restarts, and its next attempt."""

    revision: Text
    """Revision that failed; the failures of another one do not count."""
    failures: Count
    """Times that the replica has used up its restarts since it last served for a while."""
    leader_start: Annotated[Integer, Field(ge=0, le=_MAX_LONG)]
    """Start of the leader that failed last, in ms since 1970."""
    failed_at: datetime
    """Time of the last failure."""
    retry_at: datetime | None = None
    """Time of the next attempt; absent when it has begun."""
    errors: tuple[NodeErrorStatus, ...] | None = Field(default=None, max_length=8)
    """Errors by node, the last one last."""


class DataTypes(ApiModel):
    """Data types in which a replica runs. A type is written as in torch, such as bfloat16."""

    weights: Text | None = None
    """Type of most weights as they are kept in memory: fp8-block (one scale per block of 128 by 128), fp8-channel (one
    per output channel), int4, or that of the model, also for quantized weights that were dequantized at the start
    because the device has no kernels for them."""
    kv_cache: Text | None = None
    """Type of keys and values: fp8_e4m3, or that of the model."""


class ReplicaStatus(ApiModel):
    """One replica, as its leader reports it."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of the StatefulSet."""
    phase: Text | None = None
    """Phase: Pending, Waiting, Rendezvous, Loading, Ready, Restarting, Draining, Failed or Unknown."""
    revision: Text | None = None
    """Revision of the pod template."""
    ready_ranks: Count | None = None
    """Number of ready ranks."""
    ranks: Count | None = None
    """Number of ranks."""
    nodes: tuple[Text, ...] | None = Field(default=None, max_length=64)
    """Nodes of the pods."""
    transport: Text | None = None
    """Transport between the ranks: P2P/IPC, NET/Socket, gloo."""
    data_types: DataTypes | None = None
    """Data types of weights and KV cache; absent until the engine has reported them."""
    epoch: tuple[Annotated[Integer, Field(ge=0, le=_MAX_LONG)], ...] | None = Field(default=None, max_length=2)
    """Start of the leader in ms since 1970, and a counter of the starts of its ranks."""
    restarts: Count | None = None
    """Restarts within the window of spec.recovery."""
    startup_seconds: Annotated[float, Field(ge=0)] | None = None
    """Duration of the last start in seconds."""
    timings: dict[str, float] | None = Field(default=None, max_length=32)
    """Duration of each phase of the last start in seconds."""
    last_failure: LastFailure | None = None
    """The last failure of a rank."""
    retry: RetryStatus | None = None
    """Failures after all restarts, and the next attempt; absent without such a failure."""


class SilentFrontendStatus(ApiModel):
    """A frontend pod that runs and does not answer the operator."""

    pod: Text
    """Name of the pod."""
    since: datetime
    """Time of the first probe without an answer. After 10 minutes the pod keeps no replica from being removed."""


class FrontendStatus(ApiModel):
    """Frontend pods."""

    replicas: Count | None = None
    """Frontend pods."""
    ready_replicas: Count | None = None
    """Number of ready frontend pods."""
    silent: tuple[SilentFrontendStatus, ...] | None = Field(default=None, max_length=1000)
    """Frontend pods that do not answer the operator."""


class AutoscalingStatus(ApiModel):
    """Decision of the autoscaler."""

    target_replicas: Count
    """Number of replicas that the operator has decided on, within minReplicas and maxReplicas."""
    fewer_replicas: Count | None = None
    """Number of replicas that has sufficed since fewerSince; absent while targetReplicas are needed, or while the load
    is unknown."""
    fewer_since: datetime | None = None
    """Time since which fewer replicas suffice."""


class AdmissionStatus(ApiModel):
    """The last dry run of the creation of a pod, before a replica that serves is drained."""

    revision: Text
    """Revision of the pod."""
    result: Text
    """Accepted, Refused, NoAnswer (tried again) or Skipped (the rollout goes on without an answer)."""
    message: Message | None = None
    """Response of the API server, or the reason why the check was skipped."""
    attempts: Count | None = None
    """Dry runs that were refused or had no answer."""
    retry_at: datetime | None = None
    """Time of the next dry run."""


class UpgradeStatus(ApiModel):
    """Upgrade of the model to the pods of the running operator."""

    state: Text
    """Waiting: it keeps its pods until its turn. Excluded: it keeps them, and no other model waits for it. Upgrading,
    Upgraded or Failed: it has had its turn. Current: it took no turn, as it is new, was edited or is suspended, or as
    nothing has changed."""
    wave: Text | None = None
    """Wave of the model."""
    target: Text | None = None
    """Hash of the templates that the model has or gets; absent while it keeps older ones."""
    spec_hash: Text | None = None
    """Hash of the fields of the spec that can change pods, as the pods have them. An edit changes it."""


class RolloutStatus(ApiModel):
    """The rollout in progress, or the last one."""

    revision: Text | None = None
    """Revision that the spec asks for."""
    stable_revision: Text | None = None
    """The last revision that all replicas had, and with which one served."""
    started_at: datetime | None = None
    """Time at which the first replica of the revision got pods, or at which they were first refused; later by the time
    for which the model was scaled to zero since. Absent while the model has no replicas."""
    elapsed_seconds: Count | None = None
    """Seconds of progressDeadlineSeconds that had passed when the model was scaled to zero."""
    served: bool | None = None
    """True if a replica of the revision has served."""
    failure: Message | None = None
    """Reason why the revision was given up."""
    strategy: Text | None = None
    """Surge, Recreate, or NoRoom, which is Recreate because an additional replica got no nodes."""
    admission: AdmissionStatus | None = None
    """Whether the API server accepts pods of the revision; absent until a replica that serves would be drained."""
    upgrade: UpgradeStatus | None = None
    """Upgrade to the pods of the running operator; absent if it upgrades all models at once."""


class InferenceModelStatus(ApiModel):
    """Observed state of the InferenceModel."""

    observed_generation: Integer | None = Field(default=None, ge=0, le=_MAX_LONG)
    """metadata.generation that the status was derived from."""
    phase: Phase | None = None
    """Summary of the status in one word."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=16), Unique("type")] | None = None
    """Conditions, each with its reason and the next step."""
    replicas: Count | None = None
    """Number of replicas that exist, ready or not."""
    ready_replicas: Count | None = None
    """Number of routable replicas."""
    autoscaling: AutoscalingStatus | None = None
    """Decision of the autoscaler; absent without spec.autoscaling."""
    updated_replicas: Count | None = None
    """Number of replicas with the current revision."""
    ranks: Text | None = None
    """Ready and wanted ranks, such as 4/4."""
    selector: Annotated[str, Field(max_length=4096)] | None = None
    """Label selector of one pod per replica, for autoscalers."""
    url: Text | None = None
    """URL of the OpenAI API within the cluster."""
    model: ServedModel | None = None
    """The model that is served."""
    cache: CacheStatus | None = None
    """Fetch of the model from the Hub."""
    revision: Text | None = None
    """Current revision of the engine pods' template."""
    failed_revision: Text | None = None
    """The revision that the spec asks for, if it does not start while an older one serves, or was given up. Replicas
    that serve keep their revision until the spec changes, or a new replica of this one serves."""
    rollout: RolloutStatus | None = None
    """The rollout in progress, or the last one."""
    replica_statuses: Annotated[tuple[ReplicaStatus, ...], Field(max_length=1000), Unique("name")] | None = None
    """Replicas, as their leaders report them."""
    frontend: FrontendStatus | None = None
    """Frontend pods."""
