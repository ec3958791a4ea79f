from __future__ import annotations

import numpy as np
import pytest

from minisgl.engine.graphs.sizes import (
    FEWEST_PROMPTS,
    cascade_sizes,
    fitting_size,
    graph_sizes,
    launch_bound_tokens,
    prefers_cascade,
    prefill_sizes,
    text_sizes,
)
from minisgl.engine.interface import MOST_PROMPTS
from minisgl.wire.plan import StepPlan
from minisgl.wire.shared_prefixes import SharedPrefix
from support.plans import Segment, make_plan


def test_sizes_are_dense_and_end_with_the_largest() -> None:
    assert graph_sizes(0) == []
    assert graph_sizes(1) == [1]
    assert graph_sizes(10) == [1, 2, 3, 4, 6, 8, 10]
    assert graph_sizes(32) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert graph_sizes(300)[-4:] == [256, 272, 288, 300]
    assert len(graph_sizes(512)) == 54


def test_padding_of_large_batches_is_small() -> None:
    sizes = graph_sizes(1000)
    for rows in range(64, 1001):
        assert min(size for size in sizes if size >= rows) - rows <= rows * 0.125


def test_graphs_for_shared_prefixes_are_few() -> None:
    assert cascade_sizes(0) == []
    assert cascade_sizes(24) == [24]
    assert cascade_sizes(256) == [32, 64, 96, 128, 160, 192, 224, 256]
    assert cascade_sizes(700)[-5:] == [384, 448, 512, 640, 700]


def _plan(decode: int, *segments: tuple[int, int]) -> StepPlan:
    prefill = [Segment(decode + slot, start, [0] * length) for slot, (start, length) in enumerate(segments)]
    return make_plan(0, decode=[(slot, 5) for slot in range(decode)], prefill=prefill)


def test_prompts_have_graphs_alone_beside_some_and_beside_all_rows() -> None:
    sizes = [(size.tokens, size.decode) for size in prefill_sizes(100, 256, 8192) if size.prefix]
    alone, mixed = [8, 16, 32, 64, 128, 192, 256], [(96, 32), (64, 64), (224, 32), (192, 64), (156, 100)]
    assert sorted(sizes) == sorted([*((tokens, 0) for tokens in alone), *mixed])
    assert prefill_sizes(256, 4, 8192) == prefill_sizes(0, 4096, 8192) == []
    assert {size.decode for size in prefill_sizes(20, 1000, 8192)} == {0, 20}
    assert {size.decode for size in prefill_sizes(600, 4096, 8192)} == {0, 32, 64, 128, 256, 512, 600}


def test_steps_of_a_large_model_have_few_graphs_without_gaps_between_them() -> None:
    sizes = prefill_sizes(256, launch_bound_tokens(40, 13_200_000_000), 8192)
    assert len(sizes) <= 51
    for rows in (1, 33, 100, 256):
        tokens = sorted(size.tokens for size in sizes if size.decode >= rows)
        smallest = min(size.decode for size in sizes if size.decode >= rows)
        assert tokens[-1] + smallest == 1024
        for wanted in range(64, 1024 - smallest):
            size = next(size for size in sizes if size.decode >= rows and size.tokens >= wanted)
            assert size.tokens + size.decode < wanted + smallest + 128


def test_a_prompt_alone_without_a_prefix_has_its_own_graphs() -> None:
    sizes = prefill_sizes(256, 1280, 8192)
    for plan, prefix in ((_plan(0, (0, 100)), False), (_plan(0, (64, 100)), True), (_plan(0, (0, 600)), True)):
        size = fitting_size(sizes, plan, most_keys=2000)
        assert size is not None and size.prefix == prefix


def test_a_step_of_the_whole_budget_has_a_graph_for_all_rows_and_many_prompts() -> None:
    sizes = prefill_sizes(256, 8192, 8192)
    prompts = [(64, 100)] * 40
    assert fitting_size(sizes, _plan(200, *prompts, (0, 3900)), most_keys=32_768) == sizes[-1]
    assert (sizes[-1].decode, sizes[-1].tokens) == (256, 8192)
    assert all(size.tokens < 8192 for size in prefill_sizes(256, 8191, 8192))


