"""Parameters of joining rows in the device's tables, and what later steps of these rows pack."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from minisgl.engine.batch import DeviceStep, PackedStep
from minisgl.engine.tables import Tables
from minisgl.kernels.sampling import sampling_rows as columns
from minisgl.wire.logits_processors import RowLogitsProcessors
from minisgl.wire.plan import StepPlan
from support.plans import new_row

DEFAULTS = {
    "prompt_length": 5,
    "repetition": 1.0,
    "frequency": 0.0,
    "presence": 0.0,
    "min_tokens": 0,
    "logprobs": -1,
    "prompt_logprobs": -1,
    "prompt_logprobs_from": 5,
}
NONE = np.empty(0, np.int32)
ARRAYS = dict.fromkeys(("masked_ids", "bias_ids", "prompt", "output"), NONE) | {"bias_values": NONE.view(np.float32)}


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def _row(slot: int, **fields: object) -> RowLogitsProcessors:
    return RowLogitsProcessors(slot=slot, **(DEFAULTS | ARRAYS | fields))  # type: ignore[arg-type]


def _plan(
    slots: Sequence[int], position: int, *, new: Sequence[Sequence[int]] = (), rows: Sequence[RowLogitsProcessors] = ()
) -> StepPlan:
    return StepPlan.build(
        epoch=0,
        step=0,
        decode_slots=_ints(*slots),
        decode_positions=np.full(len(slots), position - 1, np.int32),
        new_rows=np.array(new, np.int32).reshape(-1, 7).T,
        logits_processors=np.concatenate((NONE, *(row.encode() for row in rows))),
    )


def _run(tables: Tables, plan: StepPlan) -> tuple[PackedStep, DeviceStep]:
    """Pack the plan and apply its changes to the tables."""
    packed = PackedStep(plan, tables)
    step = packed.view(packed.on_host())
    if step.new_rows.shape[1]:
        tables.set_rows(step.new_rows)
    if step.changes is not None:
        tables.apply(step.changes)
    return packed, step


def _tables() -> Tables:
    return Tables(8, 4, 0, 100, torch.device("cpu"))


def test_steps_after_that_of_the_join_pack_no_more_than_the_indices_of_the_rows() -> None:
    tables = _tables()
    new = [new_row(slot, temperature=0.7, top_k=20) for slot in range(4)]
    rows = [_row(slot, presence=1.0, prompt=_ints(3, 4, 3), output=_ints(9, 9), logprobs=2) for slot in (1, 3)]
    _run(tables, _plan(range(4), 6, new=new, rows=rows))
    plain, _ = _run(_tables(), _plan(range(4), 7))
    packed, step = _run(tables, _plan(range(4), 7))
    assert step.changes is None and not step.new_rows.numel()
    assert step.processed_rows.tolist() == [0, 1, 2, 3] and step.reported_rows.tolist() == [1, 3]
    assert packed.size == plain.size + 6


def test_histories_are_counted_by_token() -> None:
    tables = _tables()
    row = _row(2, repetition=1.1, prompt=_ints(3, 4, 3), output=_ints(9, 4, 9))
    _run(tables, _plan([2], 6, new=[new_row(2)], rows=[row]))
    counts = tables.device_processors.counts[2]
    assert {int(token): int(counts[token]) for token in counts.nonzero()} == {3: 1, 4: 3, 9: 4}


def test_counts_stop_before_they_overflow() -> None:
    tables = _tables()
    row = _row(2, frequency=0.1, prompt=_ints(7), output=np.full(40_000, 7, np.int32))
    _run(tables, _plan([2], 6, new=[new_row(2)], rows=[row]))
    assert tables.device_processors.counts[2, 7] == 32_767


def test_a_slot_forgets_the_row_before() -> None:
    tables = _tables()
    one = np.ones(1, np.float32)
    full = _row(2, presence=1.0, prompt=_ints(3), output=_ints(9), bias_ids=_ints(1), bias_values=one)
    _run(tables, _plan([2], 6, new=[new_row(2, temperature=1.0, top_p=0.5)], rows=[full]))
    packed, _ = _run(tables, _plan([2], 6, new=[new_row(2, temperature=1.0)]))
    assert packed.processors.stages == 0
    assert not tables.sampling_rows(torch.tensor([2]), torch.tensor([6])).column(columns.STAGES).any()
    _run(tables, _plan([2], 6, new=[new_row(2)], rows=[_row(2, presence=1.0, output=_ints(5))]))
    assert tables.device_processors.counts[2].nonzero().flatten().tolist() == [5]


def test_lists_are_sorted_and_grow() -> None:
    tables = _tables()
    biases = np.arange(90, -1, -1, dtype=np.int32)
    row = _row(1, bias_ids=biases, bias_values=biases.astype(np.float32) / 2, masked_ids=_ints(9, 2), min_tokens=3)
    _run(tables, _plan([1], 6, new=[new_row(1)], rows=[_row(1, bias_ids=_ints(5), bias_values=np.ones(1, np.float32))]))
    _run(tables, _plan([1], 6, new=[new_row(1)], rows=[row]))
    lists = tables.device_processors.lists
    assert lists.shape[2] == 128
    assert lists[1, 0, :93].tolist() == [*range(91), 2, 9]
    assert lists[1, 1, :91].view(torch.float32).tolist() == [value / 2 for value in range(91)]
    assert tables.device_processors.lists_address.tolist() == [lists.data_ptr(), 128]


def test_a_minimum_length_needs_no_stage_once_it_is_reached() -> None:
    tables = _tables()
    row = _row(1, min_tokens=3, masked_ids=_ints(9))
    stages = [
        _run(tables, _plan([1], position, new=new, rows=rows))[0].processors.stages
        for position, new, rows in ((5, [new_row(1)], [row]), (7, [], []), (8, [], []))
    ]
    assert stages == [columns.MASKED, columns.MASKED, 0]
