"""Inputs of one step, packed on the host into a single int32 buffer and sliced on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from minisgl.attention.cascade import CascadeLayout, CascadeTables
from minisgl.attention.recurrent import Prompts, StateChanges
from minisgl.engine.logits_processors import NEW_ROW_COLUMNS, DeviceChanges
from minisgl.engine.tables import Tables
from minisgl.kernels.attention.prompt_chunks import PromptChunks, Segment, chunks_of, most_chunks
from minisgl.kernels.speculation.step_rows import SampledRows
from minisgl.wire.plan import EMPTY, IntArray, StepPlan, runs
from minisgl.wire.shared_prefixes import decode_prefixes

_KEPT_VIEWS: Final = 256


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """Views into one int32 buffer: D decode rows first, then P segments; T tokens, S sampled rows. All of them with
    padding; rows that the plan samples come before padding."""

    slots: torch.Tensor
    """[T] slot of each token"""
    positions: torch.Tensor
    """[T] position of each token in its sequence"""
    decode_lengths: torch.Tensor
    """[D] positions that each decode row attends to"""
    sample_slots: torch.Tensor
    """[S] slots of the rows that sample"""
    sample_positions: torch.Tensor
    """[S] number of tokens before the sampled one."""
    sample_rows: torch.Tensor
    """[S] index of the token after which each row samples."""
    prefill_tokens: torch.Tensor
    """[T − D]"""
    prefill_slots: torch.Tensor
    """[P]"""
    query_offsets: torch.Tensor
    """[P + 1]"""
    prefill_kv_lengths: torch.Tensor
    """[P]"""
    processed_rows: torch.Tensor
    """[F] indices of the S rows with filters, logits processors or log-probabilities."""
    reported_rows: torch.Tensor
    """[N] indices of the S rows that report log-probabilities."""
    reported_ids: torch.Tensor
    """See `StepProcessors.named`."""
    late_slots: torch.Tensor
    """[L] slots of constrained rows"""
    page_updates: torch.Tensor
    """[3, U]"""
    new_rows: torch.Tensor
    """[NEW_ROW_COLUMNS, N]"""
    poison_pages: torch.Tensor
    """[Z]"""
    window_updates: torch.Tensor
    """[3, V]"""
    poison_window_pages: torch.Tensor
    """[Y]"""
    state_changes: torch.Tensor
    """[4, K], see `StateChanges`."""
    texts: torch.Tensor
    """[H]"""
    sampled: SampledRows | None
    """Rows whose drafts are verified; None: the engine does not speculate."""
    changes: DeviceChanges | None
    cascade: CascadeTables | None
    prompts: Prompts | None
    """Prompts of a model with recurrent states."""

    def without_padding(self, sampled: int) -> DeviceStep:
        """The step with only the first `sampled` of the rows that sample."""
        return replace(self, sample_slots=self.sample_slots[:sampled], sample_positions=self.sample_positions[:sampled])


@dataclass(frozen=True, slots=True)
class StepSize:
    """Size to which a step is padded: that of a captured one."""

    decode: int
    """Decode rows."""
    tokens: int = 0
    """Prompt tokens. Tokens that are missing form one more segment of the dummy slot, so that no kernel computes with
    undefined values."""
    segments: int = 0
    """Most prompt segments, without the one of the padding."""
    prefix: bool = True
    """Whether segments may begin behind a prefix."""


class PackedStep:
    """A plan, expanded to the inputs of the kernels. The first parts have the same offsets in every step that is padded
    to one size, so a CUDA graph can read them there."""

    def __init__(
        self, plan: StepPlan, tables: Tables, size: StepSize | None = None, cascade: CascadeLayout | None = None
    ) -> None:
        """`size`: pad the step to this size, with the dummy slot. `cascade`: the layout for shared prefixes; None:
        ignore them."""
        self.sampled_slots = plan.sampled_slots
        self.decode_slots, self.decode_positions = plan.decode_slots, plan.decode_positions
        self._prefill_slots, self._prefill_tokens = plan.prefill_slots, plan.prefill_tokens
        self.prefill_starts, self.prefill_lengths = plan.prefill_starts, plan.prefill_lengths
        self.sampled = len(self.sampled_slots)
        self._plan = plan
        self._sample_positions = self._positions_after()
        self.processors = tables.processors.select(plan, self.sampled_slots, self._sample_positions)
        self._new_rows = tables.processors.new_rows(plan.new_rows[0]).ravel() if plan.new_rows.shape[1] else EMPTY
        self._cascade = cascade
        self.state_changes = StateChanges.of(
            plan.state_changes, plan.prefill_slots, plan.prefill_starts + plan.prefill_lengths
        )
        self._sample_padding = 0
        self._dummy_slot = tables.dummy_slot
        self._has_chunks = tables.has_chunks
        self.speculates = tables.texts is not None
        if self.speculates:
            self._widths = plan.widths if len(plan.widths) else np.ones(len(plan.decode_slots), np.int32)
            self._first, self._places = runs(self._widths)
        if size is not None:
            self._pad(size)
        parts = self._decode_parts() if not len(self.prefill_lengths) else self._mixed_parts(size)
        self._graph_parts = len(parts)
        self._parts = [*parts, *self._processor_parts(), *self._update_parts()]
        self.lengths = tuple(map(len, self._parts))
        """Lengths of the parts of the buffer."""
        self.size = sum(self.lengths)

    @property
    def texts(self) -> IntArray:
        """Texts of rows that join."""
        return self._plan.texts

    @property
    def segments(self) -> list[Segment]:
        """Prefill segments, with padding."""
        columns = self._prefill_slots.tolist(), self.prefill_starts.tolist(), self.prefill_lengths.tolist()
        return list(map(Segment, *columns))

    @property
    def num_decode(self) -> int:
        """Number of decode rows, with padding."""
        return len(self.decode_slots)

    @property
    def num_segments(self) -> int:
        """Number of prefill segments, with padding."""
        return len(self.prefill_lengths)

    @property
    def has_drafts(self) -> bool:
        """Whether some row has several decode rows, each of which attends to those before it."""
        return 0 < len(self._plan.widths) < len(self._plan.decode_slots)

    @property
    def graph_size(self) -> int:
        """Size of the parts that a CUDA graph reads."""
        return sum(self.lengths[: self._graph_parts])

    def _pad(self, size: StepSize) -> None:
        rows = size.decode - len(self.decode_slots)
        tokens = size.tokens - len(self._prefill_tokens)
        segments = size.segments - len(self.prefill_lengths)
        assert rows >= 0 and tokens >= 0 and segments >= 0
        if rows:
            self.decode_slots = _extended(self.decode_slots, rows, self._dummy_slot)
            self.decode_positions = _extended(self.decode_positions, rows)
            if self.speculates:
                self._places = _extended(self._places, rows)
        self._sample_padding = size.decode + size.segments - self.sampled
        if size.tokens:
            # The first segment behind those of the plan has the padding, the others are empty.
            self._prefill_slots = _extended(self._prefill_slots, segments + 1, self._dummy_slot)
            self.prefill_starts = _extended(self.prefill_starts, segments + 1)
            self.prefill_lengths = _extended(np.append(self.prefill_lengths, np.int32(tokens)), segments)
            self._prefill_tokens = _extended(self._prefill_tokens, tokens)

    def _positions_after(self) -> IntArray:
        """[S] number of tokens before the sampled one."""
        plan, after = self._plan, self.decode_positions + np.int32(1)
        if not len(plan.prefill_slots):
            return after
        ends = plan.prefill_starts + plan.prefill_lengths
        return np.concatenate((after, ends[plan.prefill_sample == 1]))

    def _decode_parts(self) -> list[IntArray]:
        after = self.decode_positions + np.int32(1)
        rows = np.arange(self.num_decode, dtype=np.int32)
        first = [self.decode_slots, self._decode_places(), after, self.decode_slots, after, rows]
        return [*first, EMPTY, EMPTY, np.zeros(1, np.int32), EMPTY, self._cascade_part(), EMPTY, EMPTY]

    def _mixed_parts(self, size: StepSize | None) -> list[IntArray]:
        plan, d = self._plan, self.num_decode
        starts, lengths = self.prefill_starts, self.prefill_lengths
        ends = starts + lengths
        offsets = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        positions = np.arange(offsets[-1], dtype=np.int32) + np.repeat(starts - offsets[:-1], lengths)
        after = self.decode_positions + np.int32(1)
        last = np.flatnonzero(plan.prefill_sample == 1)
        rows = np.arange(len(plan.decode_slots), dtype=np.int32)
        padding = self._sample_padding
        return [
            np.concatenate((self.decode_slots, np.repeat(self._prefill_slots, lengths))),
            np.concatenate((self._decode_places(), positions)),
            after,
            _extended(self.sampled_slots, padding, self._dummy_slot),
            _extended(self._sample_positions, padding),
            _extended(np.concatenate((rows, d - 1 + offsets[1:][last])), padding),
            self._prefill_tokens,
            self._prefill_slots,
            offsets,
            ends,
            self._cascade_part(),
            *self._chunk_parts(size),
        ]

    def _decode_places(self) -> IntArray:
        """[D] positions, or the place of each in its row, of which `place_drafts` makes positions."""
        return self._places if self.speculates else self.decode_positions

    def _verified_parts(self) -> tuple[IntArray, IntArray, IntArray]:
        """Slots, first sampled tokens and widths of the rows that sample, as `SampledRows`."""
        if not self.speculates:
            return EMPTY, EMPTY, EMPTY
        decode = len(self._plan.decode_slots)
        prompts = np.arange(decode, self.sampled, dtype=np.int32)
        first = np.concatenate((self._first, prompts))
        return self.sampled_slots[first], first, np.concatenate((self._widths, np.ones_like(prompts)))

    def _chunk_parts(self, size: StepSize | None) -> tuple[IntArray, IntArray]:
        if not self._has_chunks:
            return EMPTY, EMPTY
        most = None if size is None else most_chunks(size.tokens, size.segments + 1)
        chunks, ends = chunks_of(self.segments, self.state_changes.within, most)
        return chunks.ravel(), ends

    def _cascade_part(self) -> IntArray:
        if self._cascade is None:
            return EMPTY
        groups = decode_prefixes(self._plan.shared_prefixes, len(self._plan.decode_slots))
        return self._cascade.pack(groups, self.num_decode)

    def _processor_parts(self) -> list[IntArray]:
        processors = self.processors
        return [processors.rows, processors.reported, processors.named, processors.late_slots]

    def _update_parts(self) -> list[IntArray]:
        plan = self._plan
        pages = plan.page_updates.ravel(), self._new_rows, plan.poison_pages
        windows = plan.window_updates.ravel(), plan.poison_window_pages
        states_and_texts = self.state_changes.columns.ravel(), plan.texts
        return [*pages, *windows, *states_and_texts, *self._verified_parts(), self.processors.packed()]

    @property
    def depends_on_lengths(self) -> bool:
        """Views of this step are those of any other one that has the same `lengths` in the same buffer."""
        return self._cascade is None and not self.processors.changes

    def write(self, buffer: IntArray) -> None:
        """Pack into `buffer` [size] int32."""
        np.concatenate(self._parts, out=buffer, casting="same_kind")

    def on_host(self) -> torch.Tensor:
        """The packed inputs [size] int32 in a new buffer of the host."""
        buffer = np.empty(self.size, np.int32)
        self.write(buffer)
        return torch.from_numpy(buffer)

    def view(self, buffer: torch.Tensor) -> DeviceStep:
        """Slices of the packed `buffer` [≥ size] int32 on the device."""
        parts = iter(torch.split(buffer[: self.size], list(self.lengths)))
        return DeviceStep(
            slots=next(parts),
            positions=next(parts),
            decode_lengths=next(parts),
            sample_slots=next(parts),
            sample_positions=next(parts),
            sample_rows=next(parts),
            prefill_tokens=next(parts),
            prefill_slots=(prefill_slots := next(parts)),
            query_offsets=(query_offsets := next(parts)),
            prefill_kv_lengths=next(parts),
            cascade=self._cascade_view(next(parts)),
            prompts=self._prompts_view(prefill_slots, query_offsets, next(parts), next(parts)),
            processed_rows=next(parts),
            reported_rows=next(parts),
            reported_ids=next(parts),
            late_slots=next(parts),
            page_updates=next(parts).view(3, -1),
            new_rows=next(parts).view(NEW_ROW_COLUMNS, -1),
            poison_pages=next(parts),
            window_updates=next(parts).view(3, -1),
            poison_window_pages=next(parts),
            state_changes=next(parts).view(4, -1),
            texts=next(parts),
            sampled=self._sampled_view(next(parts), next(parts), next(parts)),
            changes=self.processors.view(next(parts)),
        )

    def _cascade_view(self, part: torch.Tensor) -> CascadeTables | None:
        return None if self._cascade is None else self._cascade.view(part, self.num_decode)

    def _sampled_view(self, *columns: torch.Tensor) -> SampledRows | None:
        return SampledRows(*columns) if self.speculates else None

    def _prompts_view(
        self, slots: torch.Tensor, offsets: torch.Tensor, chunks: torch.Tensor, ends: torch.Tensor
    ) -> Prompts | None:
        if not len(ends):
            return None
        return Prompts(slots, offsets, PromptChunks(chunks.view(5, -1), ends, len(self._prefill_tokens)))


class StepViews:
    """Views of one buffer for the steps that are packed into it. They are kept by the lengths of the parts: most decode
    steps differ in the number of page updates only, and to make views takes the host a tenth of a launch."""

    def __init__(self, buffer: torch.Tensor) -> None:
        """`buffer` [≥ size of each step] int32, on the device."""
        self._buffer = buffer
        self._kept: dict[tuple[int, ...], DeviceStep] = {}

    def of(self, packed: PackedStep) -> DeviceStep:
        """The same as `PackedStep.view`."""
        if not packed.depends_on_lengths:
            return packed.view(self._buffer)
        step = self._kept.get(packed.lengths)
        if step is None:
            if len(self._kept) >= _KEPT_VIEWS:
                self._kept.clear()
            step = self._kept[packed.lengths] = packed.view(self._buffer)
        return step


def _extended(values: IntArray, count: int, fill: int = 0) -> IntArray:
    return np.append(values, np.full(count, fill, np.int32)) if count else values
