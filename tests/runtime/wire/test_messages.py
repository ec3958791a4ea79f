"""Messages are typed and limited in size; other frames are rejected."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from minisgl.wire.messages import Abort, Ack, FromScheduler, Hello, Submit, Thinking, Tokens, ToScheduler
from minisgl.wire.sockets import MAX_MESSAGE_BYTES, Codec, WireError, open_socket, try_send
from support.compat.today import NEW_SINCE

TO_SCHEDULER: Codec[ToScheduler] = Codec(ToScheduler)

NEEDED: dict[str, dict[str, Any]] = {
    "grammar": {"grammar": "{}"},
    "allowed_token_ids": {"allowed_token_ids": (1,)},
    "bad_words": {"bad_words": ((1, 2),)},
    "logprob_token_ids": {"logprob_token_ids": (1,), "logprobs": 0},
    "thinking.budget": {"thinking": Thinking(start=(1,), end=(2,), budget=0)},
}
"""Values that use each new field without which the answer would be another one."""
IGNORED = {"stream", "tenant", "remaining_ms", "thinking", "thinking.start", "thinking.end", "thinking.is_open"}
"""New fields that an engine need not know: alone, they do not change the answer."""


def test_messages_are_decoded_as_encoded() -> None:
    submit = Submit(id=bytes(16), prompt=b"1234", max_tokens=3, seed=-5, stop_token_ids=(1, 2), temperature=0.5)
    for message in (submit, Abort(bytes(16)), Hello(1, "me")):
        assert TO_SCHEDULER.decode(TO_SCHEDULER.encode(message)) == message


def test_every_field_that_is_new_since_0_1_0_must_be_known_to_the_engine_or_may_be_ignored() -> None:
    paths = NEW_SINCE["0.1.0"]["to_scheduler"]
    new = {path.removeprefix("submit.") for path in paths if path.startswith("submit.")}
    assert new == NEEDED.keys() | IGNORED


@pytest.mark.parametrize("name", NEEDED)
def test_a_request_names_the_new_field_that_it_uses(name: str) -> None:
    submit = Submit(id=bytes(16), prompt=b"1234", max_tokens=3, seed=1, **NEEDED[name])
    assert submit.newer_fields == (name,)


def test_a_request_names_all_new_fields_that_it_uses_and_none_else() -> None:
    least = Submit(id=bytes(16), prompt=b"1234", max_tokens=3, seed=1)
    thinking = Thinking(start=(1,), end=(2,), is_open=True)
    ignored = {"stream": False, "tenant": b"t", "remaining_ms": 5, "thinking": thinking}
    assert msgspec.structs.replace(least, **ignored).newer_fields == ()
    fields = {field: value for values in NEEDED.values() for field, value in values.items()}
    assert set(msgspec.structs.replace(least, **ignored | fields).newer_fields) == set(NEEDED)


@given(st.binary(max_size=300))
def test_random_bytes_are_rejected(frame: bytes) -> None:
    with pytest.raises(WireError):
        TO_SCHEDULER.decode(frame)


def test_pickle_and_messages_of_the_other_direction_are_rejected() -> None:
    for frame in (pickle.dumps(Hello), TO_SCHEDULER.encode(Ack(bytes(16)))):
        with pytest.raises(WireError, match="cannot decode a message"):
            TO_SCHEDULER.decode(frame)


def test_columns_of_different_length_are_rejected() -> None:
    codec: Codec[FromScheduler] = Codec(FromScheduler)
    message = codec.decode(
        codec.encode(Tokens(ids=bytes(16), index=bytes(4), token=bytes(8), finish=bytes(1), cached=bytes(4)))
    )
    assert isinstance(message, Tokens)
    with pytest.raises(msgspec.ValidationError, match="differ in length"):
        message.rows()


def test_a_peer_that_exceeds_the_size_limit_is_disconnected(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    router = open_socket(context, zmq.ROUTER)
    router.bind(f"ipc://{tmp_path}/s")
    dealer = open_socket(context, zmq.DEALER)
    dealer.connect(f"ipc://{tmp_path}/s")
    dealer.send(b"hello")
    assert router.recv_multipart()[1] == b"hello"
    dealer.send(bytes(MAX_MESSAGE_BYTES + 1))
    dealer.send(b"after")
    frames = router.recv_multipart()
    assert frames[1] == b"after", "the oversized message never arrives"
    context.destroy(linger=0)


def test_sending_never_blocks(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    push = open_socket(context, zmq.PUSH, limit=4)
    push.bind(f"ipc://{tmp_path}/s")
    assert not try_send(push, [b"x"]), "nobody is there"
    router = open_socket(context, zmq.ROUTER)
    router.bind(f"ipc://{tmp_path}/r")
    assert not try_send(router, [b"nobody", b"x"]), "an unknown peer is an error, not a silent drop"
    context.destroy(linger=0)
