"""The message formats of version 0.2.0, by the names that its modules have there. Runs only with its code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from minisgl.hub.neighbours import FetchRecord
from minisgl.replica import messages as link
from minisgl.wire.messages import FromScheduler, ToScheduler
from minisgl.wire.sockets import Codec
from minisgl.wire.status import EngineStatus, FetchStatus, FrontendStatus
from support.compat.codecs import Family, typed


def families() -> dict[str, Family]:
    """By name."""

    def codec(union: Any) -> Family:
        messages: Codec[Any] = Codec(union)
        return typed(union, messages.decode, messages.encode, "msgpack")

    def greeting(declared: Any, read: Callable[[bytes], Any]) -> Family:
        return typed(declared, read, lambda message: msgspec.json.encode(message) + b"\n", "json")

    def document(declared: Any) -> Family:
        return typed(declared, msgspec.json.Decoder(declared).decode, msgspec.json.encode, "json")

    return {
        "to_scheduler": codec(ToScheduler),
        "from_scheduler": codec(FromScheduler),
        "to_leader": greeting(link.Join, link.to_leader.decode),
        "from_leader": greeting(link.Accepted | link.Rejected, link.from_leader.decode),
        "engine_status": document(EngineStatus),
        "frontend_status": document(FrontendStatus),
        "fetch_status": document(FetchStatus),
        "fetch_record": document(FetchRecord),
    }
