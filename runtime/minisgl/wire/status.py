"""Bodies of `GET /status` on the control port of each kind of pod, and the default ports.

Launchers and frontends write these bodies; the operator reads them. Pods and operators of different versions run side
by side: encoded names stay, and a new field has a default.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

HTTP_PORT: Final = 8000
"""OpenAI API of a frontend."""
CONTROL_PORT: Final = 8080
"""Probes, `/status`, `/drain` and tokenizer files over HTTP, in every pod."""
SCHEDULER_PORT: Final = 5550
"""Requests of tokenizer workers over ZMQ, on pod 0 of a replica."""
LINK_PORT: Final = 5551
"""Links between the launchers of a replica, on pod 0."""
RENDEZVOUS_PORT: Final = 5552
"""Rendezvous of the ranks of several pods, on pod 0."""
PLANS_PORT: Final = 5560
"""Step plans for rank 0 of the other pods' ranks: each of them listens on this port plus its rank."""

SERVING_HEADER: Final = "x-minisgl-serving"
"""Request header with which the operator tells a frontend whether its model shall serve: `true`, or `false` for one
that is suspended or has no replicas and no autoscaling."""
GATEWAYS_HEADER: Final = "x-minisgl-gateways"
"""Request header with which the operator names the IP addresses of the gateway's pods to a frontend, separated by
commas: for the next 45 s it believes what they say about tenant and priority of a request. Only frontends with
MINISGL_HEARS_GATEWAYS=true listen to it."""
SECRET_HEADER: Final = "x-minisgl-peer-secret"
"""Request header with which the operator tells an engine that all pods of its model know a common token: with the value
`required`, it refuses others for the next 45 s."""
WAIT_PARAMETER: Final = "wait"
"""Query parameter of a frontend's `/status`: seconds to wait for a held request before the answer."""
MAX_WAIT_SECONDS: Final = 30.0
"""Longest such wait."""

EnginePhase = Literal["Waiting", "Rendezvous", "Loading", "Ready", "Restarting", "Draining", "Failed"]
FailureReason = Literal["Killed", "OutOfMemory", "InvalidModel", "TensorDoesNotDivideHeads", "StartupTimeout", "Error"]
FetchPhase = Literal["Resolving", "Downloading", "Done", "Failed"]
FetchFailureReason = Literal["AuthRequired", "NotFound", "RateLimited", "NoSpace", "Unreachable"]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Failure of one rank, which ended all ranks of its replica."""

    at: str
    """Time in RFC 3339, to the millisecond."""
    rank: int
    pod: str
    exit_code: int | None
    """Exit code of the rank's process; negative: the signal that killed it; None: unknown, or it did not exit."""
    reason: FailureReason
    message: str
    """Cause of the exit and the last words of the process."""


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one rank."""

    rank: int
    pod: str
    node: str
    """Empty: unknown."""
    phase: EnginePhase
    progress: str
    """Current step of the start; empty once the rank is ready, or when it does not run."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The served model."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    task: str = ""
    """As in `ModelCard`; empty: not reported."""


class DataTypes(msgspec.Struct, frozen=True, kw_only=True):
    """Data types in which one engine runs. A type is written as in torch, such as `bfloat16`."""

    weights: str
    """Type of most weights as they are kept in memory: `fp8-block` (one scale per block of 128 × 128), `fp8-channel`
    (one per output channel), `int4`, or that of the model, also for quantized weights that were dequantized at the
    start."""
    kv_cache: str
    """Type of keys and values: `fp8_e4m3`, or that of the model."""


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True, tag="engine", tag_field="kind"):
    """Body of an engine pod. The leader (pod 0) reports its whole replica, a member pod its own ranks."""

    model: str
    replica: str
    pod: str
    pod_index: int
    revision: str
    epoch: tuple[int, int]
    phase: EnginePhase
    progress: str
    """Reason for the phase, such as the pods that are missing; empty when there is nothing to add."""
    ready: bool
    """Leader: true if all ranks are ready. Member pod: true if it has joined the leader."""
    ranks: tuple[RankStatus, ...]
    ready_ranks: int
    tensor: int
    """Tensor-parallel ranks of the replica."""
    transport: str
    """Transport of NCCL or gloo between the ranks, such as `P2P/IPC`; empty for one rank, or when unknown."""
    attention: dict[str, str] = {}
    """Attention backends by kind of attention, as in the metric `attention_backend_info`; empty when unknown."""
    data_types: DataTypes | None = None
    """As in the metric `data_type_info`; None: unknown."""
    timings: dict[str, float]
    """Seconds of each stage of the last start, see `replica.start_timings.STAGES`."""
    standbys: int
    """Processes of this pod that have done the imports of its ranks, and fork them at the next start."""
    restarts: int
    """Restarts within the restart window."""
    max_restarts: int
    last_failure: Failure | None
    card: EngineInfo | None
    """Served model; None until the replica has been ready once."""
    peer_secret: dict[str, str] = {}
    """Fingerprints of the tokens that the pod knows, see `wire.peer_secret.PeerSecret.fingerprints`."""


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as a router sees it."""

    replica: str
    """Name of the replica; empty before its first welcome. Name, revision and epoch are kept when the connection is
    lost."""
    revision: str
    epoch: tuple[int, int]
    address: str
    routable: bool
    """True if the router can send it requests now."""
    reason: str
    """Reason why it is not routable; empty when it is."""
    waits_for_files: bool = False
    """True if it is not routable only because its tokenizer files, which are loaded, are not in use."""
    running: int
    waiting: int
    queue_ms: float | None = None
    """Mean time in the engine's queue of the last 30 s, in milliseconds; None: unknown."""
    kv_usage: float | None = None
    """Part of the KV cache that requests use, from 0 to 1; None: unknown."""


class FrontendStatus(msgspec.Struct, frozen=True, kw_only=True, tag="frontend", tag_field="kind"):
    """Body of a frontend pod."""

    pod: str
    ready: bool
    """True if it can take requests; without a routable replica it holds them."""
    draining: bool
    """True if it refuses new requests and is about to stop."""
    replicas: list[ReplicaView]
    """All replicas that discovery has found, as the best informed tokenizer worker sees each."""
    held: int = 0
    """Requests that wait because no replica is routable."""
    running: int = 0
    """Generation requests in progress that are not held."""
    idle_seconds: float | None = None
    """Seconds since the last generation request ended, or since the start if there was none; 0 while one is in
    progress. None: not reported."""
    peer_secret: dict[str, str] = {}
    """As in EngineStatus."""


class FetchStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a fetch pod; also the last line that `minisgl models fetch` prints and its termination message."""

    kind: Literal["fetch"] = "fetch"
    phase: FetchPhase = "Resolving"
    percent: int = 0
    commit: str = ""
    reason: FetchFailureReason | Literal[""] = ""
    """Reason of the failure, or of the current wait."""
    message: str = ""
    needed_bytes: int = 0
    """With NoSpace before the download: bytes that are missing from the checkpoint."""
    free_bytes: int = 0
    """With NoSpace before the download: free bytes of the volume."""
