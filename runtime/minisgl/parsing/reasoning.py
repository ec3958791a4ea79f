"""Reasoning: its markers, and whether a prompt ends before, within or behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from minisgl.parsing.reader import Marker


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks its reasoning."""

    name: str
    start: str
    end: str
    is_forced: bool = False
    """Every answer begins with reasoning, even where neither prompt nor answer has the start marker."""
    before: str = ""
    """Text that an answer has before the start marker."""
    label: str = ""
    """Text behind the start marker that names what follows."""
    answer_tags: tuple[str, str] | None = None
    """Texts around the text of an answer."""
    notes: tuple[str, ...] = ()
    """Special tokens that may be within reasoning."""
    inner: tuple[str, ...] = ()
    """Further markers, of which the first two consist."""
    in_channels: bool = False
    """Reasoning is a channel of the answer; see `minisgl.parsing.harmony`."""


class ReasoningState(Enum):
    """Place of the end of a prompt."""

    BEFORE = auto()
    """The answer may begin with reasoning."""
    WITHIN = auto()
    """The answer continues reasoning, which the prompt has opened."""
    BEHIND = auto()
    """The prompt has closed the reasoning of this answer, or the answer has none."""


def prompt_state(
    prompt: Sequence[int],
    start: Marker,
    end: Marker,
    *,
    is_special: Callable[[int], bool],
    text_of: Callable[[Sequence[int]], str],
) -> ReasoningState:
    """Return where the prompt ends. Only the turn of the answer counts: what follows the last special token. Messages
    of users cannot be mistaken for markers, because their text never becomes special or marker tokens."""
    markers = {start.token, end.token} - {None}
    turn = len(prompt)
    while turn:
        token = prompt[turn - 1]
        if token in markers:
            return ReasoningState.WITHIN if token == start.token else ReasoningState.BEHIND
        if is_special(token):
            break
        turn -= 1
    if start.token is not None and end.token is not None:
        return ReasoningState.BEFORE
    text = text_of(prompt[turn:])
    opened, closed = text.rfind(start.text), text.rfind(end.text)
    if opened == closed:
        return ReasoningState.BEFORE
    return ReasoningState.WITHIN if opened > closed else ReasoningState.BEHIND