def test_many_short_prompts_are_padded_little() -> None:
    sizes = prefill_sizes(256, 8192, 8192)
    for prompts in range(1, MOST_PROMPTS + 1):
        for rows in (0, 30, 256):
            size = fitting_size(sizes, _plan(rows, *[(0, 5)] * prompts), most_keys=32_768)
            assert size is not None and size.tokens <= 2 * 5 * prompts + 512


def test_steps_of_states_have_few_prompts() -> None:
    sizes = prefill_sizes(256, 8192, 8192, most_prompts=FEWEST_PROMPTS)
    assert {size.segments for size in sizes} == {FEWEST_PROMPTS}


def test_small_models_have_graphs_for_more_tokens() -> None:
    assert launch_bound_tokens(28, 440_000_000) > 5 * launch_bound_tokens(40, 13_200_000_000) > 5 * 1024


@pytest.mark.parametrize(
    ("plan", "size"),
    [
        (_plan(0, (0, 4)), (0, 8)),
        (_plan(0, (0, 8)), (0, 8)),
        (_plan(0, (0, 5), (64, 4)), (0, 16)),
        (_plan(1, (0, 4)), (32, 96)),
        (_plan(33, (0, 96)), (64, 192)),
        (_plan(200, (300, 80), (0, 57)), (256, 256)),
        (_plan(257, (0, 4)), None),
        (_plan(2, (0, 300)), (32, 352)),
        (_plan(0, (0, 300)), (0, 384)),
        (_plan(2, (0, 993)), None),
        (_plan(0, *[(0, 1)] * FEWEST_PROMPTS), (0, 8)),
        (_plan(0, *[(0, 1)] * (FEWEST_PROMPTS + 1)), (0, 128)),
        (_plan(0, *[(0, 5)] * 16), (0, 128)),
        (_plan(200, *[(0, 5)] * 16), (256, 128)),
        (_plan(0, *[(0, 5)] * MOST_PROMPTS), (0, 1024)),
        (_plan(0, *[(0, 5)] * (MOST_PROMPTS + 1)), None),
        (_plan(0, (1990, 8)), (0, 8)),
        (_plan(0, (1990, 11)), None),
    ],
)
def test_a_step_gets_the_smallest_size_that_fits(plan: StepPlan, size: tuple[int, int] | None) -> None:
    sizes = [size for size in prefill_sizes(256, 1280, 8192) if size.prefix]
    found = fitting_size(sizes, plan, most_keys=2000)
    assert (found and (found.decode, found.tokens)) == size


def test_only_long_shared_prefixes_of_many_rows_save_more_than_a_graph() -> None:
    decode = [(slot, 5000) for slot in range(200)]
    page_bytes = 2 * 64 * 8 * 128 * 2
    plans = [
        make_plan(0, decode=decode, prefixes=prefixes)
        for prefixes in ([], [SharedPrefix(10, np.arange(200, dtype=np.int32))])
    ]
    assert not any(prefers_cascade(plan, page_bytes) for plan in plans)
    long = make_plan(0, decode=decode, prefixes=[SharedPrefix(60, np.arange(200, dtype=np.int32))])
    assert prefers_cascade(long, page_bytes) and not prefers_cascade(long, page_bytes // 8)


def test_steps_of_texts_have_graphs_with_little_padding_up_to_the_budget() -> None:
    sizes = text_sizes(256, 8448, prefixes=False)
    assert [size.tokens for size in sizes][-2:] == [8192, 8448]
    for tokens in range(8, 8449):
        size = next(size for size in sizes if size.tokens >= tokens)
        assert size.tokens <= max(16, 2 * tokens) and (tokens <= 1024 or size.tokens < tokens + 512)
        assert size.segments == min(size.tokens, 256) and size.decode == 0 and not size.prefix
    assert {(size.tokens, size.prefix) for size in text_sizes(4, 20, prefixes=True)} == {
        (tokens, prefix) for tokens in (16, 20) for prefix in (False, True)
    }
    assert text_sizes(256, 0, prefixes=True) == []
