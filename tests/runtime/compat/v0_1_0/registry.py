"""The message formats of version 0.1.0, by the names that its modules have there. Runs only with its code."""

from __future__ import annotations

import asyncio
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, cast
from unittest import mock

import msgspec
import numpy as np
from minisgl.frontend.control import POD_NAME, create_control
from minisgl.launcher.engine_status import EngineStatus
from minisgl.launcher.failures import Failure
from minisgl.launcher.history import History
from minisgl.launcher.model_fetch import FetchRecord, FetchStatus
from minisgl.wire.row_controls import RowControls, decode_controls

from minisgl.frontend.tokenizers import Tokenizers
from minisgl.launcher import control, link
from minisgl.wire.messages import FromScheduler, ToScheduler
from minisgl.wire.plan import IntArray, StepPlan
from minisgl.wire.shared_prefixes import SharedPrefix, decode_prefixes, encode_prefixes
from minisgl.wire.sockets import Codec
from minisgl.wire.text import FromTokenizer, ReplicaState, ToTokenizer
from support.compat.codecs import Family, plain, schema, typed

_PLAN_ARRAYS: Final = (
    *("decode_slots", "decode_positions", "prefill_slots", "prefill_starts", "prefill_lengths", "prefill_sample"),
    *("prefill_tokens", "page_updates", "new_rows", "poison_pages"),
)
_ROW_ARRAYS: Final = {
    **dict.fromkeys(("masked_ids", "bias_ids", "prompt", "output"), np.int32),
    "bias_values": np.float32,
}


def families() -> dict[str, Family]:
    """By name."""

    def codec(union: Any) -> Family:
        messages: Codec[Any] = Codec(union)
        return typed(union, messages.decode, messages.encode, "msgpack")

    def document(declared: Any) -> Family:
        return typed(declared, msgspec.json.Decoder(declared).decode, msgspec.json.encode, "json")

    return {
        "to_scheduler": codec(ToScheduler),
        "from_scheduler": codec(FromScheduler),
        "to_tokenizer": codec(ToTokenizer),
        "from_tokenizer": codec(FromTokenizer),
        "step_plan": Family(_encode_plan, _decode_plan),
        "to_leader": typed(link.ToLeader, link.to_leader.decode, _link_line, "json"),
        "from_leader": typed(link.FromLeader, link.from_leader.decode, _link_line, "json"),
        "to_child": typed(control.ToChild, control.to_child.decode, control.encode, "json"),
        "from_child": typed(control.FromChild, control.from_child.decode, control.encode, "json"),
        "engine_status": document(EngineStatus),
        "frontend_status": Family(_frontend_status, msgspec.json.decode),
        "fetch_status": document(FetchStatus),
        "fetch_record": document(FetchRecord),
        "restarts": Family(_write_restarts, lambda frame: plain(_read_restarts(frame)), schema(list[Failure])),
    }


def _link_line(message: Any) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def _encode_plan(values: dict[str, Any]) -> bytes:
    groups = [SharedPrefix(group["pages"], np.array(group["rows"], np.int32)) for group in values["shared_prefixes"]]
    return StepPlan.build(
        epoch=values["epoch"],
        step=values["step"],
        controls=np.concatenate([np.empty(0, np.int32), *map(_encode_row, values["controls"])]),
        shared_prefixes=encode_prefixes(groups),
        **{name: np.array(values[name], np.int32) for name in _PLAN_ARRAYS},
    ).encode()


def _encode_row(values: dict[str, Any]) -> IntArray:
    arrays = {name: np.array(values[name], kind) for name, kind in _ROW_ARRAYS.items()}
    return RowControls(**cast(Any, values | arrays)).encode()


def _decode_plan(frame: bytes) -> dict[str, Any]:
    plan = StepPlan.decode(frame)
    rows = [asdict(row) for row in decode_controls(plan.controls)]
    groups = decode_prefixes(plan.shared_prefixes, len(plan.decode_slots))
    return {
        "epoch": plan.epoch,
        "step": plan.step,
        **{name: getattr(plan, name).tolist() for name in _PLAN_ARRAYS},
        "controls": [row | {name: row[name].tolist() for name in _ROW_ARRAYS} for row in rows],
        "shared_prefixes": [{"pages": group.pages, "rows": group.rows.tolist()} for group in groups],
    }


def _write_restarts(values: Any) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "restarts.json"
        history = History(path)
        for failure in msgspec.convert(values, list[Failure]):
            history.add(failure)
        return path.read_bytes()


def _read_restarts(frame: bytes) -> list[Failure]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "restarts.json"
        path.write_bytes(frame)
        return History(path).failures


class _Tokenizers:
    """Says of the engines what a body of /status is to say."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.is_leaving = values["draining"]
        self._ready = values["ready"]
        self._replicas = msgspec.convert(values["replicas"], list[ReplicaState])

    def not_ready(self) -> str | None:
        return None if self._ready else "no engine"

    def replicas(self) -> list[ReplicaState]:
        return self._replicas


def _frontend_status(values: dict[str, Any]) -> bytes:
    """The body that a frontend's control port answers."""
    app = create_control(cast(Tokenizers, _Tokenizers(values)), lambda: None)
    body = b""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        nonlocal body
        body += message.get("body", b"")

    scope = {"type": "http", "method": "GET", "path": "/status", "query_string": b"", "headers": []}
    with mock.patch.dict(os.environ, {POD_NAME: values["pod"]}):
        asyncio.run(cast(Any, app(scope, receive, send)))
    return body
