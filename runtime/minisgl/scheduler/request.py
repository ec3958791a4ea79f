"""The life of a request, written once: QUEUED → PREFILL → DECODE → (PREEMPTING → QUEUED) → ended.

With overlap a step is launched before the result of the one before it is known, so what the host knows of a row
is one step late. That lag lives here and nowhere else, in one column: `in_flight` counts the launched steps that
hold the row and are not collected yet. Two rules follow from it:

- A row that ends, or has to give way, while it is in flight takes part in no further plan, keeps its row and its
  pages until the last of these steps is collected, and only then lets go of them (`settled`).
- The result of a step counts for a row unless the row has ended: a request whose EOS is learnt late has run one
  step more, and that step's token is dropped.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from minisgl.scheduler.pages import NO_PAGES
from minisgl.wire.messages import FINISH_REASONS, REQUEST_ID_BYTES, SamplingParams
from minisgl.wire.plan import IntArray

STOP, LENGTH, ABORT, ERROR = (FINISH_REASONS.index(reason) for reason in ("stop", "length", "abort", "error"))


class Phase:
    """Of a row. A request without a row is queued or gone. Plain ints: they are compared with columns in every step."""

    EMPTY: Final = 0
    PREFILL: Final = 1
    """Some of its prompt is not launched yet."""
    DECODE: Final = 2
    PREEMPTING: Final = 3
    """Gives way to others; goes back to the queue once settled."""
    ENDING: Final = 4
    """Has its finish reason; its row and pages are released once settled."""


class Request(msgspec.Struct, kw_only=True):
    """The part of a request that is touched only when it changes state."""

    id: bytes
    client: int
    tokens: IntArray
    """Prompt and the output so far, as of the last time it was queued."""
    prompt_length: int
    limit: int
    """Most tokens of prompt and output together."""
    params: SamplingParams
    """Checked and with `max_tokens` and `seed` set; temperature 0 is greedy, top_k 0 keeps all tokens."""
    stop_token_ids: frozenset[int]
    """Only ids of the vocabulary."""
    priority: int
    deadline_ms: int
    arrival: int
    """Order of arrival; kept over a preemption."""
    cache_salt: bytes
    prompt_logprobs_from: int
    """Index of the next prompt token whose log-probability is to be reported; `prompt_length`: none is left."""
    queued_at: float
    """`Scheduler.now` when it arrived."""
    admitted_at: float = 0.0
    """And when it first got a row."""
    slot: int | None = None
    cached: int | None = None
    """Prompt tokens that the first admission found in the cache: what usage reports."""
    preemptions: int = 0

    @property
    def cacheable_tokens(self) -> IntArray:
        """What may come from the prefix cache: all that need not be computed for the sake of its logits."""
        if self.prompt_logprobs_from < self.prompt_length:
            return self.tokens[: self.prompt_logprobs_from - 1]
        return self.tokens[:-1]

    @property
    def priority_key(self) -> tuple[int, int]:
        """Smaller goes first."""
        return (-self.priority, self.arrival)


class Completed(msgspec.Struct, frozen=True):
    """What the host learnt from one step, a row for each token that counts. Columns of equal length."""

    slots: IntArray
    index: IntArray
    """Of the token in the answer."""
    tokens: IntArray
    finish: NDArray[np.uint8]

    def __getitem__(self, rows: NDArray[np.bool_]) -> Completed:
        return Completed(self.slots[rows], self.index[rows], self.tokens[rows], self.finish[rows])


class RequestTable:
    """Structure of arrays over the rows of the batch. A row's sequence in three marks:

        0 ........ computed ................ length ........ limit
        KV launched        known to the host       most that it may become

    In decode `computed` is `length - 1` plus the tokens that are sampled by launched steps and not collected yet.
    """

    def __init__(self, *, rows: int, max_length: int, max_pages: int, vocab_size: int, eos_ids: tuple[int, ...]):
        def column() -> IntArray:
            return np.zeros(rows, np.int32)

        self.phase: NDArray[np.uint8] = np.zeros(rows, np.uint8)
        self.in_flight = column()
        self.computed = column()
        self.length = column()
        self.limit = column()
        self.prompt_length = column()
        self.prefill_end = column()
        self.cached = column()
        self.num_pages = column()
        self.inserted = column()
        """Leading pages that the prefix cache has seen."""
        self.client = column()
        self.ids = np.zeros(rows, f"V{REQUEST_ID_BYTES}")
        # Zeroed memory is mapped on first touch: these two cost what requests really use.
        self.tokens: IntArray = np.zeros((rows, max_length), np.int32)
        self.page_table: IntArray = np.zeros((rows, max_pages), np.int32)
        self.requests: list[Request | None] = [None] * rows
        self.in_prefill: set[int] = set()
        self.unsettled: set[int] = set()
        """Rows that are PREEMPTING or ENDING."""
        self.num_in_use = 0
        self._free_rows = list(range(rows - 1, -1, -1))
        self._eos_ids = frozenset(eos_ids)
        # By token: how many can end by it, rows with this stop id or all (1). The last entry is that of −1, the
        # token that there is not.
        self._may_end: IntArray = np.zeros(vocab_size + 1, np.int32)
        self._may_end[[token for token in eos_ids if 0 <= token < vocab_size]] = 1
        self._may_end[-1] = 1

    @property
    def has_free_row(self) -> bool:
        return bool(self._free_rows)

    def request(self, slot: int) -> Request:
        """The request in a row that is in use."""
        request = self.requests[slot]
        assert request is not None
        return request

    def admit(self, request: Request, cached_pages: IntArray, own_pages: IntArray, page_size: int) -> int:
        """QUEUED → PREFILL, behind a cached prefix."""
        slot = self._free_rows.pop()
        assert self.phase[slot] == Phase.EMPTY and self.in_flight[slot] == 0, "a row in flight was handed out"
        length = len(request.tokens)
        cached, total = len(cached_pages), len(cached_pages) + len(own_pages)
        self.phase[slot] = Phase.PREFILL
        self.computed[slot] = cached * page_size
        self.length[slot] = self.prefill_end[slot] = length
        self.limit[slot] = request.limit
        self.prompt_length[slot] = request.prompt_length
        if request.cached is None:
            request.cached = min(cached * page_size, request.prompt_length)
        self.cached[slot] = request.cached
        self.inserted[slot] = cached
        self.num_pages[slot] = total
        self.client[slot] = request.client
        self.ids[slot] = np.void(request.id)
        self.tokens[slot, :length] = request.tokens
        self.page_table[slot, :cached] = cached_pages
        self.page_table[slot, cached:total] = own_pages
        self.requests[slot] = request
        request.slot = slot
        self.in_prefill.add(slot)
        self.num_in_use += 1
        self._may_end[list(request.stop_token_ids)] += 1
        return slot

    def launch_prefill(self, slot: int, count: int) -> bool:
        """A step computes the next `count` tokens of the prompt. True: the prompt is complete with it, so the
        step samples the next token: PREFILL → DECODE."""
        self.computed[slot] += count
        if self.computed[slot] < self.prefill_end[slot]:
            return False
        self.phase[slot] = Phase.DECODE
        self.in_prefill.discard(slot)
        return True

    def launch_decode(self, slots: IntArray, positions: IntArray) -> None:
        """A step computes the newest token of each row, at `positions`, and samples the next."""
        self.computed[slots] = positions + 1

    def launch(self, slots: IntArray) -> IntArray:
        """The step with these rows is launched. Returns its mask over all rows, for `collect`."""
        mask = np.zeros(len(self.phase), np.int32)
        mask[slots] = 1
        self.in_flight += mask
        return mask

    def decodable(self) -> IntArray:
        """Rows that the next step can decode, in the order of rows. A row whose last token is in flight is not:
        its length is known ahead."""
        rows: NDArray[np.bool_] = (self.phase == Phase.DECODE) & (self.computed < self.limit - 1)
        return rows.nonzero()[0].astype(np.int32)

    def prefilling(self) -> list[Request]:
        """Rows whose prompt is not fully launched, best first."""
        if not self.in_prefill:
            return []
        return sorted(map(self.request, self.in_prefill), key=lambda request: request.priority_key)

    def collect(self, mask: IntArray, sampled: IntArray, tokens: IntArray) -> Completed:
        """The result of a launched step: the rows of `mask` took part, `sampled` of them got `tokens`.

        Rows that end with it are ENDING afterwards; `finish` holds the reason.
        """
        self.in_flight -= mask
        if self.unsettled:
            counts = self.phase[sampled] != Phase.ENDING
            sampled, tokens = sampled[counts], tokens[counts]
        before = self.length.take(sampled)
        after = before + 1
        self.tokens[sampled, before] = tokens
        self.length[sampled] = after
        finish = np.zeros(len(sampled), np.uint8)
        # Nearly every step ends nobody: two look-ups over the batch tell, the details are for the few.
        ends = (self._may_end.take(tokens, mode="wrap") > 0) | (after >= self.limit.take(sampled))
        if np.count_nonzero(ends):
            for row in ends.nonzero()[0].tolist():
                finish[row] = self._finish(int(sampled[row]), int(tokens[row]))
        return Completed(sampled, before - self.prompt_length.take(sampled), tokens, finish)

    def _finish(self, slot: int, token: int) -> int:
        """Whether the newest token ends the row, and why: its code in FINISH_REASONS, 0 if it goes on."""
        request = self.request(slot)
        if token < 0:
            # The logits were not finite: there is no token.
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
        assert self.phase[slot] not in (Phase.EMPTY, Phase.ENDING), "a row ends once"
        self.phase[slot] = Phase.ENDING
        self.in_prefill.discard(slot)
        self.unsettled.add(slot)

    def preempt(self, slot: int) -> None:
        """PREFILL or DECODE → PREEMPTING."""
        assert self.phase[slot] in (Phase.PREFILL, Phase.DECODE)
        self.phase[slot] = Phase.PREEMPTING
        self.in_prefill.discard(slot)
        self.unsettled.add(slot)

    def settled(self) -> list[int]:
        """PREEMPTING and ENDING rows that no launched step holds any more."""
        if not self.unsettled:
            return []
        return sorted(slot for slot in self.unsettled if self.in_flight[slot] == 0)

    def release(self, slot: int) -> Request:
        """A settled row becomes free; a preempted request takes along the tokens that it has by now."""
        assert slot in self.unsettled and self.in_flight[slot] == 0, "a launched step may still write this row"
        request = self.request(slot)
        if self.phase[slot] == Phase.PREEMPTING:
            request.tokens = self.tokens[slot, : self.length[slot]].copy()
            request.preemptions += 1
        self.unsettled.discard(slot)
        self.requests[slot] = None
        self.phase[slot] = Phase.EMPTY
        self.num_pages[slot] = 0
        self.num_in_use -= 1
        self._may_end[list(request.stop_token_ids)] -= 1
        self._free_rows.append(slot)
        request.slot = None
        return request

    def pages(self, slot: int) -> IntArray:
        count = int(self.num_pages[slot])
        return self.page_table[slot, :count] if count else NO_PAGES
