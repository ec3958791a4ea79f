"""Kubernetes objects as JSON: identity, owner, conditions and times."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import msgspec

Manifest = dict[str, Any]
"""One Kubernetes object as JSON."""
T = TypeVar("T")

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder()


@dataclass(frozen=True, order=True)
class Ref:
    """Kind and name of a child object. Its namespace is the model's."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def copy_of(value: T) -> T:
    """A copy of JSON that shares no dict and no list with it. Encoding and decoding takes an eighth of the time of
    copy.deepcopy, which also looks for references between the parts."""
    copied: T = _DECODER.decode(_ENCODER.encode(value))
    return copied


def ref_of(manifest: Manifest) -> Ref:
    return Ref(manifest["kind"], manifest["metadata"]["name"])


def controller_of(manifest: Manifest) -> Manifest | None:
    """The owner reference with `controller: true`; None without one."""
    owners = manifest["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), None)


def controller_uid(manifest: Manifest) -> str | None:
    """The uid of the object that controls this one; None without a controller."""
    controller = controller_of(manifest)
    return None if controller is None else str(controller["uid"])


def condition_of(manifest: Manifest, type: str) -> Manifest | None:
    """The condition of this type in the object's status."""
    conditions = (manifest.get("status") or {}).get("conditions") or ()
    return next((condition for condition in conditions if condition["type"] == type), None)


def true_condition(manifest: Manifest, type: str) -> Manifest | None:
    """The condition of this type if it is True."""
    found = condition_of(manifest, type)
    return found if found is not None and found["status"] == "True" else None


def has_condition(manifest: Manifest, type: str) -> bool:
    """Whether the condition of this type is True."""
    return true_condition(manifest, type) is not None


def is_deleting(manifest: Manifest) -> bool:
    return manifest["metadata"].get("deletionTimestamp") is not None


def micro_time() -> str:
    """The current time in the format of Kubernetes' MicroTime."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_time(text: str) -> datetime:
    """The moment of a Kubernetes timestamp."""
    return datetime.fromisoformat(text)
