"""The table's entries: what a gateway knows of each model. Pure functions from objects of the API server."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, Literal, NamedTuple

import msgspec

from minisgl.wire.status import HTTP_PORT

State = Literal["ready", "idle", "starting", "suspended", "failed"]
"""Answers requests; has no replica until the next request; will answer; is meant to have no replica; needs a change."""

_MAX_REASON: Final = 500
"""Characters of a reason."""


class Address(NamedTuple):
    """TCP address of an HTTP server."""

    host: str
    port: int

    @property
    def netloc(self) -> str:
        """As in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Key(NamedTuple):
    """Identity of a model in the table."""

    namespace: str
    """Empty without Kubernetes."""
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One model. It is `names` that requests call it by, beside its qualified name, which is its key."""

    key: Key
    names: tuple[str, ...]
    """Names that its frontends know, at least one; answers contain the first."""
    state: State
    reason: str = ""
    """Why the state is not `ready`."""
    addresses: tuple[Address, ...]
    """Where its frontends answer, at least one."""
    created: int = 0
    """Unix time of its creation."""
    max_model_len: int | None = None
    task: str | None = None
    capabilities: Any = None
    """As its frontends list them; None: unknown."""


class _Condition(msgspec.Struct):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class _ServedModel(msgspec.Struct, rename="camel"):
    task: str | None = None
    max_model_len: int | None = None


class _Status(msgspec.Struct, rename="camel"):
    conditions: list[_Condition] | None = None
    model: _ServedModel | None = None


class _SpecModel(msgspec.Struct, rename="camel"):
    served_names: list[str] | None = None


class _Spec(msgspec.Struct):
    model: _SpecModel = msgspec.field(default_factory=_SpecModel)


class Metadata(msgspec.Struct, rename="camel"):
    """Metadata of an object, as far as the gateway needs it."""

    name: str = ""
    namespace: str = ""
    resource_version: str = ""
    creation_timestamp: datetime | None = None


class InferenceModel(msgspec.Struct):
    """An InferenceModel, as far as the gateway needs it: everything else is skipped when it is read."""

    metadata: Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


def model_of(found: InferenceModel) -> Model:
    """Return the table's entry of an InferenceModel."""
    metadata, served = found.metadata, found.status.model or _ServedModel()
    state, reason = _state({condition.type: condition for condition in found.status.conditions or ()})
    created = metadata.creation_timestamp
    return Model(
        key=Key(metadata.namespace, metadata.name),
        names=tuple(found.spec.model.served_names or ()) or (metadata.name,),
        state=state,
        reason=reason[:_MAX_REASON],
        addresses=(frontend_address(metadata.namespace, metadata.name),),
        created=0 if created is None else int(created.timestamp()),
        max_model_len=served.max_model_len,
        task=served.task,
    )


def frontend_address(namespace: str, name: str) -> Address:
    """Return the address of the Service that selects the frontends of a model. It has no cluster domain: the resolver
    of a pod adds its own."""
    return Address(f"{name}-frontend.{namespace}.svc", HTTP_PORT)


def _state(conditions: dict[str, _Condition]) -> tuple[State, str]:
    """Return the state by the conditions of an InferenceModel, and its reason."""
    ready = conditions.get("Ready")
    if ready is None:
        return "starting", "the operator has not reported a state yet"
    explained = f"{ready.reason}: {ready.message}" if ready.message else ready.reason
    if ready.status == "True":
        if ready.reason == "ScaledToZero":
            return "idle", explained
        if ready.reason == "Suspended":
            return "suspended", explained
        # A change that was given up makes a model `Stalled` that serves all the same.
        return "ready", ""
    stalled = conditions.get("Stalled")
    return ("failed" if stalled is not None and stalled.status == "True" else "starting"), explained
