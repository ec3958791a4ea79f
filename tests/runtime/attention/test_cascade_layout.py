"""How groups of rows are cut into tiles."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl.attention.cascade import MAX_SPLITS, CascadeLayout, CascadeTables
from minisgl.wire.shared_prefixes import SharedPrefix


@st.composite
def batches(draw: st.DrawFn) -> tuple[CascadeLayout, int, list[SharedPrefix]]:
    layout = CascadeLayout(
        group=draw(st.sampled_from([1, 2, 4, 5, 8, 16, 128])),
        kv_heads=draw(st.integers(1, 8)),
        programs=draw(st.integers(1, 300)),
        part_pages=draw(st.integers(1, 8)),
    )
    rows = draw(st.integers(1, 200))
    order = np.array(draw(st.permutations(range(rows))), np.int32)
    cuts = sorted(draw(st.sets(st.integers(1, rows), max_size=6)))
    groups = [SharedPrefix(number + 1, order[a:b]) for number, (a, b) in enumerate(zip([0, *cuts], cuts, strict=False))]
    return layout, rows, groups


def _tables(layout: CascadeLayout, rows: int, groups: list[SharedPrefix]) -> CascadeTables:
    packed = layout.pack(groups, rows)
    assert packed.dtype == np.int32 and len(packed) == layout.size(rows)
    return layout.view(torch.from_numpy(packed), rows)


@given(batches())
def test_a_row_with_a_prefix_is_in_one_tile_that_reads_it(
    batch: tuple[CascadeLayout, int, list[SharedPrefix]],
) -> None:
    layout, count, groups = batch
    tables = _tables(layout, count, groups)
    used, splits = tables.counts.tolist()
    assert 0 <= used <= layout.max_tiles(count) and 1 <= splits <= MAX_SPLITS
    prefix_pages = tables.prefix_pages.tolist()
    group_of = {row: group for group in groups for row in group.rows.tolist()}
    tiled = []
    for pages, *members in tables.tiles[:used].tolist():
        rows = [row for row in members if row >= 0]
        assert rows and members[len(rows) :] == [-1] * (layout.tile_rows - len(rows))
        assert len({id(group_of[row]) for row in rows}) == 1
        group = group_of[rows[0]]
        assert pages == group.pages
        assert {prefix_pages[row] for row in rows} == {pages}
        tiled += rows
    assert sorted(tiled) == [row for row, pages in enumerate(prefix_pages) if pages]


@given(batches())
def test_all_groups_of_a_useful_size_fit(
    batch: tuple[CascadeLayout, int, list[SharedPrefix]],
) -> None:
    layout, count, groups = batch
    groups = [group for group in groups if len(group.rows) >= 16]
    prefix_pages = _tables(layout, count, groups).prefix_pages.tolist()
    assert all(prefix_pages[row] == group.pages for group in groups for row in group.rows)


def test_large_groups_come_first_if_not_all_fit() -> None:
    layout = CascadeLayout(group=128, kv_heads=1, programs=1, part_pages=1)
    rows = np.arange(15, dtype=np.int32)
    pairs = [SharedPrefix(1, rows[:7]), SharedPrefix(2, rows[7:])]
    assert _tables(layout, 15, pairs).prefix_pages.tolist() == [1] * 7 + [2] * 8
    layout = CascadeLayout(group=2, kv_heads=1, programs=1, part_pages=1)
    assert _tables(layout, 15, pairs).prefix_pages.tolist() == [0] * 7 + [2] * 8


def test_shared_pages_are_divided_so_that_all_multiprocessors_have_work() -> None:
    everyone = np.arange(256, dtype=np.int32)
    narrow = CascadeLayout(group=2, kv_heads=8, programs=264, part_pages=8)
    wide = CascadeLayout(group=5, kv_heads=8, programs=264, part_pages=8)

    def counts(layout: CascadeLayout, *groups: SharedPrefix) -> list[int]:
        return list(map(int, _tables(layout, 256, list(groups)).counts.tolist()))

    assert counts(narrow, SharedPrefix(64, everyone)) == [4, 8]
    assert counts(wide, SharedPrefix(64, everyone)) == [11, 3]
    # But not into parts that are too short.
    assert counts(narrow, SharedPrefix(32, everyone)) == [4, 4]
    assert counts(narrow, SharedPrefix(7, everyone)) == [4, 1]
    assert counts(narrow, SharedPrefix(7, everyone[:100]), SharedPrefix(32, everyone[100:])) == [5, 4]
    assert counts(narrow) == [0, 1]
