"""Inputs of one step, packed on the host into a single int32 buffer and sliced on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minisgl.attention.cascade import CascadeLayout, CascadeTables
from minisgl.engine.logits_processors import DeviceLogitsProcessors
from minisgl.engine.tables import Tables
from minisgl.wire.plan import EMPTY, SAMPLING_COLUMNS, IntArray, StepPlan
from minisgl.wire.shared_prefixes import decode_prefixes


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """Views into one int32 buffer: D decode rows first, then P segments; T tokens, S sampled rows."""

    slots: torch.Tensor
    """[T] slot of each token"""
    positions: torch.Tensor
    """[T] position of each token in its sequence"""
    sample_slots: torch.Tensor
    """[S] slots of the rows that sample"""
    sample_positions: torch.Tensor
    """[S] number of tokens before the sampled one."""
    sample_rows: torch.Tensor
    """[S] index of the token after which each row samples."""
    filtered_rows: torch.Tensor
    """[F] indices of the S rows with top-k, top-p or min-p whose logits no processor changes."""
    prefill_tokens: torch.Tensor
    """[T − D]"""
    prefill_slots: torch.Tensor
    """[P]"""
    query_offsets: torch.Tensor
    """[P + 1]"""
    prefill_kv_lengths: torch.Tensor
    """[P]"""
    page_updates: torch.Tensor
    """[3, U]"""
    new_rows: torch.Tensor
    """[SAMPLING_COLUMNS, N]"""
    poison_pages: torch.Tensor
    """[Z]"""
    processors: DeviceLogitsProcessors | None
    cascade: CascadeTables | None


def dummy_plan(slot: int, *, decode: int = 0, prompts: Sequence[int] = ()) -> StepPlan:
    """A plan whose rows all have the dummy `slot`: `decode` rows that decode, and prompts of the given lengths."""
    segments = np.full(len(prompts), slot, np.int32)
    return StepPlan.build(
        epoch=0,
        step=0,
        decode_slots=np.full(decode, slot, np.int32),
        decode_positions=np.zeros(decode, np.int32),
        prefill_slots=segments,
        prefill_starts=np.zeros_like(segments),
        prefill_lengths=np.array(prompts, np.int32),
        prefill_sample=np.ones_like(segments),
        prefill_tokens=np.zeros(sum(prompts), np.int32),
    )


class PackedStep:
    """A plan, expanded to the inputs of the kernels. The first five parts have the same offsets in every pure decode
    step of one size, so a CUDA graph can read them there."""

    def __init__(
        self, plan: StepPlan, tables: Tables, decode_rows: int | None = None, cascade: CascadeLayout | None = None
    ) -> None:
        """`decode_rows`: pad a pure decode step to this number of rows with the dummy slot. `cascade`: the layout for
        shared prefixes; None: ignore them."""
        tables.record_filters(plan.new_rows)
        self.sampled_slots = plan.sampled_slots
        self.decode_slots, self.decode_positions = plan.decode_slots, plan.decode_positions
        if decode_rows is not None and (padding := decode_rows - len(plan.decode_slots)):
            assert not len(plan.prefill_slots)
            self.decode_slots = np.append(plan.decode_slots, np.full(padding, tables.dummy_slot, np.int32))
            self.decode_positions = np.append(plan.decode_positions, np.zeros(padding, np.int32))
        self.prefill_starts, self.prefill_lengths = plan.prefill_starts, plan.prefill_lengths
        self.sampled = len(self.sampled_slots)
        self.filtered = tables.filtered(self.sampled_slots)
        self.processors = tables.processors.select(plan, self.sampled_slots, self.filtered)
        if self.processors is not None:
            self.filtered = np.setdiff1d(self.filtered, self.processors.changed, assume_unique=True)
        self._plan = plan
        self._cascade = cascade
        self._parts = self._decode_parts() if not len(plan.prefill_slots) else self._mixed_parts()
        self.size = sum(map(len, self._parts))

    @property
    def num_decode(self) -> int:
        """Number of decode rows, with padding."""
        return len(self.decode_slots)

    @property
    def num_segments(self) -> int:
        """Number of prefill segments."""
        return len(self.prefill_lengths)

    @property
    def graph_size(self) -> int:
        """Size of the parts that a CUDA graph reads."""
        return sum(map(len, self._parts[:5]))

    def _decode_parts(self) -> list[IntArray]:
        after = self.decode_positions + np.int32(1)
        rows = np.arange(self.num_decode, dtype=np.int32)
        first = [self.decode_slots, self.decode_positions, self.decode_slots, after, self._cascade_part()]
        second = [rows, self.filtered, EMPTY, EMPTY, np.zeros(1, np.int32), EMPTY]
        return [*first, *second, *self._update_parts()]

    def _mixed_parts(self) -> list[IntArray]:
        plan, d = self._plan, self.num_decode
        starts, lengths = plan.prefill_starts, plan.prefill_lengths
        ends = starts + lengths
        offsets = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        positions = np.arange(len(plan.prefill_tokens), dtype=np.int32) + np.repeat(starts - offsets[:-1], lengths)
        last = plan.prefill_sample == 1
        return [
            np.concatenate((self.decode_slots, np.repeat(plan.prefill_slots, lengths))),
            np.concatenate((self.decode_positions, positions)),
            self.sampled_slots,
            np.concatenate((self.decode_positions + np.int32(1), ends[last])),
            self._cascade_part(),
            np.concatenate((np.arange(d, dtype=np.int32), d - 1 + offsets[1:][last])),
            self.filtered,
            plan.prefill_tokens,
            plan.prefill_slots,
            offsets,
            ends,
            *self._update_parts(),
        ]

    def _cascade_part(self) -> IntArray:
        if self._cascade is None:
            return EMPTY
        groups = decode_prefixes(self._plan.shared_prefixes, len(self._plan.decode_slots))
        return self._cascade.pack(groups, self.num_decode)

    def _update_parts(self) -> list[IntArray]:
        plan, processors = self._plan, EMPTY if self.processors is None else self.processors.packed()
        return [plan.page_updates.ravel(), plan.new_rows.ravel(), plan.poison_pages, processors]

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
        parts = iter(torch.split(buffer[: self.size], [len(part) for part in self._parts]))
        return DeviceStep(
            slots=next(parts),
            positions=next(parts),
            sample_slots=next(parts),
            sample_positions=next(parts),
            cascade=self._cascade_view(next(parts)),
            sample_rows=next(parts),
            filtered_rows=next(parts),
            prefill_tokens=next(parts),
            prefill_slots=next(parts),
            query_offsets=next(parts),
            prefill_kv_lengths=next(parts),
            page_updates=next(parts).view(3, -1),
            new_rows=next(parts).view(SAMPLING_COLUMNS, -1),
            poison_pages=next(parts),
            processors=None if self.processors is None else self.processors.view(next(parts)),
        )

    def _cascade_view(self, part: torch.Tensor) -> CascadeTables | None:
        return None if self._cascade is None else self._cascade.view(part, self.num_decode)
