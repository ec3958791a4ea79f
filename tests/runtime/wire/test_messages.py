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

from minisgl.wire.messages import FEATURES, Abort, Ack, FromScheduler, Hello, Tokens, ToScheduler
from minisgl.wire.sockets import MAX_MESSAGE_BYTES, Codec, WireError, open_socket, try_send
from support.messages import submit_of

TO_SCHEDULER: Codec[ToScheduler] = Codec(ToScheduler)


def test_messages_are_decoded_as_encoded() -> None:
    submit = submit_of(id=bytes(16), prompt=b"1234", max_tokens=3, seed=-5, stop_token_ids=(1, 2), temperature=0.5)
    for message in (submit, Abort(bytes(16)), Hello(1, "me")):
        assert TO_SCHEDULER.decode(TO_SCHEDULER.encode(message)) == message


def test_a_request_needs_the_features_that_it_uses_and_an_engine_has_all() -> None:
    plain = submit_of(id=bytes(16), prompt=b"1234", max_tokens=3, seed=1, priority=5, stream=False)
    assert plain.features == {"submit", "max_tokens", "seed"}
    fields: dict[str, Any] = {"bad_words": ((1, 2),), "logprob_token_ids": (1,), "logprobs": 0}
    assert submit_of(id=bytes(16), prompt=b"1234", **fields).features == {"submit", *fields}
    assert {"submit", "abort", "end_drain", *fields} < set(FEATURES)


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
