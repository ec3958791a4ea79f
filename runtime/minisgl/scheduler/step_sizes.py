"""Sizes to which the engine pads steps with prompts, since steps of one size take the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

TILE: Final = 128
"""Tokens that matrix products compute at a time: further tokens cost nothing until they fill a tile."""

StepGraphs = Sequence[tuple[int, int]]
"""See `EngineLimits.step_graphs`."""


def padded_tokens(rows: int, prompt_tokens: int, graphs: StepGraphs) -> int:
    """Tokens that the engine computes for a step of this size, decode rows and padding included."""
    fitting = (sum(graph) for graph in graphs if rows <= graph[0] and prompt_tokens <= graph[1])
    return _whole_tiles(next(fitting, rows + prompt_tokens))


def full_prompt_tokens(rows: int, tokens: int, graphs: StepGraphs) -> int:
    """The most prompt tokens beside `rows` decode rows that the engine pads to at most `tokens` in all; 0 without any.
    They fill a graph, or the last tile of a step without one."""
    largest = max((graph[1] for graph in graphs if rows <= graph[0]), default=0)
    without_graph = tokens // TILE * TILE - rows
    if without_graph > largest:
        return without_graph
    fitting = (graph[1] for graph in graphs if rows <= graph[0] and padded_tokens(rows, graph[1], graphs) <= tokens)
    return max(fitting, default=0)


def _whole_tiles(tokens: int) -> int:
    return -(-tokens // TILE) * TILE
