"""Reasoning of an answer, found by token ids, and its budget."""

from __future__ import annotations

from minisgl.wire.messages import Thinking


class Reasoning:
    """Progress of an answer through its reasoning. It is either before or within it, or behind it."""

    def __init__(self, thinking: Thinking, *, once: bool) -> None:
        """`once`: reasoning begins with the first token or not at all, since a grammar applies to all other text.
        Otherwise it may begin anywhere, and again; all of it counts for the budget."""
        self._thinking = thinking
        self._once = once
        self._spent = 0
        """Tokens of reasoning, with its end marker."""
        self._marker: list[int] = []
        """Last tokens, if a marker may begin with them."""
        self.is_open = thinking.is_open
        """The next token belongs to reasoning."""
        self.is_over = False
        """Reasoning has ended, or has not begun in time; it does not begin again."""

    @property
    def opener(self) -> int | None:
        """Token that may begin reasoning besides those that a grammar allows; None: reasoning cannot begin now."""
        return self._thinking.start[0] if self._once and not (self.is_open or self.is_over or self._marker) else None

    @property
    def forced(self) -> int | None:
        """The only token that may come next: the next one of a marker. None: any token may."""
        thinking = self._thinking
        if self.is_open:
            is_spent = 0 <= thinking.budget <= self._spent
            return thinking.end[len(self._marker)] if is_spent else None
        return thinking.start[len(self._marker)] if self._once and self._marker else None

    def consume(self, token: int) -> bool:
        """Advance by a token of the answer. False: it does not belong to reasoning, but to the text behind it."""
        if self.is_over:
            return False
        was_open = self.is_open
        self._spent += was_open
        marker = self._thinking.end if was_open else self._thinking.start
        self._marker = _matched([*self._marker, token], marker)
        if len(self._marker) == len(marker):
            self._marker = []
            self.is_open = not was_open
            self.is_over = was_open and self._once
            return True
        if self._once and not was_open and not self._marker:
            self.is_over = True
            return False
        return was_open or bool(self._marker)


def _matched(tokens: list[int], marker: tuple[int, ...]) -> list[int]:
    """The longest end of `tokens` with which `marker` begins."""
    while tokens and tuple(tokens) != marker[: len(tokens)]:
        tokens = tokens[1:]
    return tokens
