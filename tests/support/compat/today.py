"""The message formats of this tree: the only place in the compatibility tests that names modules of the product."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from minisgl.hub.fetch import fetch
from minisgl.hub.neighbours import FetchRecord
from minisgl.hub.repository import Source
from minisgl.replica import messages as link
from minisgl.wire.messages import FromScheduler, ToScheduler
from minisgl.wire.sockets import Codec
from minisgl.wire.status import EngineStatus, FetchStatus, FrontendStatus
from support.compat.codecs import Family, typed


def families(known: Mapping[str, Collection[str]]) -> dict[str, Family]:
    """By name. Decoded values have only the fields whose paths another version has in `known`."""

    def codec(name: str, union: Any) -> Family:
        messages: Codec[Any] = Codec(union)
        return typed(union, messages.decode, messages.encode, "msgpack", known[name])

    def greeting(name: str, declared: Any, read: Callable[[bytes], Any]) -> Family:
        return typed(declared, read, lambda message: msgspec.json.encode(message) + b"\n", "json", known[name])

    def document(name: str, declared: Any) -> Family:
        return typed(declared, msgspec.json.Decoder(declared).decode, msgspec.json.encode, "json", known[name])

    return {
        "to_scheduler": codec("to_scheduler", ToScheduler),
        "from_scheduler": codec("from_scheduler", FromScheduler),
        "to_leader": greeting("to_leader", link.Join, link.to_leader.decode),
        "from_leader": greeting("from_leader", link.Accepted | link.Rejected, link.from_leader.decode),
        "engine_status": document("engine_status", EngineStatus),
        "frontend_status": document("frontend_status", FrontendStatus),
        "fetch_status": document("fetch_status", FetchStatus),
        "fetch_record": document("fetch_record", FetchRecord),
    }


def commit_of_fetched(directory: Path) -> str:
    """The commit of the checkpoint that a fetch finds in `directory`."""
    source = Source(repository="owner/name", revision="main", endpoint=None)
    return fetch(source, directory, lambda _: None).commit
