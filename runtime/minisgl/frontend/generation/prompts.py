"""Prompts of a request body: a text, token ids, or a list of either."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.json_body import invalid
from minisgl.wire.text import ChatMessage, Pooling

MAX_PROMPTS: Final = 128


class Prompt(msgspec.Struct, frozen=True):
    """One prompt; exactly one of the three is given."""

    messages: tuple[ChatMessage, ...] | None = None
    text: str | None = None
    tokens: bytes | None = None
    """int32"""
    pooling: Pooling | None = None
    """As in `Generate`."""


def parse_prompts(value: str | list[Any], param: str, most: int = MAX_PROMPTS) -> Iterator[Prompt]:
    """Yield the prompts in the field `param`, which has at most `most` of them. Raises ApiError."""
    if isinstance(value, str):
        yield Prompt(text=value)
        return
    if not value:
        raise invalid(param, "expected at least one prompt or token id")
    if type(value[0]) is int:
        yield Prompt(tokens=_token_ids(value, param))
        return
    if len(value) > most:
        raise invalid(param, f"expected at most {most} prompts")
    for i, prompt in enumerate(value):
        if isinstance(prompt, str):
            yield Prompt(text=prompt)
        elif isinstance(prompt, list) and prompt:
            yield Prompt(tokens=_token_ids(prompt, f"{param}[{i}]"))
        else:
            raise invalid(f"{param}[{i}]", "expected a string or a list of token ids")


def _token_ids(ids: list[Any], path: str) -> bytes:
    if set(map(type, ids)) != {int}:
        raise invalid(path, "expected token ids, which are integers")
    if min(ids) < 0:
        raise ApiError(400, "invalid_token", f"{path}: token ids must not be negative", path)
    try:
        return array("i", ids).tobytes()
    except OverflowError:
        raise invalid(path, "expected token ids of the model's vocabulary") from None
