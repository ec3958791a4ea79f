"""The message formats of this tree: the only place in the compatibility tests that names modules of the product."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, cast
from unittest import mock

import msgspec
import numpy as np

from minisgl.frontend.admin.control import POD_NAME, create_control
from minisgl.frontend.config import RequestLimits
from minisgl.frontend.server.request_tracker import RequestTracker
from minisgl.frontend.tokenizers import TokenizerPool
from minisgl.hub.fetch import fetch
from minisgl.hub.neighbours import FetchRecord
from minisgl.hub.repository import Source
from minisgl.launcher import control
from minisgl.replica import messages as link
from minisgl.replica.restart_log import RestartLog
from minisgl.wire.logits_processors import RowLogitsProcessors, decode_logits_processors
from minisgl.wire.messages import FromScheduler, ToScheduler
from minisgl.wire.plan import IntArray, StepPlan
from minisgl.wire.shared_prefixes import SharedPrefix, decode_prefixes, encode_prefixes
from minisgl.wire.sockets import Codec
from minisgl.wire.status import EngineStatus, Failure, FetchStatus, ReplicaView
from minisgl.wire.text import FromTokenizer, ToTokenizer
from support.compat.codecs import NO_FIELDS, Family, plain, schema, typed


def _paths(*groups: tuple[str, str]) -> frozenset[str]:
    """Paths of fields, given as prefix and names; an empty name is the prefix itself."""
    return frozenset(prefix + name for prefix, names in groups for name in names.split(" "))


NEW_SINCE: Final[dict[str, dict[str, frozenset[str]]]] = {
    "0.1.0": {
        "to_scheduler": _paths(
            ("submit.", "stream remaining_ms grammar thinking allowed_token_ids bad_words logprob_token_ids tenant"),
            ("submit.thinking.", "start end is_open budget"),
            ("hello.", "proof"),
            ("end_drain", ""),
        ),
        "to_tokenizer": _paths(
            ("generate.", "stream tools structured_output separate_reasoning thinking_budget add_generation_prompt"),
            ("generate.", "continue_final_message truncate_prompt_tokens bad_words stop_regex skip_special_tokens"),
            ("generate.", "return_token_ids messages[].reasoning messages[].custom_role params.allowed_token_ids"),
            ("generate.", "thinking documents soft_limits add_special_tokens tenant"),
            ("generate.", "params.logprob_token_ids truncation_side"),
            ("generate.tools.", "definitions choice name parallel"),
            ("generate.structured_output.", "kind value compact"),
            ("encode.", "tools thinking documents continue_final_message"),
            ("encode.messages[].", "reasoning custom_role"),
            ("encode.tools.", "definitions choice name parallel"),
            ("check_constraints", " .id .constraints .constraints[].kind .constraints[].value .constraints[].compact"),
            ("requests_wait", " .waits"),
        ),
        "from_scheduler": _paths(
            ("status.", "attention compiled_after_ready data_types deferred"),
            ("status.data_types[].", "kv_cache weights"),
            ("tokens.", "preemptions"),
            ("welcome.", "features"),
        ),
        "to_leader": _paths(("progress.", "hangs"), ("join.", "proof")),
        "from_leader": _paths(("begin.", "plans_token")),
        "to_child": _paths(("start.", "heartbeats")),
        "from_child": _paths(
            ("heartbeat", " .step_age"),
            ("ready.", "attention data_types"),
            ("ready.data_types.", "kv_cache weights"),
        ),
        "engine_status": _paths(
            ("engine.", "attention data_types peer_secret"), ("engine.data_types.", "kv_cache weights")
        ),
        "fetch_status": _paths((".", "needed_bytes free_bytes")),
        "fetch_record": _paths((".", "owner files")),
        "from_tokenizer": _paths(
            ("state.", "parked features no_engines model.longest_token model.capabilities"),
            ("checked_constraints", " .id .problems .problems[].code .problems[].message"),
            ("state.status.", "attention compiled_after_ready data_types deferred"),
            ("state.status.data_types[].", "kv_cache weights"),
            ("state.replicas[].", "queue_ms kv_usage"),
            ("accepted.", "prompt_token_ids ignored"),
            ("continued", " .id"),
            ("texts.", "prompt_scored reasoning token_ids tool_calls"),
            ("texts.scored{}[][", "5] 6]"),
            ("texts.prompt_scored{}[][", "0] 1] 2] 3] 4] 5] 6]"),
            ("texts.finished[].", "continued matched_stop preemptions reasoning_tokens tool_calls"),
            ("texts.tool_calls{}[][", "0] 1] 2] 3]"),
        ),
    }
}
"""Version → family → paths of fields and message types, as in `Family.schema`, that the version does not know. It must
be able to read messages with such fields, and gets messages of such types only when it has said that it knows them."""

_NEW_IN_FRONTEND_STATUS: Final = frozenset({"held", "running", "idle_seconds", "peer_secret"})
_NEW_IN_REPLICA_VIEWS: Final = frozenset({"queue_ms", "kv_usage"})
"""Fields of a frontend's /status that version 0.1.0 does not know. Its operator reads the body as a dictionary and
ignores them."""

_PLAN_ARRAYS: Final = (
    *("decode_slots", "decode_positions", "prefill_slots", "prefill_starts", "prefill_lengths", "prefill_sample"),
    *("prefill_tokens", "page_updates", "new_rows", "poison_pages"),
)
_ROW_ARRAYS: Final = {
    **dict.fromkeys(("masked_ids", "bias_ids", "prompt", "output"), np.int32),
    "bias_values": np.float32,
}


def families(version: str) -> dict[str, Family]:
    """By name. What is new since `version` is left out of decoded values."""

    def new(family: str) -> frozenset[str]:
        return NEW_SINCE[version].get(family, NO_FIELDS)

    def codec(name: str, union: Any) -> Family:
        messages: Codec[Any] = Codec(union)
        return typed(union, messages.decode, messages.encode, "msgpack", new(name))

    def json(name: str, declared: Any, read: Callable[[bytes], Any], write: Callable[[Any], bytes]) -> Family:
        return typed(declared, read, write, "json", new(name))

    def document(name: str, declared: Any) -> Family:
        return json(name, declared, msgspec.json.Decoder(declared).decode, msgspec.json.encode)

    return {
        "to_scheduler": codec("to_scheduler", ToScheduler),
        "from_scheduler": codec("from_scheduler", FromScheduler),
        "to_tokenizer": codec("to_tokenizer", ToTokenizer),
        "from_tokenizer": codec("from_tokenizer", FromTokenizer),
        "step_plan": Family(_encode_plan, _decode_plan),
        "to_leader": json("to_leader", link.ToLeader, link.to_leader.decode, _link_line),
        "from_leader": json("from_leader", link.FromLeader, link.from_leader.decode, _link_line),
        "to_child": json("to_child", control.ToChild, control.to_child.decode, control.encode),
        "from_child": json("from_child", control.FromChild, control.from_child.decode, control.encode),
        "engine_status": document("engine_status", EngineStatus),
        "frontend_status": Family(_frontend_status, msgspec.json.decode),
        "fetch_status": document("fetch_status", FetchStatus),
        "fetch_record": document("fetch_record", FetchRecord),
        "restarts": Family(
            _write_restarts, lambda frame: plain(_read_restarts(frame), new("restarts")), schema(list[Failure])
        ),
    }


def _link_line(message: Any) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def _encode_plan(values: dict[str, Any]) -> bytes:
    groups = [SharedPrefix(group["pages"], np.array(group["rows"], np.int32)) for group in values["shared_prefixes"]]
    return StepPlan.build(
        epoch=values["epoch"],
        step=values["step"],
        logits_processors=np.concatenate([np.empty(0, np.int32), *map(_encode_row, values["controls"])]),
        shared_prefixes=encode_prefixes(groups),
        **{name: np.array(values[name], np.int32) for name in _PLAN_ARRAYS},
    ).encode()


def _encode_row(values: dict[str, Any]) -> IntArray:
    arrays = {name: np.array(values[name], kind) for name, kind in _ROW_ARRAYS.items()}
    return RowLogitsProcessors(**cast(Any, values | arrays)).encode()


def _decode_plan(frame: bytes) -> dict[str, Any]:
    plan = StepPlan.decode(frame)
    rows = [asdict(row) for row in decode_logits_processors(plan.logits_processors)]
    # A bit of the slot, which version 0.1.0 never sets.
    assert not any(row.pop("late") for row in rows)
    assert not any(len(row.pop("logprob_ids")) for row in rows)
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
        restart_log = RestartLog(path)
        for failure in msgspec.convert(values, list[Failure]):
            restart_log.add(failure)
        return path.read_bytes()


def _read_restarts(frame: bytes) -> list[Failure]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "restarts.json"
        path.write_bytes(frame)
        return RestartLog(path).failures


def commit_of_fetched(directory: Path) -> str:
    """The commit of the checkpoint that a fetch finds in `directory`."""
    source = Source(repository="owner/name", revision="main", endpoint=None)
    return fetch(source, directory, lambda _: None).commit


class _Tokenizers:
    """Says of the engines what a body of /status is to say."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.is_draining = values["draining"]
        self._ready = values["ready"]
        self._replicas = msgspec.convert(values["replicas"], list[ReplicaView])
        self.num_held = 0
        self.requests = RequestTracker(RequestLimits())

    def not_ready_reason(self) -> str | None:
        return None if self._ready else "no engine"

    def replicas(self) -> list[ReplicaView]:
        return self._replicas


def _frontend_status(values: dict[str, Any]) -> bytes:
    """The body that a frontend's control port answers."""
    app = create_control(cast(TokenizerPool, _Tokenizers(values)), lambda: None)
    body = b""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        nonlocal body
        body += message.get("body", b"")

    request = {"type": "http", "method": "GET", "path": "/status", "query_string": b"", "headers": []}
    scope = {**request, "server": ("10.0.0.1", 8080)}
    with mock.patch.dict(os.environ, {POD_NAME: values["pod"]}):
        asyncio.run(cast(Any, app(scope, receive, send)))
    answered = {name: value for name, value in msgspec.json.decode(body).items() if name not in _NEW_IN_FRONTEND_STATUS}
    answered["replicas"] = [
        {name: value for name, value in view.items() if name not in _NEW_IN_REPLICA_VIEWS}
        for view in answered["replicas"]
    ]
    return msgspec.json.encode(answered)
