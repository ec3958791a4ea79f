"""Engine whose KV pool is real and whose model is a hash: wrong, stale or foreign KV changes the next token.

KV at position p is a hash of all tokens up to p, so it depends on the prefix as a transformer's does. The next token
is a hash of every KV entry that attention would read, of the request's seed and of the position. A token's score is the
token itself; a prompt token's comes from the KV before it.

Layers with a window store the same numbers in pages of their own. Of these the engine reads only the window of each
token; there it must find what the other layers have. A recurrent state is the number of the last token, so it must be
what the KV of the token before says.

With drafts it makes them up as it goes along: of two drafts about one is the token that is sampled in its place.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator

import numpy as np

from minisgl.engine.interface import EngineLimits, EngineStats
from minisgl.wire.logits_processors import RowLogitsProcessors, decode_logits_processors
from minisgl.wire.plan import (
    IntArray,
    LogprobColumns,
    PromptLogprobPart,
    RowLogprobs,
    StateChange,
    StepPlan,
    StepResult,
    VerifiedRows,
)
from minisgl.wire.row_texts import decode_texts
from minisgl.wire.shared_prefixes import decode_prefixes

MASK = (1 << 64) - 1
POISON = 0xDEAD_BEEF_DEAD_BEEF
START = 0x1234_5678_9ABC_DEF0


def mix(a: int, b: int) -> int:
    """A 64-bit hash of two numbers (the finaliser of splitmix64)."""
    z = (a * 0x9E3779B97F4A7C15 + b + 0x632BE59BD9B4E019) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def next_token(kv: np.ndarray, seed: int, position: int, allowed: Collection[int]) -> int:
    """`kv` [position] uint64: what attention reads for the token at `position`."""
    weights = np.arange(1, len(kv) + 1, dtype=np.uint64) | np.uint64(1)
    digest = int((kv * weights).sum(dtype=np.uint64))
    return sorted(allowed)[mix(mix(digest, seed & MASK), position) % len(allowed)]


def prompt_scores(prompt: list[int]) -> list[float]:
    """Scores of all prompt tokens but the first."""
    scores, before = [], START
    for token in prompt[:-1]:
        before = mix(before, token)
        scores.append(float(before % 1000))
    return scores


def columns(chosen: list[float], tops: int) -> LogprobColumns:
    """Columns in which the most likely tokens are 0, 1, 2, … at every position, with their ids as scores."""
    ids = np.tile(np.arange(tops, dtype=np.int32), (len(chosen), 1))
    return LogprobColumns(np.array(chosen, np.float32), ids, ids.astype(np.float32))


def reference(
    prompt: list[int],
    seed: int,
    max_tokens: int,
    vocab_size: int,
    eos: set[int],
    allowed_after: Callable[[list[int]], Collection[int]] | None = None,
) -> list[int]:
    """The answer of an undisturbed run; ends with the EOS token if there was one, and before a token for which nothing
    is allowed. `allowed_after`: tokens that may follow an answer so far."""
    kv: list[int] = []
    for token in prompt:
        kv.append(mix(kv[-1] if kv else START, token))
    answer: list[int] = []
    while len(answer) < max_tokens:
        allowed = range(vocab_size) if allowed_after is None else allowed_after(answer)
        if not allowed:
            break
        token = next_token(np.array(kv, np.uint64), seed, len(kv), allowed)
        answer.append(token)
        if token in eos:
            break
        kv.append(mix(kv[-1], token))
    return answer


class KvEngine:
    """Engine whose effects happen as late as possible: a launched plan is executed when it is collected."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.stats = EngineStats()
        pages_per_row = -(-limits.max_model_len // limits.page_size)
        self.kv = np.full((limits.num_pages, limits.page_size), POISON, np.uint64)
        self.page_table = np.full((limits.max_running, pages_per_row), -1, np.int32)
        self.window_kv = np.full((limits.num_window_pages, limits.page_size), POISON, np.uint64)
        self.window_table = self.page_table.copy()
        self.states = [POISON] * limits.max_running
        """Recurrent state of each slot."""
        self.checkpoints: defaultdict[int, int] = defaultdict(lambda: POISON)
        self._saves: dict[tuple[int, int], int] = {}
        """Checkpoints that the executed step saves, by slot and number of tokens."""
        self.last_token = np.full(limits.max_running, -1, np.int64)
        self.seeds = np.zeros(limits.max_running, np.int64)
        self.processors: dict[int, RowLogitsProcessors] = {}
        self.shared_rows = 0
        """Number of rows of executed plans that shared a prefix."""
        self.log: list[tuple[str, int]] = []
        self.fail_logits_of: set[int] = set()
        """Slots whose logits are not finite in the next executed step."""
        self._queue: deque[StepPlan] = deque()
        self._masks: dict[int, IntArray] = {}
        """Masks of late steps."""
        self._late: dict[int, list[int]] = {}
        """Slots of the constrained rows of steps that are not collected."""
        self.queues_sampling = True
        """Sampling waits for masks behind a step, so that the next one can be launched before."""
        self.late_rows = 0
        self.next_position = np.zeros(limits.max_running, np.int64)
        self.limits_of = np.zeros(limits.max_running, np.int64)
        """Maximum number of tokens of each slot's sequence."""
        self.accepted = 0
        """Drafts that were accepted."""
        self._random = np.random.default_rng(0)

    def launch(self, plan: StepPlan) -> StepPlan:
        assert len(self._queue) < 2, "at most two launched plans are not collected yet"
        if self._queue and not self.queues_sampling:
            assert self._is_sampled(self._queue[-1]), "a step is launched behind one that is not sampled"
        decoded = StepPlan.decode(plan.encode())
        self.log.append(("launch", plan.step))
        self._queue.append(decoded)
        if late := self._late_rows(decoded):
            self._late[plan.step] = late
        return decoded

    def use_idle_time(self) -> bool:
        return False

    def waits_for_masks(self, handle: StepPlan) -> bool:
        assert handle.step in self._late
        return self.queues_sampling

    def mask_memory(self, rows: int) -> IntArray:
        return np.full((rows, -(-self.limits.vocab_size // 32)), 0x5A5A5A5A, np.int32)

    def sample(self, handle: StepPlan, masks: IntArray) -> None:
        assert self._queue[0] is handle, "a step is sampled before the steps before it are collected"
        assert handle.step not in self._masks, "a step is sampled twice"
        late = self._late[handle.step]
        assert masks.shape == (len(late), -(-self.limits.vocab_size // 32))
        self.log.append(("sample", handle.step))
        self._masks[handle.step] = masks.copy()
        self.late_rows += len(late)

    def collect(self, handle: StepPlan) -> StepResult:
        assert self._is_sampled(handle), "a late step is collected before it is sampled"
        assert self._queue.popleft() is handle
        self.log.append(("collect", handle.step))
        tokens, verified = self._execute(handle)
        scores = self._row_scores(handle, tokens), tuple(self._prompt_scores(handle))
        return StepResult(handle.step, tokens, *scores, verified=verified)

    def close(self) -> None:
        pass

    def _row_scores(self, plan: StepPlan, tokens: np.ndarray) -> RowLogprobs | None:
        found = {row: self.processors.get(slot) for row, slot in enumerate(plan.sampled_slots.tolist())}
        asked = {row: p.logprobs for row, p in found.items() if p is not None and p.logprobs >= 0}
        if not asked:
            return None
        rows = list(asked)
        return RowLogprobs(np.array(rows, np.int32), columns(tokens[rows].tolist(), max(asked.values())))

    def _prompt_scores(self, plan: StepPlan) -> Iterator[PromptLogprobPart]:
        segments = (plan.prefill_slots, plan.prefill_starts, plan.prefill_lengths)
        for slot, start, length in zip(*(column.tolist() for column in segments), strict=True):
            row = self.processors.get(slot)
            if row is None or row.prompt_logprobs < 0:
                continue
            first = max(start + 1, row.prompt_logprobs_from)
            end = min(start + length + 1, row.prompt_length)
            if first < end:
                assert row.prompt[first:end].size == end - first, "the engine is not told the next prompt tokens"
                scores = [float(int(self.kv[self._address(slot, i - 1)]) % 1000) for i in range(first, end)]
                yield PromptLogprobPart(slot, first, columns(scores, row.prompt_logprobs))

    def _late_rows(self, plan: StepPlan) -> list[int]:
        """Slots of the constrained rows that a launched step samples."""
        late = {slot: row.late for slot, row in self.processors.items()}
        for launched in self._queue:
            late.update(dict.fromkeys(launched.new_rows[0].tolist(), False))
            late.update((row.slot, row.late) for row in decode_logits_processors(launched.logits_processors))
            if launched is plan:
                break
        return [slot for slot in plan.sampled_slots.tolist() if late.get(slot)]

    def _is_sampled(self, plan: StepPlan) -> bool:
        return plan.step in self._masks or plan.step not in self._late

    def _execute(self, plan: StepPlan) -> tuple[np.ndarray, VerifiedRows | None]:
        for slot in plan.new_rows[0].tolist():
            self.processors.pop(slot, None)
        self.processors.update((row.slot, row) for row in decode_logits_processors(plan.logits_processors))
        self.kv[plan.poison_pages] = POISON
        self.last_token[plan.new_rows[0]] = -1
        self.seeds[plan.new_rows[0]] = np.ascontiguousarray(plan.new_rows[5:7].T).view(np.int64).ravel()
        self.page_table[plan.new_rows[0]] = -1
        slots, index, pages = plan.page_updates
        self.page_table[slots, index] = pages
        self.window_kv[plan.poison_window_pages] = POISON
        slots, index, pages = plan.window_updates
        assert len({*zip(slots.tolist(), index.tolist(), strict=True)}) == len(slots), "an entry is updated twice"
        self.window_table[slots, index] = pages

        self._change_states(plan)
        self._check_prefixes(plan)
        late = [slot for slot in plan.sampled_slots.tolist() if slot in self.processors and self.processors[slot].late]
        assert late == self._late.pop(plan.step, [])
        masks = dict(zip(late, self._masks.pop(plan.step, []), strict=True))

        tokens: list[int] = []
        verified: list[tuple[int, int, int, int]] = []
        for _, text in decode_texts(plan.texts):
            self.limits_of[text.slot] = text.limit
        for slot, position, width in self._decode_rows(plan):
            if width:
                verified.append(self._decode(slot, position, width, tokens, masks))
                continue
            assert self.last_token[slot] >= 0, "a row decodes before it has a token"
            self._store(slot, position, int(self.last_token[slot]))
            self._check_window(slot, position, position + 1)
            tokens.append(self._sample(slot, position + 1, masks))
        offset = 0
        for slot, start, length, sample in zip(
            plan.prefill_slots.tolist(),
            plan.prefill_starts.tolist(),
            plan.prefill_lengths.tolist(),
            plan.prefill_sample.tolist(),
            strict=True,
        ):
            for position in range(start, start + length):
                self._store(slot, position, int(plan.prefill_tokens[offset]))
                offset += 1
            self._check_window(slot, start, start + length)
            if sample:
                tokens.append(self._sample(slot, start + length, masks))
                self.next_position[slot] = start + length
                verified.append((1, 0, 0, 0))
        assert not self._saves, "a state is to be saved that no token of the step has"
        self.stats.count(plan)
        self.fail_logits_of.clear()
        rows = VerifiedRows(*np.array(verified, np.int32).reshape(-1, 4).T) if self.limits.most_drafts else None
        return np.array(tokens, np.int32), rows

    def _decode_rows(self, plan: StepPlan) -> Iterator[tuple[int, int, int]]:
        """Slot, lowest position and width of the rows that decode; width 0: the engine does not speculate."""
        if not self.limits.most_drafts:
            assert not len(plan.widths)
            for slot, position in zip(plan.decode_slots.tolist(), plan.decode_positions.tolist(), strict=True):
                yield slot, position, 0
            return
        first = 0
        for width in plan.widths.tolist():
            slots, positions = plan.decode_slots[first : first + width], plan.decode_positions[first : first + width]
            assert (slots == slots[0]).all() and (positions == positions[0] + np.arange(width)).all()
            yield int(slots[0]), int(positions[0]), width
            first += width
        assert first == len(plan.decode_slots)

    def _decode(
        self, slot: int, lowest: int, width: int, tokens: list[int], masks: dict[int, IntArray]
    ) -> tuple[int, int, int, int]:
        """Append the sampled tokens of a row with drafts. Returns its column of `VerifiedRows`."""
        begin, limit, count = int(self.next_position[slot]), int(self.limits_of[slot]), 1
        assert lowest <= begin, "a row is expected behind its last token"
        assert self.last_token[slot] >= 0, "a row decodes before it has a token"
        token = last = int(self.last_token[slot])
        is_accepted = True
        for position in range(begin, begin + width):
            if position >= limit - 1:
                # There is no page for it.
                tokens.append(0)
                is_accepted = False
                continue
            self._store(slot, position, token)
            sampled = self._sample(slot, position + 1, masks)
            tokens.append(sampled)
            if is_accepted:
                last, count = sampled, position + 1 - begin
            draft = int(self._random.choice([sampled, sampled, 0, 5, -1]))
            is_accepted &= draft == sampled >= 0
            token = max(draft, 0)
        count = max(min(count, limit - begin - 1), 1)
        self.next_position[slot] = begin + count
        self.last_token[slot] = max(last, 0)
        self.accepted += count - 1
        hit = count > 1 if width > 1 else self._random.random() < 0.4
        offered = min(max(count - 1, hit) + int(self._random.integers(2)), self.limits.most_drafts)
        return count, offered, int(hit), 1

    def _change_states(self, plan: StepPlan) -> None:
        poisoned = []
        changed: set[int] = set()
        moved: set[int] = set()
        for kind, slot, tokens, checkpoint in plan.state_changes.T.tolist():
            if kind in (StateChange.LOAD, StateChange.ZERO):
                assert slot not in changed, "a slot is to get two states"
                assert slot not in map(self._slot_of, moved), "a state is moved to a row that begins"
                changed.add(slot)
            match kind:
                case StateChange.LOAD:
                    other = self._slot_of(checkpoint)
                    # Engines load several at a time, before any is moved.
                    assert slot == other or other not in changed, "a state is loaded that the plan replaces"
                    assert checkpoint not in moved, "a state is loaded that the plan moves there"
                    loaded = self.checkpoints[checkpoint]
                    self._set_state(slot, loaded)
                    stored = int(self.kv[self._address(slot, tokens - 1)])
                    assert loaded == stored, f"row {slot} begins with the state of another prefix"
                case StateChange.MOVE:
                    assert slot not in moved, "a checkpoint is to get two states"
                    assert self._slot_of(slot) not in changed, "a state is moved to a row that begins"
                    moved.add(slot)
                    self.checkpoints[slot] = self.checkpoints[checkpoint]
                    if slot < 0:
                        self.states[self._slot_of(slot)] = POISON
                case StateChange.ZERO:
                    self._set_state(slot, START)
                case StateChange.SAVE:
                    assert (slot, tokens) not in self._saves, "a state is to be saved twice"
                    assert checkpoint not in self._saves.values(), "two states are to be saved in one checkpoint"
                    self._saves[slot, tokens] = checkpoint
                case _:
                    poisoned.append(checkpoint)
        for checkpoint in poisoned:
            self.checkpoints[checkpoint] = POISON

    def _slot_of(self, checkpoint: int) -> int:
        """The slot whose place has a checkpoint; the last ones are those of the dummy row."""
        return checkpoint // self.limits.checkpoints_per_row + self.limits.max_running + 1

    def _set_state(self, slot: int, state: int) -> None:
        self.states[slot] = state
        per_row = self.limits.checkpoints_per_row
        for part in range(per_row):
            # They share the memory of the slot.
            self.checkpoints.pop((slot - self.limits.max_running - 1) * per_row + part, None)

    def _advance_state(self, slot: int, position: int, before: int, after: int) -> None:
        assert self.states[slot] == before, f"row {slot} has another state at {position}"
        self.states[slot] = after
        if (saved := self._saves.pop((slot, position + 1), None)) is not None:
            # No other request may find that of a row whose logits are not finite.
            self.checkpoints[saved] = POISON if slot in self.fail_logits_of else after

    def _check_prefixes(self, plan: StepPlan) -> None:
        for prefix in decode_prefixes(plan.shared_prefixes, len(plan.decode_slots)):
            pages = self.page_table[plan.decode_slots[prefix.rows], : prefix.pages]
            assert (pages == pages[0]).all(), "rows are said to share pages that they do not"
            written = plan.decode_positions[prefix.rows] // self.limits.page_size
            assert (written >= prefix.pages).all(), "a shared page is still written"
            self.shared_rows += len(prefix.rows)

    def _store(self, slot: int, position: int, token: int) -> None:
        before = int(self.kv[self._address(slot, position - 1)]) if position else START
        self.kv[self._address(slot, position)] = after = mix(before, token)
        if self.limits.state_checkpoints is not None:
            self._advance_state(slot, position, before, after)
        if self.limits.window is not None:
            page, place = divmod(position, self.limits.page_size)
            self.window_kv[self.window_table[slot, page], place] = mix(before, token)

    def window_pages(self, slot: int, start: int, end: int) -> IntArray:
        """Pages of layers with a window that the tokens of a row from `start` to `end` read."""
        assert self.limits.window is not None
        first = max(start - self.limits.window + 1, 0) // self.limits.page_size
        return self.window_table[slot, first : (end - 1) // self.limits.page_size + 1]

    def _check_window(self, slot: int, start: int, end: int) -> None:
        if self.limits.window is None:
            return
        page = self.limits.page_size
        positions = np.arange(max(start - self.limits.window + 1, 0), end)
        stored = self.kv[self.page_table[slot, positions // page], positions % page]
        found = self.window_kv[self.window_table[slot, positions // page], positions % page]
        assert (found == stored).all(), f"row {slot} reads a page that is not its own"

    def _address(self, slot: int, position: int) -> tuple[int, int]:
        page, offset = divmod(position, self.limits.page_size)
        assert self.page_table[slot, page] >= 0, f"row {slot} has no page for position {position}"
        return int(self.page_table[slot, page]), offset

    def _sample(self, slot: int, position: int, masks: dict[int, IntArray]) -> int:
        positions = np.arange(position)
        kv = self.kv[self.page_table[slot, positions // self.limits.page_size], positions % self.limits.page_size]
        allowed: Collection[int] = range(self.limits.vocab_size)
        if slot in masks:
            bits = np.unpackbits(masks[slot].view(np.uint8), bitorder="little")
            assert not bits[self.limits.vocab_size :].any()
            allowed = np.flatnonzero(bits).tolist()
            assert allowed, "a mask allows nothing"
        token = next_token(kv, int(self.seeds[slot]), position, allowed)
        if slot in self.fail_logits_of:
            return -1
        self.last_token[slot] = token
        return token
