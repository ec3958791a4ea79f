"""Hand-built plans, for tests that drive an engine without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minisgl.wire.plan import SAMPLING_COLUMNS, StepPlan
from minisgl.wire.shared_prefixes import SharedPrefix, encode_prefixes


@dataclass(frozen=True)
class Segment:
    """Prompt tokens of one row; `sample`: they end the prompt."""

    slot: int
    start: int
    tokens: Sequence[int]
    sample: bool = True


def new_row(
    slot: int, *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0
) -> list[int]:
    """Sampling parameters of a row as a column of `StepPlan.new_rows`."""

    def bits(value: float) -> int:
        return int(np.float32(value).view(np.int32))

    low, high = np.array([seed], np.int64).view(np.int32).tolist()
    return [slot, bits(temperature), top_k, bits(top_p), bits(min_p), low, high]


def make_plan(
    step: int,
    *,
    decode: Sequence[tuple[int, int]] = (),
    prefill: Sequence[Segment] = (),
    pages: Sequence[tuple[int, int, int]] = (),
    rows: Sequence[Sequence[int]] = (),
    poison: Sequence[int] = (),
    epoch: int = 0,
    prefixes: Sequence[SharedPrefix] = (),
) -> StepPlan:
    """`decode`: (slot, position of the input token). `pages`: (slot, index, page)."""

    def ints(values: Sequence[int] | Sequence[Sequence[int]]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        return np.array(values, np.int32)

    return StepPlan.build(
        epoch=epoch,
        step=step,
        decode_slots=ints([slot for slot, _ in decode]),
        decode_positions=ints([position for _, position in decode]),
        prefill_slots=ints([s.slot for s in prefill]),
        prefill_starts=ints([s.start for s in prefill]),
        prefill_lengths=ints([len(s.tokens) for s in prefill]),
        prefill_sample=ints([int(s.sample) for s in prefill]),
        prefill_tokens=ints([token for s in prefill for token in s.tokens]),
        page_updates=ints(pages).reshape(-1, 3).T,
        new_rows=ints(rows).reshape(-1, SAMPLING_COLUMNS).T,
        poison_pages=ints(poison),
        shared_prefixes=encode_prefixes(prefixes),
    )
