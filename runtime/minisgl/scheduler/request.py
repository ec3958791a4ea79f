"""Life cycle of a request: QUEUED → PREFILL → DECODE → (PREEMPTING → QUEUED) → ended.

With overlap a step is launched before the result of the previous one is known, so the host's knowledge of a row is
one step late. Only this module handles that lag, in one column: `in_flight` counts the launched steps that contain
the row and are not collected yet. Two rules follow from it:

- A row that ends or is preempted while it is in flight takes part in no further plan. It keeps its row and pages until
  the last of these steps is collected, and frees them then (`settled`).
- The result of a step counts for a row unless the row has ended: a request whose EOS is known one step late has run
  one more step, and the token of that step is dropped.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from minisgl.scheduler.constraints import Constraint
from minisgl.scheduler.pages import NO_PAGES
from minisgl.wire.messages import FINISH_REASONS, REQUEST_ID_BYTES, SamplingParams
from minisgl.wire.plan import IntArray, runs

STOP, LENGTH, ABORT, ERROR = (FINISH_REASONS.index(reason) for reason in ("stop", "length", "abort", "error"))


CONTINUED_AHEAD: Final = 1 << 62
"""More than any number of arrivals."""


class Phase:
    """Phase of a row; a request without a row is queued or has ended. Plain ints, since every step compares them with
    columns."""

    EMPTY: Final = 0
    PREFILL: Final = 1
    """Part of the prompt is not launched yet."""
    DECODE: Final = 2
    PREEMPTING: Final = 3
    """Frees its pages for other rows; the request returns to the queue once the row is settled."""
    ENDING: Final = 4
    """The request has its finish reason; row and pages are released once the row is settled."""


class Request(msgspec.Struct, kw_only=True):
    """Fields of a request that are used only when it changes its phase."""

    id: bytes
    client: int
    tokens: IntArray
    """Prompt and output up to the last time that the request was queued."""
    prompt_length: int
    limit: int
    """Maximum number of tokens of prompt and output together."""
    params: SamplingParams
    """Checked and with `max_tokens` and `seed` set; temperature 0 is greedy, top_k 0 keeps all tokens."""
    stop_token_ids: frozenset[int]
    """Only ids of the vocabulary."""
    priority: int
    deadline: float | None
    """On the clock of `Scheduler.now`; None: no deadline."""
    arrival: int
    """Order of arrival; a preemption does not change it."""
    cache_salt: bytes
    tenant: bytes
    stream: bool
    prompt_logprobs_from: int
    """Index of the next prompt token whose log-probability is to be reported; `prompt_length`: none is left."""
    queued_at: float
    """`Scheduler.now` at arrival."""
    admitted_at: float = 0.0
    """`Scheduler.now` at the first admission to a row."""
    slot: int | None = None
    constraint: Constraint | None = None
    """Behind all tokens that are known. None: any token may be generated, unless the request `awaits_constraint`."""
    awaits_constraint: bool = False
    """Its grammar is being compiled: all of its prompt but the last token may be computed."""
    cached: int | None = None
    """Prompt tokens that the first admission found in the cache; reported as usage."""
    preemptions: int = 0
    continues: bool = False
    """It came with output of an engine that was lost."""
    second_text: int = 0
    """See `Pool.second_text`."""
    prediction: IntArray = msgspec.field(default_factory=lambda: np.empty(0, np.int32))
    """See `Submit.prediction`."""
    predicted: tuple[int, int] = (0, 0)
    """Tokens of the prediction that were accepted, and rejected, so far."""

    @property
    def is_constrained(self) -> bool:
        """True when it has a constraint, or will have one."""
        return self.constraint is not None or self.awaits_constraint

    @property
    def cacheable_tokens(self) -> IntArray:
        """Tokens whose KV may come from the prefix cache: all but those whose logits are needed."""
        if self.prompt_logprobs_from < self.prompt_length:
            return self.tokens[: self.prompt_logprobs_from - 1]
        return self.tokens[:-1]

    @property
    def priority_key(self) -> tuple[int, int]:
        """Sort key: requests with a smaller key run first."""
        return (-self.priority, self.arrival - CONTINUED_AHEAD if self.continues else self.arrival)


class Completed(msgspec.Struct, frozen=True):
    """Tokens of one step that count: columns of equal length, one row per token."""

    slots: IntArray
    index: IntArray
    """Index of the token in the answer."""
    tokens: IntArray
    finish: NDArray[np.uint8]
    """Index into FINISH_REASONS."""
    rows: IntArray
    """Index of the token in the step's result."""

    def __getitem__(self, rows: NDArray[np.bool_]) -> Completed:
        return Completed(self.slots[rows], self.index[rows], self.tokens[rows], self.finish[rows], self.rows[rows])


