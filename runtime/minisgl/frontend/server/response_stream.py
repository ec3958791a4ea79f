"""The output of one generation request: links to tokenizer workers put deltas in, the handler takes them out.

Deltas that the handler has not taken yet are joined, so a client that reads slowly gets fewer and longer pieces, and
what waits for it is never more than its response. Output is not joined where that would change its order. While the
handler waits with nothing left to send, a text may take the fast path, see `ResponseStream.deltas`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec

from minisgl.frontend.errors import ApiError, ClientDisconnected
from minisgl.wire.messages import FirstTokenWait
from minisgl.wire.text import Finished, ScoredToken, ToolCallDelta

logger = logging.getLogger(__name__)

Phase = Literal["reading", "held", "tokenizing", "waiting", "generating"]
PHASES: Final[tuple[Phase, ...]] = ("reading", "held", "tokenizing", "waiting", "generating")
"""Reading the body; until an engine is routable, if none is; until the scheduler has queued the request; until its
first token; until its end."""


class Delta(msgspec.Struct, frozen=True):
    """New output of one choice."""

    index: int
    text: str
    tokens: int
    """Tokens sampled so far."""
    scored: Sequence[ScoredToken]
    """Tokens of the text, for requests with logprobs."""
    finished: Finished | None
    reasoning: str = ""
    """New reasoning, which precedes the text."""
    tool_calls: Sequence[ToolCallDelta] = ()
    """New output of tool calls, which follows the text; pieces of one call may be joined."""
    token_ids: Sequence[int] = ()
    """New tokens, for requests with `return_token_ids`."""
    prompt_token_ids: Sequence[int] = ()
    """Tokens of the prompt, in the first delta of a choice, for requests with `return_token_ids`."""
    prompt_scored: Sequence[ScoredToken] = ()
    """Next tokens of the prompt, before those of the answer, for requests with log-probabilities of a prompt that is
    not echoed with them."""
    joined: Sequence[Delta] = ()
    """In a whole choice whose text, reasoning and calls have another order: its parts in theirs."""


class Unread(msgspec.Struct, eq=False):
    """Output of a choice that the handler has not taken yet, in the pieces in which it arrived."""

    texts: list[str] = []
    scored: list[ScoredToken] = []
    reasoning: list[str] = []
    tool_calls: list[ToolCallDelta] = []
    token_ids: list[int] = []
    prompt_token_ids: Sequence[int] = ()
    prompt_scored: list[ScoredToken] = []


class EngineStart(msgspec.Struct, frozen=True):
    """An engine has given its first token of a choice, at the time `at`."""

    engine: str
    wait: FirstTokenWait
    cause: str
    """Why the choice left the engine before; empty: there was none."""
    at: float
    last_token_at: float
    """Time of the last token of the engine before; 0: there was none."""


class Choice(msgspec.Struct, eq=False):
    """One choice of a response: its progress, and the output that the handler has not taken yet. Times are the event
    loop's, in seconds."""

    stream: ResponseStream
    index: int
    request_id: bytes
    """Identifier of the choice at its tokenizer worker."""
    prompt_tokens: int
    """An estimate until the scheduler has queued the choice."""
    waiting: bool = True
    """Whether admission counts it as waiting."""
    tokens: int = 0
    """Tokens sampled so far."""
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    resumes: bool = False
    """An engine has queued the rest of the answer and has not given a token yet."""
    unread: Unread = msgspec.field(default_factory=Unread)
    finished: Finished | None = None
    starts: list[EngineStart] = []
    """Engines that have given tokens, of a request that is recorded in a trace."""
    earlier: list[Delta] = []
    """Output before `unread`, with which it cannot be joined."""

    def take(self) -> list[Delta]:
        """Return all output since the last call."""
        deltas = [*self.earlier, self._take(self.finished)]
        self.earlier.clear()
        return deltas

    def split(self) -> None:
        """Join no more output with what is there."""
        self.earlier.append(self._take(None))

    def _take(self, finished: Finished | None) -> Delta:
        taken, self.unread = self.unread, Unread()
        return Delta(
            self.index,
            "".join(taken.texts),
            self.tokens,
            taken.scored,
            finished,
            "".join(taken.reasoning),
            tuple(taken.tool_calls),
            tuple(taken.token_ids),
            taken.prompt_token_ids,
            tuple(taken.prompt_scored),
        )


