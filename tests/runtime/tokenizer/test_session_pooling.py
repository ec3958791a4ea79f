"""Requests for pooled outputs in a session."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from msgspec import ValidationError

from minisgl.tokenizer.pooling_prompts import PooledPrompt
from minisgl.tokenizer.session import Session
from minisgl.wire.messages import Ack, FirstTokenWait, Pool, Pooled
from minisgl.wire.text import Accepted, Finished, Generate, Pooling, TextFailed, Texts
from support.frontend.fake_scheduler import card

ID, OTHER = b"a" * 16, b"b" * 16
PROMPT = array("i", [1, 2, 3])


def text(request_id: bytes = ID) -> Generate:
    return Generate(id=request_id, prompt="Hello", pooling=Pooling(), tenant=b"t")


def session_of(**fields: object) -> Session:
    session = Session()
    session.open(card(**{"task": "embed", "output_size": 2, "max_model_len": 3} | fields))
    return session


def output(ids: bytes, values: list[float], cached: tuple[int, ...] = (0,)) -> Pooled:
    waits = {0: FirstTokenWait(0.5, 0.25)}
    columns = np.array(cached, np.int32).tobytes(), np.array(values, np.float32).tobytes()
    return Pooled(ids=ids, cached=columns[0], values=columns[1], waits=waits)


def test_a_text_is_submitted_and_ends_with_its_values() -> None:
    session = session_of()
    assert session.begin(text())
    pair = PooledPrompt("i", PROMPT)
    pair.second_text = 2
    session.encoded(ID, pair)
    assert session.take_to_scheduler() == [Pool(id=ID, prompt=PROMPT.tobytes(), second_text=2, tenant=b"t")]
    session.acked(Ack(ID))
    assert session.take_to_frontend() == [Accepted(ID, 3)]
    session.receive(output(OTHER + ID, [9, 9, 1, 2], (0, 1)))
    [message] = session.take_to_frontend()
    assert isinstance(message, Texts)
    assert message.finished == [
        Finished(
            id=ID,
            reason="stop",
            prompt_tokens=3,
            cached_tokens=1,
            completion_tokens=0,
            values=np.array([1, 2], np.float32).tobytes(),
        )
    ]
    assert ID not in session and not session.take_to_scheduler()


def test_outputs_of_another_size_change_nothing() -> None:
    session = session_of()
    session.begin(text())
    session.encoded(ID, PROMPT)
    with pytest.raises(ValidationError):
        session.receive(output(ID, [1, 2, 3]))
    assert ID in session


def test_a_text_that_is_too_long_fails() -> None:
    session = session_of(max_model_len=2)
    session.begin(text())
    session.encoded(ID, PROMPT)
    [failed] = session.take_to_frontend()
    assert isinstance(failed, TextFailed) and failed.code == "context_length_exceeded"
    assert "truncate_prompt_tokens" in failed.message and not session.take_to_scheduler()


def test_requests_of_another_task_are_refused() -> None:
    for session, request in (
        (session_of(), Generate(id=ID, prompt="Hello")),
        (session_of(task="generate", output_size=0), text()),
    ):
        assert not session.begin(request)
        [failed] = session.take_to_frontend()
        assert isinstance(failed, TextFailed) and failed.code == "wrong_task"