class DraftRows(msgspec.Struct, frozen=True):
    """Rows of a launched step that sample, where the engine speculates."""

    slots: IntArray
    """[R]"""
    first: IntArray
    """[R] index of the row's first token in the step's result."""
    widths: IntArray
    """[R] number of its tokens there."""

    @staticmethod
    def of(decode: IntArray, widths: IntArray, prompts: IntArray) -> DraftRows:
        """Rows of a step: `decode` [W] with these `widths`, and `prompts` that end in it."""
        slots = np.concatenate((decode, prompts))
        widths = np.concatenate((widths, np.ones_like(prompts)))
        return DraftRows(slots, runs(widths)[0], widths)


class RequestTable:
    """Structure of arrays over the rows of the batch. Three marks divide the sequence of a row:

        0 ........ computed ................ length ........ limit
        KV launched        known to the host       maximum length

    In decode `computed` is `length - 1` plus the tokens that are sampled by launched steps and not collected yet.
    """

    def __init__(self, *, rows: int, max_length: int, max_pages: int, vocab_size: int, eos_ids: tuple[int, ...]):
        def column() -> IntArray:
            return np.zeros(rows, np.int32)

        self.phase: NDArray[np.uint8] = np.zeros(rows, np.uint8)
        self.in_flight = column()
        self.computed = column()
        self.drafts_in_flight = column()
        """Drafts of launched steps that are not collected: `computed` is the least that the row may have, and grows by
        those that are accepted."""
        self.may_draft: NDArray[np.bool_] = np.zeros(rows, np.bool_)
        """Rows whose next tokens may be verified several at a time."""
        self.length = column()
        self.limit = column()
        self.prompt_length = column()
        self.prefill_end = column()
        self.cached = column()
        self.num_pages = column()
        self.inserted = column()
        """Number of leading pages that were offered to the prefix cache."""
        self.client = column()
        self.streams: NDArray[np.bool_] = np.zeros(rows, np.bool_)
        """Rows whose clients receive each token as it is sampled."""
        self.constrained: NDArray[np.bool_] = np.zeros(rows, np.bool_)
        """Rows with a constraint, or that await one."""
        self.num_constrained = 0
        self.joined_and_ended = 0
        """Number of times that a request joined or ended."""
        self.ids = np.zeros(rows, f"V{REQUEST_ID_BYTES}")
        # Zeroed memory is mapped on first use: these two take only the memory that requests use.
        self.tokens: IntArray = np.zeros((rows, max_length), np.int32)
        self.page_table: IntArray = np.zeros((rows, max_pages), np.int32)
        self.requests: list[Request | None] = [None] * rows
        self.rows_of: Counter[bytes] = Counter()
        """Number of rows of each tenant that has any."""
        self.in_prefill: set[int] = set()
        self.unsettled: set[int] = set()
        """PREEMPTING and ENDING rows."""
        self._resumed: set[int] = set()
        """Rows of requests that were preempted before, until their next token."""
        self.num_in_use = 0
        self._free_rows = list(range(rows - 1, -1, -1))
        self._eos_ids = frozenset(eos_ids)
        # Per token: number of rows with this stop id, plus 1 for an EOS id. The last entry stands for −1, the missing
        # token.
        self._may_end: IntArray = np.zeros(vocab_size + 1, np.int32)
        self._may_end[[token for token in eos_ids if 0 <= token < vocab_size]] = 1
        self._may_end[-1] = 1

    @property
    def has_free_row(self) -> bool:
        """True when `admit` can be called."""
        return bool(self._free_rows)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def request(self, slot: int) -> Request:
        """The request in a row that is in use."""
        request = self.requests[slot]
        assert request is not None
        return request

    def admit(
        self, request: Request, cached_pages: IntArray, own_pages: IntArray, page_size: int, slot: int | None = None
    ) -> int:
        """QUEUED → PREFILL, behind a cached prefix, in the row `slot`, which is free, or in any. Returns the slot."""
        if slot is None:
            slot = self._free_rows.pop()
        else:
            self._free_rows.remove(slot)
        assert self.phase[slot] == Phase.EMPTY and self.in_flight[slot] == 0, "a row in flight was given to a request"
        length = len(request.tokens)
        cached, total = len(cached_pages), len(cached_pages) + len(own_pages)
        self.phase[slot] = Phase.PREFILL
        self.computed[slot] = cached * page_size
        self.drafts_in_flight[slot] = 0
        self.length[slot] = self.prefill_end[slot] = length
        self.limit[slot] = request.limit
        self.prompt_length[slot] = request.prompt_length
        if request.cached is None:
            request.cached = min(cached * page_size, request.prompt_length)
        self.cached[slot] = request.cached
        self.inserted[slot] = cached
        self.num_pages[slot] = total
        self.client[slot] = request.client
        self.streams[slot] = request.stream
        self.ids[slot] = np.void(request.id)
        self.tokens[slot, :length] = request.tokens
        self.page_table[slot, :cached] = cached_pages
        self.page_table[slot, cached:total] = own_pages
        self.requests[slot] = request
        self.rows_of[request.tenant] += 1
        request.slot = slot
        self.in_prefill.add(slot)
        if request.preemptions:
            self._resumed.add(slot)
        self.num_in_use += 1
        self.joined_and_ended += 1
        self.constrained[slot] = is_constrained = request.is_constrained
        self.num_constrained += is_constrained
        if request.stop_token_ids:
            self._may_end[list(request.stop_token_ids)] += 1
        return slot

    def launch_prefill(self, slot: int, count: int) -> bool:
        """A step computes the next `count` tokens of the prompt. True when they complete the prompt: PREFILL → DECODE,
        and the step samples the next token."""
        self.computed[slot] += count
        if self.computed[slot] < self.prefill_end[slot]:
            return False
        self.phase[slot] = Phase.DECODE
        self.in_prefill.discard(slot)
        return True

    def launch_decode(self, slots: IntArray, positions: IntArray, widths: IntArray) -> None:
        """A step computes the newest token of each row, at `positions` or behind, and samples the next; with `widths`
        it also verifies so many drafts less one."""
        self.computed[slots] = positions + 1
        if widths.sum() > len(widths):
            self.drafts_in_flight[slots] += widths - 1

    def launch(self, slots: IntArray) -> IntArray:
        """Count the launched step of these rows. Returns its mask over all rows, for `collect`."""
        mask = np.zeros(len(self.phase), np.int32)
        mask[slots] = 1
        self.in_flight += mask
        return mask

    def decodable(self) -> IntArray:
        """Slots that the next step can decode, in ascending order; not those whose last token is in flight, since their
        length is known ahead."""
        rows: NDArray[np.bool_] = (self.phase == Phase.DECODE) & (self.computed < self.limit - 1)
        return rows.nonzero()[0].astype(np.int32)

    def prefilling(self) -> list[Request]:
        """Requests whose prompt is not completely launched, by priority."""
        if not self.in_prefill:
            return []
        return sorted(map(self.request, self.in_prefill), key=lambda request: request.priority_key)

    def collect(self, mask: IntArray, sampled: IntArray, tokens: IntArray) -> Completed:
        """Process the result of a launched step with the rows of `mask`: its slots `sampled` have the new `tokens`.

        Rows that end with the step are ENDING afterwards; `Completed.finish` is the reason.
        """
        self.in_flight -= mask
        return self._append(sampled, tokens, np.arange(len(sampled), dtype=np.int32))

    def collect_drafts(self, mask: IntArray, rows: DraftRows, tokens: IntArray, counts: IntArray) -> Completed:
        """`collect` of a step of an engine that speculates: the first `counts` [R] tokens of each of `rows` count, up
        to one that ends its request."""
        self.in_flight -= mask
        self.drafts_in_flight[rows.slots] -= rows.widths - 1
        # The last token of a sequence is no input, also not in the step after the one that ends the request.
        self.computed[rows.slots] = np.minimum(self.computed[rows.slots] + counts - 1, self.limit[rows.slots] - 1)
        parts = [self._append(rows.slots, tokens, rows.first)]
        for place in range(1, int(counts.max(initial=1))):
            has = counts > place
            parts.append(self._append(rows.slots[has], tokens, rows.first[has] + np.int32(place)))
        if len(parts) == 1:
            return parts[0]
        columns = ([getattr(part, name) for part in parts] for name in Completed.__struct_fields__)
        return Completed(*map(np.concatenate, columns))

    def _append(self, sampled: IntArray, tokens: IntArray, rows: IntArray) -> Completed:
        """Append to each row of `sampled` [N] that has not ended its token: that of `rows` [N] of all `tokens`."""
        if self.unsettled:
            counts = self.phase[sampled] != Phase.ENDING
            sampled, rows = sampled[counts], rows[counts]
        tokens = tokens.take(rows)
        before = self.length.take(sampled)
        after = before + 1
        self.tokens[sampled, before] = tokens
        self.length[sampled] = after
        finish = np.zeros(len(sampled), np.uint8)
        # Few steps end a request: two look-ups over the batch find the rows that need a closer look.
        ends = (self._may_end.take(tokens, mode="wrap") > 0) | (after >= self.limit.take(sampled))
        if np.count_nonzero(ends):
            for row in ends.nonzero()[0].tolist():
                finish[row] = self._finish(int(sampled[row]), int(tokens[row]))
        return Completed(sampled, before - self.prompt_length.take(sampled), tokens, finish, rows)

    def take_resumed(self, slots: IntArray) -> dict[int, int]:
        """Number of preemptions by index in `slots`, for rows with the first token behind a preemption."""
        if not self._resumed:
            return {}
        resumed = {row: slot for row, slot in enumerate(slots.tolist()) if slot in self._resumed}
        self._resumed.difference_update(resumed.values())
        return {row: self.request(slot).preemptions for row, slot in resumed.items()}

    def _finish(self, slot: int, token: int) -> int:
        """Index into FINISH_REASONS if the newest token ends the row, otherwise 0."""
        request = self.request(slot)
        if token < 0:
            # The logits were not finite, so the row has no token.
            self.length[slot] -= 1
            reason = ERROR
        elif (token in self._eos_ids and not request.params.ignore_eos) or token in request.stop_token_ids:
            reason = STOP
        elif self.length[slot] >= self.limit[slot]:
            reason = LENGTH
        else:
            return 0
        self.end(slot)
        return reason

    def end(self, slot: int) -> None:
        """PREFILL, DECODE or PREEMPTING → ENDING."""
        assert self.phase[slot] not in (Phase.EMPTY, Phase.ENDING), "a row ended twice"
        self.phase[slot] = Phase.ENDING
        self.joined_and_ended += 1
        self.in_prefill.discard(slot)
        self.unsettled.add(slot)

    def preempt(self, slot: int) -> None:
        """PREFILL or DECODE → PREEMPTING."""
        assert self.phase[slot] in (Phase.PREFILL, Phase.DECODE)
        self.phase[slot] = Phase.PREEMPTING
        self.in_prefill.discard(slot)
        self.unsettled.add(slot)

    def settled(self) -> list[int]:
        """PREEMPTING and ENDING slots that are in no launched step any more."""
        if not self.unsettled:
            return []
        return sorted(slot for slot in self.unsettled if self.in_flight[slot] == 0)

    def release(self, slot: int) -> Request:
        """Free a settled row and return its request; a preempted request keeps its tokens."""
        assert slot in self.unsettled and self.in_flight[slot] == 0, "a launched step may still write this row"
        request = self.request(slot)
        if self.phase[slot] == Phase.PREEMPTING:
            request.tokens = self.tokens[slot, : self.length[slot]].copy()
            request.preemptions += 1
        self.unsettled.discard(slot)
        self._resumed.discard(slot)
        self.requests[slot] = None
        self.phase[slot] = Phase.EMPTY
        self.num_pages[slot] = 0
        self.num_in_use -= 1
        self.num_constrained -= int(self.constrained[slot])
        self.constrained[slot] = False
        self.may_draft[slot] = False
        if request.stop_token_ids:
            self._may_end[list(request.stop_token_ids)] -= 1
        self._free_rows.append(slot)
        self.rows_of[request.tenant] -= 1
        if not self.rows_of[request.tenant]:
            del self.rows_of[request.tenant]
        request.slot = None
        return request

    def pages(self, slot: int) -> IntArray:
        """Pages of a row, in the order of its tokens."""
        count = int(self.num_pages[slot])
        return self.page_table[slot, :count] if count else NO_PAGES
