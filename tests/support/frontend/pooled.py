"""Models that pool texts, and scripts of their outputs, for a `ScriptedStack`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minisgl.config import Task
from minisgl.wire.text import Accepted, Finished, FromTokenizer, Generate, SamplingDefaults, ServedModel, Texts
from support.frontend.fake_scheduler import card
from support.frontend.scripted import Script

SIZE = 4


def model(task: Task, size: int = SIZE, **changes: Any) -> ServedModel:
    served = card("org/tiny", task=task, output_size=size, **changes)
    return ServedModel(card=served, epoch=(1, 1), defaults=SamplingDefaults(), capabilities=("chat",))


def embedding(text: str, size: int = SIZE) -> list[float]:
    """Return numbers that tell texts apart."""
    rest = [float(len(text)) / 7, -0.5, 1e-3]
    return [float(sum(text.encode())), *rest, *([0.25] * size)][:size]


def texts_of(request: Generate) -> str:
    """Return all that is pooled, as one text."""
    assert request.pooling is not None, "the request is to be pooled"
    if request.messages is not None:
        return " ".join(message.content or "" for message in request.messages)
    if request.tokens is not None:
        return str(np.frombuffer(request.tokens, "<i4").tolist())
    second = request.pooling.second_text
    return f"{request.prompt}" if second is None else f"{request.prompt}|{second}"


def pooled(values: Callable[[str], Sequence[float]] = embedding, *, last_first: int = 1) -> Script:
    """Return a script that answers each request with numbers of its text. `last_first`: number of requests that are
    answered together, in the order opposite to that of their arrival."""
    waiting: list[FromTokenizer] = []

    def script(request: Generate) -> list[FromTokenizer]:
        text = texts_of(request)
        output = np.array(values(text), "<f4").tobytes()
        finished = Finished(
            id=request.id,
            reason="stop",
            prompt_tokens=len(text),
            cached_tokens=1,
            completion_tokens=0,
            values=output,
        )
        waiting.append(Texts(ids=b"", texts=[], finished=[finished], counts=[]))
        accepted: list[FromTokenizer] = [Accepted(request.id, len(text))]
        if len(waiting) < last_first:
            return accepted
        answers = [*accepted, *reversed(waiting)]
        waiting.clear()
        return answers

    return script
