"""Encoding of plans: round trip, and rejection of invalid frames."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from minisgl.wire.plan import SAMPLING_COLUMNS, PlanError, StepPlan

SIZES = st.integers(0, 5)


def arrays(*shape: int) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.int32, shape)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    d, p, t, u, n, z, c, x, v, y = (draw(SIZES) for _ in range(10))
    return StepPlan.build(
        epoch=draw(st.integers(0, 2**62 - 1)),
        step=draw(st.integers(0, 2**62 - 1)),
        decode_slots=draw(arrays(d)),
        decode_positions=draw(arrays(d)),
        prefill_slots=draw(arrays(p)),
        prefill_starts=draw(arrays(p)),
        prefill_lengths=draw(arrays(p)),
        prefill_sample=draw(arrays(p)),
        prefill_tokens=draw(arrays(t)),
        page_updates=draw(arrays(3, u)),
        new_rows=draw(arrays(SAMPLING_COLUMNS, n)),
        poison_pages=draw(arrays(z)),
        logits_processors=draw(arrays(c)),
        shared_prefixes=draw(arrays(x)),
        window_updates=draw(arrays(3, v)),
        poison_window_pages=draw(arrays(y)),
    )


@given(plans())
def test_a_plan_is_decoded_as_encoded(plan: StepPlan) -> None:
    decoded = StepPlan.decode(plan.encode())
    for name in StepPlan.__struct_fields__:
        assert np.array_equal(getattr(decoded, name), getattr(plan, name)), name


@given(plans(), st.integers(1, 40))
def test_a_truncated_frame_is_rejected(plan: StepPlan, cut: int) -> None:
    with pytest.raises(PlanError):
        StepPlan.decode(plan.encode()[:-cut])


@given(st.binary(max_size=200))
def test_random_bytes_are_rejected_or_add_up(frame: bytes) -> None:
    try:
        plan = StepPlan.decode(frame)
    except PlanError:
        return
    assert plan.encode() == frame


def test_sampled_slots_are_decode_rows_then_prompts_that_end() -> None:
    def ints(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    plan = StepPlan.build(
        epoch=0,
        step=0,
        decode_slots=ints(4, 2),
        decode_positions=ints(9, 9),
        prefill_slots=ints(7, 8, 1),
        prefill_starts=ints(0, 0, 0),
        prefill_lengths=ints(1, 1, 1),
        prefill_sample=ints(1, 0, 1),
        prefill_tokens=ints(5, 5, 5),
    )
    assert plan.sampled_slots.tolist() == [4, 2, 7, 1]
