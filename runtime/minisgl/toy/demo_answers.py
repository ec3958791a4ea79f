"""Answers that the demo model is trained on, from demo_answers.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec


class DemoAnswer(msgspec.Struct, frozen=True):
    answer: str
    questions: tuple[str, ...]
    """Questions with this answer. The model gives exactly this answer to the first one; tests check it."""


class _File(msgspec.Struct):
    answers: tuple[DemoAnswer, ...]


DEMO_ANSWERS: Final = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=_File).answers
