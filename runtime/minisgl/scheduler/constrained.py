"""Requests with a constraint: compiled while they wait, then rows whose steps are sampled with masks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from minisgl.config import SchedulerConfig
from minisgl.errors import CodedError, describe
from minisgl.scheduler.compiling import ConstraintCompiler
from minisgl.scheduler.constraints import (
    Constraint,
    ConstraintError,
    MatcherTokens,
    Vocabulary,
    advance_all,
    consume_tokens,
    fill_masks,
    open_first,
)
from minisgl.scheduler.pages import NO_PAGES
from minisgl.scheduler.request import ERROR, STOP, Completed, Phase, Request, RequestTable
from minisgl.scheduler.step_output import RequestError
from minisgl.wire.messages import Submit
from minisgl.wire.plan import IntArray

if TYPE_CHECKING:
    from minisgl.grammar.grammars import Grammars

COMPILE_PATIENCE: Final = 0.002
"""Seconds that a request waits for its grammar before its prompt is computed without it. Grammars that are known take
less, and a prompt whose last token waits for its grammar takes one more step."""
AHEAD_TOKENS: Final = 512
"""Least tokens of such a prompt: shorter ones are computed together with their last token, in about the same time."""


class Compiled(NamedTuple):
    """Requests whose wait for a grammar has ended, or goes on beside their prompts."""

    queued: Sequence[Request]
    """Held until now."""
    accepted: Sequence[Request]
    refused: Sequence[tuple[Request, CodedError]]
    """Requests that cannot run, with the reason."""


class ConstrainedRows(NamedTuple):
    """Rows of one step that need masks."""

    requests: Sequence[Request]
    constraints: Sequence[Constraint | None]
    """None: the request has ended."""


class Consuming(NamedTuple):
    """Tokens of a step that matchers have not consumed yet, for `ConstrainedRequests.consume`."""

    requests: Sequence[Request]
    matchers: MatcherTokens
    """With indices of `requests`."""


NOTHING_TO_CONSUME: Final = Consuming((), MatcherTokens([], []))

Errors = dict[int, ConstraintError]
"""By slot."""

BeginRows = Callable[[Mapping[int, Constraint]], None]
"""Begins to fill the masks of constraints, by row."""


class ConstrainedRequests:
    """The constraints of a scheduler's requests, from `submit` to the end of the request."""

    def __init__(self, config: SchedulerConfig, table: RequestTable, compiler: ConstraintCompiler | None) -> None:
        """`compiler`: None refuses requests with a grammar."""
        self._table = table
        self._compiler = compiler
        self._vocabulary = Vocabulary(config.vocab_size, config.eos_token_ids)
        self._compiling: dict[bytes, tuple[Request, Future[Constraint]]] = {}
        """Requests whose grammars are being compiled."""
        self._held: dict[bytes, Request] = {}
        """Those of them that are not queued yet."""
        self._long: deque[Request] = deque()
        """Requests that were held with long prompts, by arrival; they are queued when COMPILE_PATIENCE has passed."""
        self._launched: IntArray = NO_PAGES
        """Constrained slots of the newest launched step, in the order of its sampled slots."""
        # The rows of most steps are those of the step before.
        self._rows = ConstrainedRows((), ())
        self._rows_key: bytes | None = None
        """Slots of `_rows`."""
        self._rows_at = 0
        """`RequestTable.joined_and_ended` at that time."""

    @property
    def is_compiling(self) -> bool:
        """True while a request waits for its grammar, queued or not."""
        return bool(self._compiling)

    @property
    def held(self) -> Collection[Request]:
        """Requests that are not queued until their grammars are compiled."""
        return self._held.values()

    @property
    def num_launched(self) -> int:
        """Rows of the newest launched step that need masks."""
        return len(self._launched)

    def submit(self, request: Request, message: Submit) -> bool:
        """Give a new request its constraint, if it has one. False: it is held while its grammar is compiled. Raises
        RequestError and ConstraintError."""
        if message.constraint.grammar:
            if self._compiler is None:
                raise RequestError("grammar_unavailable", "this engine has no tokenizer files for grammars")
            request.constraint = self._compiler.ready(message, self._vocabulary)
            if request.constraint is None:
                self._hold(request, self._compiler.start(request, message, self._vocabulary))
                return False
        elif message.is_constrained:
            request.constraint = Constraint(message, self._vocabulary, None)
            request.constraint.replay(request.tokens[request.prompt_length :].tolist())
        return True

    def _hold(self, request: Request, compiled: Future[Constraint]) -> None:
        request.awaits_constraint = True
        self._compiling[request.id] = request, compiled
        self._held[request.id] = request
        # Log-probabilities of a prompt would be output of a request that may still be refused.
        if len(request.tokens) >= AHEAD_TOKENS and request.prompt_logprobs_from == request.prompt_length:
            self._long.append(request)

    def drop(self, request: Request) -> None:
        """Forget a request that has ended, if it waits for its grammar."""
        self._held.pop(request.id, None)
        if (compiling := self._compiling.pop(request.id, None)) is not None:
            # The threads are for requests that somebody waits for.
            compiling[1].cancel()

    def wait(self, seconds: float) -> None:
        """Wait until a grammar is compiled, up to this time; only if requests wait for that."""
        if self._compiling and self._compiler is not None:
            self._compiler.wait(seconds)

    def take_compiled(self, now: float) -> Compiled | None:
        """Requests whose grammars were compiled since the last call, and long prompts that have been held long enough;
        None: there may be none."""
        compiler = self._compiler
        if compiler is None or not (compiler.finished or self._long):
            return None
        queued: list[Request] = []
        accepted: list[Request] = []
        refused: list[tuple[Request, ConstraintError]] = []
        while compiler.finished:
            request, compiled = compiler.finished.popleft()
            expected = self._compiling.get(request.id)
            if expected is None or expected[1] is not compiled:
                # It was aborted.
                continue
            del self._compiling[request.id]
            was_held = self._held.pop(request.id, None) is not None
            if (error := compiled.exception()) is not None:
                code = error.code if isinstance(error, CodedError) else "grammar_failed"
                refused.append((request, ConstraintError(code, describe(error))))
                continue
            request.constraint = compiled.result()
            request.awaits_constraint = False
            accepted.append(request)
            if was_held:
                queued.append(request)
        while self._long and now - self._long[0].queued_at >= COMPILE_PATIENCE:
            request = self._long.popleft()
            # Otherwise it has ended, or its grammar is compiled.
            if self._held.get(request.id) is request:
                queued.append(self._held.pop(request.id))
        return Compiled(queued, accepted, refused)

    def launch(self, sampled: IntArray) -> IntArray:
        """Note the slots that a launched step samples. Returns the constrained ones, in their order, for `advance`."""
        table = self._table
        self._launched = sampled[table.constrained.take(sampled)] if table.num_constrained else NO_PAGES
        return self._launched

    def advance(self, done: Completed, begin: BeginRows | None, *, consume: bool) -> tuple[Consuming, Errors]:
        """Advance the constraints of rows by their new tokens, which may end the requests: `done.finish` is updated.
        Returns the tokens that matchers have not consumed, and why requests ended with an error, by slot.

        `begin` is called with the open rows of the newest launched step, if any, before the tokens of the others are
        consumed. `consume`: False leaves these others to `consume`."""
        errors: Errors = {}
        consuming = self._advance(done, begin, errors)
        if consume:
            self._consume(done, consuming, errors)
            consuming = NOTHING_TO_CONSUME
        return consuming, errors

    def _advance(self, done: Completed, begin: BeginRows | None, errors: Errors) -> Consuming:
        """Advance constraints. Matchers have consumed the tokens of open rows only."""
        rows = np.flatnonzero(self._table.constrained.take(done.slots) & (done.finish == 0))
        slots = done.slots[rows]
        requests, of_requests = self._of_slots(slots)
        constraints = [constraint for constraint in of_requests if constraint is not None]
        tokens = list(zip(constraints, done.tokens[rows].tolist(), strict=True))
        if begin is None or not (first := open_first(constraints)):
            return self._advance_rows(done, requests, tokens)
        chosen = [requests[index] for index in first]
        self._consume(done, self._advance_rows(done, chosen, [tokens[index] for index in first]), errors)
        launched = {slot: row for row, slot in enumerate(self._launched.tolist())}
        going = {
            index: slot for index in first if not done.finish[rows[index]] and (slot := int(slots[index])) in launched
        }
        if going:
            begin({launched[slot]: constraints[index] for index, slot in going.items()})
        others = sorted(set(range(len(tokens))).difference(first))
        return self._advance_rows(done, [requests[index] for index in others], [tokens[index] for index in others])

    def _advance_rows(
        self, done: Completed, requests: Sequence[Request], tokens: Sequence[tuple[Constraint, int]]
    ) -> Consuming:
        """`_advance` for some requests with their constraints and tokens."""
        ended, matchers = advance_all(tokens)
        for index in ended:
            self._end(done, requests[index], STOP)
        return Consuming(requests, matchers)

    def _consume(self, done: Completed, consuming: Consuming, errors: Errors) -> None:
        """Let matchers consume tokens of a step. Requests end whose matchers refuse them."""
        for request, error in self.consume(consuming):
            errors[self._end(done, request, ERROR)] = error

    def _end(self, done: Completed, request: Request, reason: int) -> int:
        """End a request with its token in `done`. Returns its slot."""
        slot = request.slot
        assert slot is not None
        self._table.end(slot)
        done.finish[done.slots == slot] = reason
        return slot

    def consume(self, consuming: Consuming) -> list[tuple[Request, ConstraintError]]:
        """Let matchers consume the tokens that `advance` left, on any thread, before masks are filled and before the
        next step is advanced. Returns the requests whose matchers refuse them, for `Scheduler.fail`."""
        errors = consume_tokens(consuming.matchers, self._grammars)
        return [(consuming.requests[index], error) for index, error in errors.items()]

    def launched_rows(self) -> ConstrainedRows:
        """Constrained rows of the newest launched step, once requests are advanced by the results of all earlier
        ones."""
        return self._of_slots(self._launched)

    def _of_slots(self, slots: IntArray) -> ConstrainedRows:
        """Rows with the constraints of their next tokens."""
        table, key = self._table, slots.tobytes()
        if key != self._rows_key or self._rows_at != table.joined_and_ended:
            requests = [table.request(slot) for slot in slots.tolist()]
            constraints = [request.constraint for request in requests]
            for row in np.flatnonzero(table.phase.take(slots) == Phase.ENDING).tolist():
                constraints[row] = None
            self._rows_key, self._rows_at = key, table.joined_and_ended
            self._rows = ConstrainedRows(requests, constraints)
        return self._rows

    def fill_masks(
        self, rows: Mapping[int, Constraint | None], masks: IntArray, *, slow: bool = False
    ) -> dict[int, ConstraintError]:
        """Write the masks of some rows into `masks` [L, words] of all constrained ones; rows that have ended may sample
        any token. Returns errors by row. Other threads may call it until requests are advanced by the step of these
        rows."""
        return fill_masks(rows, masks, self._vocabulary, self._grammars, slow=slow)

    @property
    def _grammars(self) -> Grammars | None:
        return None if self._compiler is None else self._compiler.grammars
