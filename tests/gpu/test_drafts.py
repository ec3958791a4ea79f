"""Drafts on a CUDA device, compared with the same functions on a CPU."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernels.speculation.place_drafts import place_drafts
from minisgl.kernels.speculation.row_text_tables import NO_TOKEN, RowTextTables
from minisgl.kernels.speculation.step_rows import DecodeRows, SampledRows
from minisgl.kernels.speculation.verify_drafts import verify_drafts
from minisgl.wire.messages import MOST_DRAFTS
from support.kernels.drafts import CASES, Case, Step

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES = CASES | {
    "many rows": Case(512, 500),
    "long texts": Case(9, 130_000, vocabulary=300),
    "long texts that repeat": Case(9, 130_000, vocabulary=100_000, period=40_000),
}


@pytest.mark.parametrize("name", SIZES)
def test_drafts_are_placed_verified_and_found_as_on_a_cpu(name: str) -> None:
    for seed in range(3):
        ours, theirs = Step(SIZES[name], CUDA, seed), Step(SIZES[name], CPU, seed)
        assert ours.placed() == theirs.placed()
        assert ours.verified() == theirs.verified()


def test_a_graph_places_drafts_by_what_its_tables_have_when_it_is_replayed() -> None:
    case = Case(60, 100)
    ours, theirs = Step(case, CUDA), Step(case, CPU)
    upload = ours.upload.clone()
    place_drafts(ours.tables, ours.decode, ours.dummy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = place_drafts(ours.tables, ours.decode, ours.dummy)
    for further in range(4):
        for step in (ours, theirs):
            step.tables.next_position.add_(further)
            step.upload.copy_(upload)
        graph.replay()
        assert [tokens.tolist(), ours.upload.tolist()] == theirs.placed()


def test_texts_may_lie_behind_two_to_the_power_of_31_tokens() -> None:
    tables, slot = RowTextTables.empty(131, 1 << 24, CUDA), 129

    def ints(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=CUDA)

    tables.set_text(slot, ints(100, 0), ints(5, 6, 7, 5))
    report = verify_drafts(tables, SampledRows(ints(slot), ints(0), ints(1)), ints(6), ints(4))
    assert report.T.tolist() == [[1, 0, 0, 0]]
    assert tables.texts[slot, : 6 + MOST_DRAFTS].tolist() == [5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6, 7, NO_TOKEN]
    rows = DecodeRows(ints(slot, slot), ints(0, 1), ints(0, 0), ints(0, 0), ints(0, 1))
    assert place_drafts(tables, rows, 130).tolist() == [6, 7]
    assert rows.positions.tolist() == [4, 5] and rows.sample_positions.tolist() == [5, 6]