def _join(deltas: Sequence[Delta]) -> Delta:
    """Return all output of a choice as one delta."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return Delta(
        last.index,
        "".join(delta.text for delta in deltas),
        last.tokens,
        [token for delta in deltas for token in delta.scored],
        last.finished,
        "".join(delta.reasoning for delta in deltas),
        tuple(call for delta in deltas for call in delta.tool_calls),
        tuple(token for delta in deltas for token in delta.token_ids),
        deltas[0].prompt_token_ids,
        tuple(token for delta in deltas for token in delta.prompt_scored),
        joined=deltas,
    )


class ResponseStream:
    """All choices of one request, numbered from 0. Times are the event loop's, in seconds; 0: not yet."""

    def __init__(
        self, started_at: float, choices: Sequence[tuple[bytes, int]], n: int = 1, max_tokens: int | None = None
    ) -> None:
        """`choices`: identifier and estimated prompt tokens of each; `n` of them for each prompt. `max_tokens` of each
        choice; None: up to the context length."""
        self.tenant = ""
        """Whose request it is, as in `RequestRecord`."""
        self.is_pooled = False
        """Each choice is the output of a text of its own, without tokens."""
        self.started_at = started_at
        self.max_tokens = max_tokens
        self.choices = [Choice(self, index, key, tokens) for index, (key, tokens) in enumerate(choices)]
        self.n = n
        self.phase: Phase = "tokenizing"
        self.accepted_at = 0.0
        self.queued_since = 0.0
        """Time at which the engine that has the request queued it."""
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        self.last_progress_at = 0.0
        """Time of the last token, or of the moment at which another engine queued the rest of an answer."""
        self.unsent_characters = 0
        """Characters that arrived since the last send began."""
        self.ignored: tuple[str, ...] = ()
        """Fields of the request that have no effect on the model, known once it is accepted."""
        self.error: ApiError | ClientDisconnected | None = None
        self._unaccepted = self._unfinished = len(self.choices)
        self._changed: set[int] = set()
        """Choices with output that was not taken."""
        self._waiter: asyncio.Future[None] | None = None
        """Set while the handler waits. Only one task does, so this need not be an Event, which costs more."""
        self._waiting_since = math.inf
        """Start of the last wait in `deltas`; texts may have taken the fast path since."""
        self._interrupted = False
        self._was_continued = False
        """An answer was continued since `take_continued`."""
        self._fast_path: Callable[[str], bool] | None = None
        """Takes texts in the handler's place. Set only while it waits and has no reason to wake up."""
        self._delta_path: Callable[[Delta], bool] | None = None
        """Takes output that is more than text. Set together with the fast path of texts."""

    @property
    def is_accepted(self) -> bool:
        """Whether the scheduler has queued every choice."""
        return not self._unaccepted

    @property
    def is_open(self) -> bool:
        """Whether output is still expected: not finished, and not failed."""
        return bool(self._unfinished) and self.error is None

    @property
    def has_more(self) -> bool:
        """Whether `deltas` has, or will have, something to return."""
        return bool(self._unfinished or self._changed)

    def accept(self, choice: Choice, prompt_tokens: int, prompt_token_ids: Sequence[int] = ()) -> None:
        choice.prompt_tokens = prompt_tokens
        choice.unread.prompt_token_ids = prompt_token_ids
        self._unaccepted -= 1
        self._wake()

    def push(self, choice: Choice, text: str, scored: Sequence[ScoredToken]) -> None:
        """Add text, and its tokens for requests with logprobs."""
        self.unsent_characters += len(text)
        if self._fast_path is not None:
            try:
                if self._fast_path(text):
                    return
            except Exception:
                return self._fail_rendering()
        if choice.unread.tool_calls and text:
            choice.split()
        choice.unread.texts.append(text)
        if scored:
            choice.unread.scored.extend(scored)
        self._changed.add(choice.index)
        self._wake()

    def push_step(
        self,
        choice: Choice,
        text: str,
        scored: Sequence[ScoredToken],
        reasoning: str,
        tool_calls: Sequence[ToolCallDelta],
        token_ids: Sequence[int],
        prompt_scored: Sequence[ScoredToken] = (),
    ) -> None:
        """Add the output of a step that is more than text."""
        self.unsent_characters += len(reasoning) + sum(len(call.arguments) for call in tool_calls)
        if self._delta_path is not None and not (prompt_scored or choice.unread.prompt_token_ids):
            delta = Delta(choice.index, text, choice.tokens, scored, None, reasoning, tool_calls, token_ids)
            try:
                if self._delta_path(delta):
                    self.unsent_characters += len(text)
                    return
            except Exception:
                return self._fail_rendering()
        # The fast path takes only texts.
        self._fast_path = None
        unread = choice.unread
        if (reasoning and (unread.tool_calls or any(unread.texts))) or (text and unread.tool_calls):
            choice.split()
            unread = choice.unread
        unread.reasoning.append(reasoning)
        unread.token_ids.extend(token_ids)
        unread.prompt_scored.extend(prompt_scored)
        self.push(choice, text, scored)
        unread.tool_calls.extend(tool_calls)

    def finish(self, choice: Choice, finished: Finished) -> None:
        choice.finished = finished
        choice.tokens = finished.completion_tokens
        self._unfinished -= 1
        self._changed.add(choice.index)
        self._wake()

    def fail(self, error: ApiError | ClientDisconnected) -> None:
        """End the response without completing it. The first failure counts; a finished response keeps its end."""
        if self.is_open:
            self.error = error
        self._wake()

    def _fail_rendering(self) -> None:
        """End this response alone: whoever pushes has output for others, too."""
        logger.exception("output cannot be rendered")
        self.fail(ApiError.from_code("internal_error", "the output cannot be rendered"))

    async def accepted(self) -> None:
        """Wait until the scheduler has queued every choice. Raises ApiError or ClientDisconnected."""
        while self._unaccepted:
            await self._next_event()

    async def complete(self) -> list[Delta]:
        """Wait for the end of every choice and return each as one delta. Raises ApiError or ClientDisconnected."""
        while self._unfinished:
            await self._next_event()
        return [_join(choice.take()) for choice in self.choices]

    async def deltas(
        self, fast_path: Callable[[str], bool] | None = None, delta_path: Callable[[Delta], bool] | None = None
    ) -> list[Delta]:
        """Wait for new output and return it by choice, in order; an empty list after `interrupt_silence` or
        `mark_continued`. Raises ApiError or ClientDisconnected.

        `fast_path` is offered each text that arrives alone and returns whether it was written: such a text is not
        returned again. Give it only for a single choice whose token counts and scores are not needed. `delta_path` is
        offered output that is more than text in the same way; it gets all that a delta has.
        """
        while not self._changed and not self._was_continued:
            self._fast_path = fast_path
            self._delta_path = delta_path
            self._waiting_since = asyncio.get_running_loop().time()
            await self._next_event()
            if self._interrupted:
                break
        self._interrupted = False
        self._raise_error()
        deltas = [delta for index in sorted(self._changed) for delta in self.choices[index].take()]
        self._changed.clear()
        return deltas

    def interrupt_silence(self, since: float) -> None:
        """Make a handler that waits in `deltas` return without any, if nothing has arrived since that time: its client
        gets a comment that keeps the connection open. One check of all streams by the watchdog: a timer for each wait
        costs a quarter of the CPU time of a token."""
        if self._waiter is not None and max(self._waiting_since, self.last_token_at) <= since:
            self._interrupted = True
            self._wake()

    def mark_continued(self) -> None:
        """Have the handler write that an answer goes on at another engine."""
        self._was_continued = True
        self._wake()

    def take_continued(self) -> bool:
        """Return whether an answer was continued since the last call."""
        was_continued, self._was_continued = self._was_continued, False
        return was_continued

    def _wake(self) -> None:
        # From here on all output has to wait for the handler, or it would overtake what wakes the handler up.
        self._fast_path = self._delta_path = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _next_event(self) -> None:
        self._raise_error()
        assert self._waiter is None, "only the handler of the request waits for output"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = self._fast_path = self._delta_path = None
        self._raise_error()

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error


NO_STREAM: Final = ResponseStream(0.0, ())
"""That of choices whose output nobody needs any more."""
