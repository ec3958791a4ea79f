"""Batches that attention to the paged pool gives its backends. tests/gpu tests the results."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from minisgl.attention.backend import DecodeBackend, PrefillBackend
from minisgl.attention.batch import AttentionBatch
from minisgl.attention.paged import PagedAttention


class Recorder:
    """A backend that keeps the batches that it prepares and begins."""

    def __init__(self) -> None:
        self.batches: list[AttentionBatch] = []

    def prepare(self, batch: AttentionBatch) -> None:
        self.batches.append(batch)

    begin = prepare

    def for_graph(self, *sizes: int, prefix: bool = True) -> Recorder:
        return self


def batch_of(rows: int, prompts: list[int]) -> AttentionBatch:
    numbers = torch.zeros(1, dtype=torch.int32)
    return AttentionBatch(
        *[numbers] * 6,
        np.ones(rows, np.int32),
        np.zeros(len(prompts), np.int32),
        np.array(prompts, np.int32),
    )


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("prompts", [[], [4095], [1, 8192]])
def test_decode_rows_come_without_prompts_in_a_graph(prompts: list[int], captured: bool) -> None:
    """Backends see prompts only where launches of their kernels could delay the device."""
    prefill, decode = Recorder(), Recorder()
    unused: Any = None
    attention = PagedAttention(unused, cast("PrefillBackend", prefill), cast("DecodeBackend", decode))
    if captured:
        graph = attention.for_graph(3, sum(prompts), segments=len(prompts))
        assert graph is not None
        attention = graph
    batch = batch_of(3, prompts)
    attention.prepare(batch)
    attention.begin(batch, torch.zeros(0))
    seen = 0 if captured else len(prompts)
    assert [(each.num_decode, each.num_segments) for each in decode.batches] == [(3, seen)] * 2
    assert [each.num_segments for each in prefill.batches] == [len(prompts)] * 2 * bool(prompts)
