"""Products of a decode batch against float64, and in a graph, where each starts before what it depends on is over."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minisgl.kernels.linear.dense_split_k_gluon import Tile, batch_linear
from minisgl.kernels.pointwise.norm import add_rms_norm
from support.kernels.decode_kernels import assert_close, draw, poisoned_outputs

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "tile",
    [
        Tile(rows=16, outputs=64, inputs=128, splits=1, stages=8, warps=4, early=4),
        Tile(rows=32, outputs=128, inputs=128, splits=3, stages=5, warps=8, early=5),
        Tile(rows=64, outputs=32, inputs=128, splits=1, stages=3, warps=4, early=3),
        Tile(rows=64, outputs=64, inputs=64, splits=5, stages=4, warps=4, early=2),
        Tile(rows=128, outputs=128, inputs=64, splits=2, stages=6, warps=8, early=3),
        Tile(rows=128, outputs=256, inputs=64, splits=1, stages=4, warps=8, early=2),
    ],
)
@pytest.mark.parametrize("rows", [1, 9, 16, 31, 64, 65, 130, 256])
def test_a_product(rows: int, tile: Tile, dtype: torch.dtype) -> None:
    inputs, outputs = 1408, 768
    x = draw(rows, inputs, dtype=dtype, device=CUDA)
    weight = draw(outputs, inputs, dtype=dtype, device=CUDA, scale=inputs**-0.5)
    with poisoned_outputs():
        ours = batch_linear(x, weight, tile)
    if tile.splits > 1:
        assert ours.shape == (tile.splits, rows, outputs) and ours.dtype == torch.float32
        ours = ours.sum(0).to(dtype)
    assert_close(ours, x.double() @ weight.double().T, F.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [9, 31, 64, 130, 256])
@pytest.mark.parametrize(
    ("inputs", "outputs", "tile"),
    [
        (896, 1152, Tile(rows=16, outputs=64, inputs=128, splits=1, stages=7, warps=4, early=7)),
        (896, 1152, Tile(rows=64, outputs=64, inputs=128, splits=1, stages=6, warps=4, early=6)),
        (896, 9728, Tile(rows=64, outputs=128, inputs=128, splits=1, stages=4, warps=4, early=4)),
        (896, 9728, Tile(rows=128, outputs=128, inputs=128, splits=1, stages=3, warps=8, early=3)),
    ],
)
def test_a_product_with_a_bias(inputs: int, outputs: int, tile: Tile, rows: int, dtype: torch.dtype) -> None:
    x = draw(rows, inputs, dtype=dtype, device=CUDA)
    weight = draw(outputs, inputs, dtype=dtype, device=CUDA, scale=inputs**-0.5)
    bias = draw(outputs, dtype=dtype, device=CUDA, scale=3.0)
    with poisoned_outputs():
        ours = batch_linear(x, weight, tile, bias)
    assert_close(ours, x.double() @ weight.double().T + bias.double(), F.linear(x, weight, bias))


@pytest.mark.parametrize("rows", [9, 64, 256])
@pytest.mark.parametrize(("inputs", "splits", "stages"), [(896, 4, 2), (896, 2, 4), (4864, 4, 6), (640, 4, 2)])
def test_the_last_split_may_be_shorter_or_empty(rows: int, inputs: int, splits: int, stages: int) -> None:
    x = draw(rows, inputs, dtype=torch.bfloat16, device=CUDA)
    weight = draw(896, inputs, dtype=torch.bfloat16, device=CUDA, scale=inputs**-0.5)
    tile = Tile(rows=64, outputs=64, inputs=128, splits=splits, stages=stages, warps=4, early=stages)
    with poisoned_outputs():
        ours = batch_linear(x, weight, tile)
    assert_close(ours.sum(0).to(torch.bfloat16), x.double() @ weight.double().T, F.linear(x, weight))


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize(("rows", "hidden"), [(9, 1024), (9, 896), (100, 5120)])
def test_a_norm_adds_partial_sums(rows: int, hidden: int, parts: int) -> None:
    dtype = torch.bfloat16
    x = draw(parts, rows, hidden, dtype=torch.float32, device=CUDA)
    residual, gain = draw(rows, hidden, dtype=dtype, device=CUDA), 1 + draw(hidden, dtype=dtype, device=CUDA, scale=0.1)
    expected, stream = add_rms_norm(x.sum(0).to(dtype), residual.clone(), gain, 1e-6)
    ours, our_stream = add_rms_norm(x, residual, gain, 1e-6)
    torch.testing.assert_close(our_stream, stream, atol=0.0, rtol=8e-3)
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=2e-2)


@pytest.mark.captures
@pytest.mark.parametrize("rows", [16, 100])
def test_a_chain_in_a_graph_equals_the_chain_with_waits(rows: int) -> None:
    """Memory is used again and again: a program that does not wait, or writes too early, changes the result of one of
    many replays."""
    hidden, layers, dtype = 1024, 12, torch.bfloat16
    tiles = [
        Tile(rows=64, outputs=32, inputs=128, splits=1, stages=6, warps=4, early=3),
        Tile(rows=16, outputs=64, inputs=128, splits=1, stages=8, warps=4, early=4),
    ]
    weights = [draw(hidden + i, hidden, dtype=dtype, device=CUDA, scale=0.03)[i:].contiguous() for i in range(layers)]
    gain = 1 + draw(hidden, dtype=dtype, device=CUDA, scale=0.1)
    start = draw(rows, hidden, dtype=dtype, device=CUDA)

    def chain(step: object = None) -> torch.Tensor:
        x, residual = start * 1.0, start * 2.0
        for layer in range(layers):
            x, residual = add_rms_norm(x, residual, gain, 1e-6)
            if step:
                torch.cuda.synchronize()
            x = batch_linear(x, weights[layer], tiles[layer % 2])
            if step:
                torch.cuda.synchronize()
        return x

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = chain("wait").clone()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        result = chain()
        graph.capture_end()
        differ = torch.zeros((), dtype=torch.int64, device=CUDA)
        for _ in range(300):
            result.fill_(torch.nan)
            graph.replay()
            differ += (result != expected).sum()
        stream.synchronize()
    assert int(differ) == 0
