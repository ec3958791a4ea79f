"""Division of the KV cache's memory between layers that attend to all tokens and those with a window."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from minisgl import bench
from minisgl.config import EngineConfig
from minisgl.kv_layout import KVLayout, PoolPages, row_pages
from minisgl.models.config import ModelConfig

CONFIGS = Path(bench.__file__).parent / "configs"
GPU = EngineConfig(model="", device="cuda")


def _layout(model: str, max_model_len: int = 32_768, config: EngineConfig = GPU) -> KVLayout:
    description = json.loads((CONFIGS / f"{model}.json").read_text())
    return ModelConfig.parse(description).kv_layout(config, max_model_len)


def test_a_long_sequence_of_gemma_4_holds_few_pages_of_layers_with_a_window() -> None:
    layout = _layout("gemma-4-31b")
    assert (layout.full_bytes, layout.window_bytes) == (64 * 80 << 10, 64 * 800 << 10)
    one_pool = 32_768 * 880 << 10
    assert one_pool > 27 << 30
    assert layout.sequence_bytes(32_768) <= 4 << 30


def test_a_long_sequence_of_gpt_oss_holds_half_of_the_pages() -> None:
    layout = _layout("gpt-oss-20b")
    one_pool = 32_768 * 48 << 10
    assert layout.sequence_bytes(32_768) <= 0.55 * one_pool


@pytest.mark.parametrize("model", ["gemma-4-31b", "gpt-oss-20b"])
def test_in_fp8_all_pages_take_half_the_memory(model: str) -> None:
    plain, halved = _layout(model), _layout(model, config=msgspec.structs.replace(GPU, kv_cache_dtype="fp8"))
    assert (2 * halved.full_bytes, 2 * halved.window_bytes) == (plain.full_bytes, plain.window_bytes)
    assert 2 * halved.sequence_bytes(32_768) == plain.sequence_bytes(32_768)
    fewer, more = plain.pages_for(40 << 30), halved.pages_for(40 << 30)
    # Pages for the prompts of launched steps are as many as before.
    assert 2 * fewer.full <= more.full <= 2.1 * fewer.full and halved.pool_bytes(more) <= 40 << 30


def test_a_sequence_within_the_window_holds_all_its_pages() -> None:
    layout = _layout("gemma-4-31b")
    assert layout.sequence_bytes(1000) == 16 * (layout.full_bytes + layout.window_bytes)


@pytest.mark.parametrize("model", ["gemma-4-31b", "gpt-oss-20b", "mistral-7b-v0.1"])
@pytest.mark.parametrize("gib", [8, 60, 120])
def test_more_tokens_fit_than_into_one_pool(model: str, gib: int) -> None:
    layout = _layout(model)
    pages = layout.pages_for(gib << 30)
    page_bytes = layout.full_bytes + layout.window_bytes
    assert layout.pool_bytes(pages) <= gib << 30
    assert layout.pool_bytes(pages) > (gib << 30) - page_bytes
    one_pool = (gib << 30) // page_bytes
    assert one_pool < pages.full <= layout.max_running * layout.pages_per_row


def test_a_model_without_windows_has_one_kind_of_pages() -> None:
    layout = _layout("qwen3-0.6b")
    assert layout.window is None
    assert layout.pages_for(1 << 30) == PoolPages((1 << 30) // layout.full_bytes, 0)


def test_a_window_that_no_sequence_exceeds_is_none() -> None:
    assert _layout("mistral-7b-v0.1", 4096).window is None


@given(
    full_bytes=st.sampled_from([0, 1000, 10_000]),
    window=st.sampled_from([1, 2, 63, 64, 65, 128, 1024]),
    max_model_len=st.integers(1, 300_000),
    max_running=st.integers(1, 300),
    available=st.integers(0, 10**9),
)
def test_the_pages_fit_and_hold_the_longest_sequence_if_any_do(
    full_bytes: int, window: int, max_model_len: int, max_running: int, available: int
) -> None:
    layout = KVLayout(
        page_size=64,
        full_bytes=full_bytes,
        window_bytes=7000,
        window=window,
        max_model_len=max_model_len,
        max_running=max_running,
        max_step_tokens=8192,
    )
    pages = layout.pages_for(available)
    assert layout.pool_bytes(pages) <= available
    assert pages.window <= pages.full
    longest = layout.pages_per_row
    if layout.pool_bytes(PoolPages(longest, layout.least_window(longest))) <= available:
        assert pages.full >= longest
    if pages.full:
        assert pages.window >= layout.least_window(min(pages.full, longest))


@given(
    state_bytes=st.sampled_from([2, 10_000, 10**6]),
    per_row=st.integers(1, 2),
    max_model_len=st.integers(1, 300_000),
    max_running=st.integers(1, 300),
    available=st.integers(0, 10**9),
)
def test_recurrent_states_and_their_checkpoints_fit_beside_the_pages(
    state_bytes: int, per_row: int, max_model_len: int, max_running: int, available: int
) -> None:
    layout = KVLayout(
        page_size=64,
        full_bytes=1000,
        state_bytes=state_bytes,
        checkpoints_per_row=per_row,
        max_model_len=max_model_len,
        max_running=max_running,
        max_step_tokens=8192,
    )
    pages = layout.pages_for(available)
    if pages.full:
        assert layout.pool_bytes(pages) <= available
        assert layout.state_checkpoints(pages.full) >= 2
    if pages.full < max_running * layout.pages_per_row:
        assert layout.pool_bytes(PoolPages(pages.full + 1, 0)) > available


@given(st.integers(1, 300), st.integers(1, 128))
def test_a_row_holds_the_pages_that_its_next_token_attends_to(window: int, page_size: int) -> None:
    needed = [position // page_size - max(position - window + 1, 0) // page_size + 1 for position in range(1000)]
    assert max(needed) + 1 == row_pages(window, page_size)


def test_more_pages_never_need_less_memory() -> None:
    layout = _layout("gemma-4-31b", 262_144)
    assert all(a <= b for a, b in pairwise(map(layout.window_pages, range(0, 10_000, 7))))


@pytest.mark.parametrize(
    ("model", "changes", "page"),
    [
        ("qwen3-0.6b", {}, 16),
        ("qwen3-0.6b", {"page_size": 32}, 32),
        ("qwen3-0.6b", {"num_pages": 1000}, 64),
        ("qwen3-0.6b", {"device": "cpu"}, 16),
        ("gpt-oss-20b", {}, 64),
        ("qwen3.6-27b", {}, 64),
    ],
)
def test_texts_that_are_pooled_share_their_beginnings_by_small_pages(
    model: str, changes: dict[str, Any], page: int
) -> None:
    config = ModelConfig.parse(json.loads((CONFIGS / f"{model}.json").read_text()))
    assert config.text_page_size(replace(GPU, **changes)) == page
