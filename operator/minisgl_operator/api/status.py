"""The status of an InferenceModel: what was observed. Every field may be absent: then it was not observed yet."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import Field

from minisgl_operator.api.base import ApiModel, Integer, Unique

MAX_MESSAGE: Final = 8192
"""Longest message in a status, in characters; a longer one would make the API server refuse the whole status."""
_MAX_COUNT: Final = 2**31 - 1
_MAX_LONG: Final = 2**53 - 1
"""The API server keeps bounds as floating-point numbers, and this is the last whole one that they can hold."""

Text = Annotated[str, Field(max_length=1024)]
Message = Annotated[str, Field(max_length=MAX_MESSAGE)]
Count = Annotated[Integer, Field(ge=0, le=_MAX_COUNT)]

Phase = Literal["Pending", "Caching", "Starting", "Ready", "Updating", "Degraded", "Suspended", "Failed"]


class Condition(ApiModel):
    """One fact about the InferenceModel, for people and for kubectl wait."""

    type: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Z][A-Za-z]*$")] = Field(
        description="Accepted, ModelCached, Scheduled, EngineReady, FrontendReady, Ready, Progressing, Degraded or "
        "InterconnectOptimal."
    )
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it is so.")
    reason: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Z][A-Za-z]*$")] = Field(
        description="Why, as one word that does not change between versions."
    )
    message: Message = Field(description="Why, in words, and what to do next.")
    observed_generation: Integer | None = Field(
        default=None, ge=0, le=_MAX_LONG, description="metadata.generation that this was said about."
    )
    last_transition_time: datetime = Field(description="When status last changed.")


class ServedModel(ApiModel):
    """The model that is served."""

    name: Text | None = Field(default=None, description="Where it comes from: repository, claim or image.")
    commit: Text | None = Field(default=None, description="Commit that the revision was resolved to, on the Hub.")
    architecture: Text | None = Field(default=None, description="Architecture in the model's configuration.")
    max_model_len: Count | None = Field(default=None, description="Longest prompt with its answer, in tokens.")


class CacheStatus(ApiModel):
    """The fetch of a model from the Hub."""

    phase: Text | None = Field(default=None, description="Pending, Resolving, Downloading, Done or Failed.")
    percent: Annotated[Integer, Field(ge=0, le=100)] | None = Field(
        default=None, description="How much of it has been downloaded."
    )


class LastFailure(ApiModel):
    """The last death of a rank."""

    rank: Count | None = Field(default=None, description="The rank.")
    pod: Text | None = Field(default=None, description="Its pod.")
    reason: Text | None = Field(default=None, description="Why, as one word.")
    exit_code: Annotated[Integer, Field(ge=-_MAX_COUNT, le=_MAX_COUNT)] | None = Field(
        default=None, description="Exit status of the process; negative: the signal that ended it."
    )
    message: Message | None = Field(default=None, description="Its last words.")
    at: datetime | None = Field(default=None, description="When.")


class ReplicaStatus(ApiModel):
    """One replica, as rank 0 of it reports."""

    name: Annotated[str, Field(min_length=1, max_length=63)] = Field(description="Name of its StatefulSet.")
    phase: Text | None = Field(
        default=None,
        description="Where it is in its life: Pending, Waiting, Rendezvous, Loading, Ready, Restarting, Draining, "
        "Failed or Unknown.",
    )
    revision: Text | None = Field(default=None, description="Revision of the pod template that its pods run.")
    ready_ranks: Count | None = Field(default=None, description="Ranks that are ready.")
    ranks: Count | None = Field(default=None, description="Ranks that it has.")
    nodes: tuple[Text, ...] | None = Field(default=None, max_length=64, description="Nodes that its pods run on.")
    transport: Text | None = Field(default=None, description="What its ranks talk through: P2P/IPC, NET/Socket, gloo.")
    epoch: tuple[Annotated[Integer, Field(ge=0, le=_MAX_LONG)], ...] | None = Field(
        default=None, max_length=2, description="Start of rank 0's launcher in ms since 1970, and a counter of starts."
    )
    restarts: Count | None = Field(default=None, description="Restarts that count at present: see spec.recovery.")
    startup_seconds: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="How long the last start took."
    )
    timings: dict[str, float] | None = Field(
        default=None, max_length=32, description="Seconds of each phase of the last start."
    )
    last_failure: LastFailure | None = Field(default=None, description="The last death of one of its ranks.")


class FrontendStatus(ApiModel):
    """The frontend pods."""

    replicas: Count | None = Field(default=None, description="Frontend pods.")
    ready_replicas: Count | None = Field(default=None, description="Those that can answer.")


class InferenceModelStatus(ApiModel):
    """What was observed of the InferenceModel."""

    observed_generation: Integer | None = Field(
        default=None, ge=0, le=_MAX_LONG, description="metadata.generation that the status was derived from."
    )
    phase: Phase | None = Field(default=None, description="The whole in one word.")
    conditions: Annotated[tuple[Condition, ...], Field(max_length=16), Unique("type")] | None = Field(
        default=None, description="Facts, each with its reason and what to do next."
    )
    replicas: Count | None = Field(default=None, description="Replicas that exist, ready or not.")
    ready_replicas: Count | None = Field(default=None, description="Replicas that a frontend routes requests to.")
    updated_replicas: Count | None = Field(default=None, description="Replicas that run the present revision.")
    ranks: Text | None = Field(default=None, description="Ranks that are ready, of those wanted: 4/4.")
    selector: Annotated[str, Field(max_length=4096)] | None = Field(
        default=None, description="Label selector of one pod for each replica, for autoscalers."
    )
    url: Text | None = Field(default=None, description="Address of the OpenAI API within the cluster.")
    model: ServedModel | None = Field(default=None, description="The model that is served.")
    cache: CacheStatus | None = Field(default=None, description="The fetch of a model from the Hub.")
    revision: Text | None = Field(default=None, description="Revision of the engine pods' template.")
    replica_statuses: Annotated[tuple[ReplicaStatus, ...], Field(max_length=1000), Unique("name")] | None = Field(
        default=None, description="Each replica, as rank 0 of it reports."
    )
    frontend: FrontendStatus | None = Field(default=None, description="The frontend pods.")
