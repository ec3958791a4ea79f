"""Layout of a plan for the device."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch

from minisgl.attention.cascade import CascadeLayout
from minisgl.engine.batch import DeviceStep, PackedStep, StepSize, StepViews
from minisgl.engine.tables import Tables
from minisgl.wire.plan import StepPlan
from minisgl.wire.shared_prefixes import SharedPrefix
from support.plans import Segment, make_plan

LAYOUT = CascadeLayout(group=4, kv_heads=2, programs=64, part_pages=1)
DECODE = [(slot, 100 + slot) for slot in (5, 3, 8, 1)]
PREFIX = SharedPrefix(6, np.array([0, 2, 3], np.int32))


def _packed(plan: StepPlan, rows: int | None, layout: CascadeLayout | None) -> tuple[PackedStep, DeviceStep]:
    tables = Tables(40, 8, 99, 100, torch.device("cpu"))
    packed = PackedStep(plan, tables, None if rows is None else StepSize(rows), layout)
    buffer = np.empty(packed.size, np.int32)
    packed.write(buffer)
    return packed, packed.view(torch.from_numpy(buffer))


def test_padding_belongs_to_the_dummy_row() -> None:
    packed, _ = _packed(make_plan(0, decode=DECODE), 8, None)
    assert packed.decode_slots.tolist() == [5, 3, 8, 1, 40, 40, 40, 40], "padding writes to a request's row"


def test_the_inputs_of_a_graph_have_the_same_offsets_in_every_step_of_its_size() -> None:
    few = make_plan(0, decode=DECODE[:1])
    many = make_plan(1, decode=DECODE, prefixes=[PREFIX], pages=[(3, 1, 7)], poison=[4, 5])
    places = []
    for plan in (few, many):
        packed, step = _packed(plan, 32, LAYOUT)
        assert step.cascade is not None
        parts = (*_inputs(step), *_cascade_parts(step))
        places.append([(part.storage_offset(), part.numel()) for part in parts])
        assert packed.graph_size == sum(part.numel() for part in parts)
    assert places[0] == places[1]


def test_padded_rows_share_nothing() -> None:
    _, step = _packed(make_plan(0, decode=DECODE, prefixes=[PREFIX]), 6, LAYOUT)
    assert step.cascade is not None
    assert step.slots.tolist() == [5, 3, 8, 1, 40, 40]
    assert step.cascade.prefix_pages.tolist() == [6, 0, 6, 6, 0, 0]
    assert step.cascade.tiles[0].tolist() == [6, 0, 2, 3] + [-1] * 29


def test_steps_with_segments_may_share_as_well() -> None:
    plan = make_plan(0, decode=DECODE, prefixes=[PREFIX], prefill=[Segment(2, 0, [7, 8, 9])])
    _, step = _packed(plan, None, LAYOUT)
    assert step.cascade is not None
    assert step.cascade.prefix_pages.tolist() == [6, 0, 6, 6]
    assert step.prefill_tokens.tolist() == [7, 8, 9]


def test_groups_are_ignored_without_a_layout() -> None:
    packed, step = _packed(make_plan(0, decode=DECODE, prefixes=[PREFIX]), 8, None)
    assert step.cascade is None and packed.graph_size == 6 * 8 + 1


def test_kept_views_are_those_of_the_step() -> None:
    tables = Tables(40, 8, 99, 100, torch.device("cpu"))
    buffer = torch.zeros(1000, dtype=torch.int32)
    views = StepViews(buffer)
    plans = [
        make_plan(0, decode=DECODE, pages=[(3, 1, 7)]),
        make_plan(1, decode=DECODE, pages=[(5, 1, 6)]),
        make_plan(2, decode=DECODE, prefixes=[PREFIX], pages=[(5, 1, 6)]),
        make_plan(3, decode=DECODE[:2]),
        make_plan(4, decode=DECODE[:2], prefill=[Segment(2, 0, [7, 8, 9])]),
        make_plan(5, decode=DECODE, pages=[(5, 1, 6), (8, 1, 2)]),
    ]
    seen = []
    for plan in (*plans, *plans):
        layout = LAYOUT if len(plan.shared_prefixes) else None
        packed = PackedStep(plan, tables, None if len(plan.prefill_slots) else StepSize(6), layout)
        packed.write(buffer.numpy()[: packed.size])
        kept, fresh = views.of(packed), packed.view(buffer)
        for field in fields(DeviceStep):
            if field.name not in ("changes", "cascade", "prompts", "sampled"):
                assert torch.equal(getattr(kept, field.name), getattr(fresh, field.name)), field.name
        assert (kept.changes is None, kept.cascade is None) == (fresh.changes is None, fresh.cascade is None)
        seen.append(kept)
    assert [index for index, step in enumerate(seen) if any(step is one for one in seen[:index])] == [
        1,
        6,
        7,
        9,
        10,
        11,
    ]


def _inputs(step: DeviceStep) -> tuple[torch.Tensor, ...]:
    """Everything that a graph reads, but for the cascade tables."""
    return (
        step.slots,
        step.positions,
        step.decode_lengths,
        step.sample_slots,
        step.sample_positions,
        step.sample_rows,
        step.prefill_tokens,
        step.prefill_slots,
        step.query_offsets,
        step.prefill_kv_lengths,
    )


def _cascade_parts(step: DeviceStep) -> tuple[torch.Tensor, ...]:
    assert step.cascade is not None
    return step.cascade.counts, step.cascade.prefix_pages, step.cascade.tiles
