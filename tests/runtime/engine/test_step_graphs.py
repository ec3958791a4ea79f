"""When steps are captured, without a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.engine.batch import StepSize
from minisgl.engine.graphs import step_graphs
from minisgl.engine.graphs.sizes import prefill_sizes
from minisgl.engine.graphs.step_graphs import StepGraphs
from minisgl.wire.plan import StepPlan
from support.plans import Segment, make_plan

ROWS = 24
PREFILL = prefill_sizes(ROWS, 2048, 8192)
UNCAPTURABLE = StepSize(6)


class Attention:
    """Attention whose backends can capture all but one size."""

    most_graph_keys = 1 << 20
    cascade = None

    def is_long(self, lengths: Any) -> bool:
        return bool(lengths.max() > 1000)

    def for_graph(self, rows: int, tokens: int, *, segments: int, prefix: bool) -> object | None:
        return None if StepSize(rows, tokens) == UNCAPTURABLE else self

    def for_long_graph(self, rows: int) -> object | None:
        return self if rows <= 4 else None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Sizes of captures, each behind a `before`."""
    calls: list[Any] = []

    class Graph:
        def __init__(self, *args: Any) -> None:
            self.size = args[3]
            calls.append(self.size)

    monkeypatch.setattr(step_graphs, "StepGraph", Graph)
    monkeypatch.setattr(step_graphs, "representative_layers", lambda layers: [0])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    return calls


@pytest.fixture
def graphs(calls: list[Any]) -> StepGraphs:
    runner: Any = SimpleNamespace(
        attention=Attention(),
        model_config=SimpleNamespace(layers=()),
        with_layers=lambda layers: None,
        kv=SimpleNamespace(groups=[SimpleNamespace(keys=torch.zeros(1, 1, 1))]),
    )
    graphs = StepGraphs()
    shares: list[float] = []
    graphs.capture(runner, ROWS, PREFILL, torch.zeros(1), shares.append, lambda: calls.append("before"))
    assert shares == [1 / 3, 2 / 3, 1.0]
    return graphs


def decode(rows: int, position: int = 5) -> StepPlan:
    return make_plan(0, decode=[(row, position) for row in range(rows)])


def found(graphs: StepGraphs, plan: StepPlan) -> StepSize | None:
    graph = graphs.find(plan)
    return None if graph is None else graph.size


def test_a_start_captures_the_largest_step_of_each_kind(graphs: StepGraphs, calls: list[Any]) -> None:
    assert calls == ["before", PREFILL[-1], "before", StepSize(ROWS), "before", StepSize(4)]
    assert graphs.count == 3 and [graph.size for graph in graphs.captured] == [PREFILL[-1], StepSize(ROWS), StepSize(4)]


def test_others_are_captured_once_for_their_first_step(graphs: StepGraphs, calls: list[Any]) -> None:
    calls.clear()
    assert [found(graphs, decode(rows)) for rows in (9, 10, 24, 12)] == [StepSize(size) for size in (12, 12, 24, 12)]
    assert calls == ["before", StepSize(12)]
    prompt = make_plan(0, prefill=[Segment(0, 0, np.arange(100).tolist())])
    assert found(graphs, prompt) == found(graphs, prompt) == StepSize(0, 128, 16, prefix=False)
    assert found(graphs, decode(2, 2000)) == StepSize(2) and found(graphs, decode(25)) is None
    assert calls[2:] == ["before", StepSize(0, 128, 16, prefix=False), "before", StepSize(2)]
    assert graphs.count == 6


def test_a_size_that_cannot_be_captured_is_asked_for_once(graphs: StepGraphs, calls: list[Any]) -> None:
    calls.clear()
    assert [found(graphs, decode(5)) for _ in range(2)] == [None, StepSize(8)]
    assert calls == ["before", "before", StepSize(8)]


def test_idle_time_captures_all(graphs: StepGraphs) -> None:
    sizes = []
    while (graph := graphs.capture_next()) is not None:
        sizes.append(graph.size)
    decode_sizes = [StepSize(size) for size in (1, 2, 3, 4, 8, 12, 16)]
    assert sizes == [*decode_sizes, *PREFILL[:-1], *map(StepSize, (1, 2, 3))]
    assert graphs.count == 3 + len(sizes) == len(graphs.captured)
    graphs.clear()
    assert not graphs.captured and found(graphs, decode(1)) is None and graphs.capture_next() is None
