"""One HTTP request and its answer on the way: tokenizer workers put news in, the handler takes them out.

Delta that the handler has not taken yet are joined, so a client that reads slowly gets fewer and longer pieces, and
what waits for it is never more than its answer. While the handler waits with nothing left to send, a text may go past
it, see `ResponseStream.news`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from minisgl.frontend.errors import ApiError, ClientGone
from minisgl.wire.text import Finished, ScoredToken


class Delta(msgspec.Struct, frozen=True):
    """What is new of one choice."""

    choice: int
    text: str
    tokens: int
    """Sampled so far."""
    scored: Sequence[ScoredToken]
    """Where log-probabilities were asked for: the tokens of the text."""
    finished: Finished | None


class ResponseStream:
    """Choices are numbered from 0."""

    def __init__(self, choices: int) -> None:
        self.prompt_tokens = [0] * choices
        self.finished: list[Finished | None] = [None] * choices
        self._to_accept = choices
        self._unfinished = choices
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._scored: dict[int, list[ScoredToken]] = {}
        self._tokens = [0] * choices
        self._new: set[int] = set()
        self._error: ApiError | ClientGone | None = None
        self._waiter: asyncio.Future[None] | None = None
        """Of the handler, while it waits. Only one task does, so this need not be an Event, which costs more."""
        self._interrupted = False
        self._fast_path: Callable[[str], bool] | None = None
        """Takes texts in the handler's place. Set only while it waits and has nothing to wake up for."""

    @property
    def ended(self) -> bool:
        """Every choice has its end."""
        return not self._unfinished

    @property
    def has_more(self) -> bool:
        """There is, or will be, something for `news` to give."""
        return bool(self._unfinished or self._new)

    def accept(self, choice: int, prompt_tokens: int) -> None:
        self.prompt_tokens[choice] = prompt_tokens
        self._to_accept -= 1
        self._wake()

    def push(self, choice: int, text: str, tokens: int, scored: Sequence[ScoredToken]) -> None:
        """`tokens`: sampled so far."""
        if self._fast_path is not None and self._fast_path(text):
            return
        self._texts[choice].append(text)
        self._tokens[choice] = tokens
        if scored:
            self._scored.setdefault(choice, []).extend(scored)
        self._new.add(choice)
        self._wake()

    def finish(self, choice: int, finished: Finished) -> None:
        self.finished[choice] = finished
        self._tokens[choice] = finished.completion_tokens
        self._unfinished -= 1
        self._new.add(choice)
        self._wake()

    def fail(self, error: ApiError | ClientGone) -> None:
        """The answer will never be whole. The first failure counts."""
        if self._error is None and not self.ended:
            self._error = error
        self._wake()

    async def accepted(self) -> None:
        """Wait until the engine has queued every choice. Raises ApiError or ClientGone."""
        while self._to_accept:
            await self._next_event()

    async def news(self, fast_path: Callable[[str], bool] | None = None) -> list[Delta]:
        """Wait for what is new, in the order of choices; nothing after `interrupt`. Raises ApiError or ClientGone.

        `fast_path` is offered each text that comes alone and returns whether it was written: such a text is not
        returned again. It is used only for a single choice whose tokens and scores are not needed.
        """
        while not self._new:
            self._fast_path = fast_path
            await self._next_event()
            if self._interrupted:
                break
        self._interrupted = False
        self._raise_error()
        news = []
        for choice in sorted(self._new):
            text = "".join(self._texts[choice])
            scored = self._scored.pop(choice, ())
            news.append(Delta(choice, text, self._tokens[choice], scored, self.finished[choice]))
            self._texts[choice].clear()
        self._new.clear()
        return news

    def interrupt(self) -> None:
        """Whoever waits for news goes on without."""
        if self._waiter is not None:
            self._interrupted = True
            self._wake()

    def _wake(self) -> None:
        # From now on everything has to wait for the handler, or it would overtake what wakes it up.
        self._fast_path = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _next_event(self) -> None:
        self._raise_error()
        assert self._waiter is None, "only the handler of the request waits for news"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = self._fast_path = None
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
