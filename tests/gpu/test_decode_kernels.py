"""The kernels of a decode step against float64, and in a graph, where each starts before the one before it is over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.kernels.attention import split_kv_decode_triton
from minisgl.kernels.attention.rotary import rotate_and_store
from minisgl.kernels.attention.rotation import Rotation
from minisgl.kernels.linear.dense_skinny_triton import normed_linear, skinny_linear
from minisgl.kernels.pointwise.norm import add_rms_norm
from support.kernels.decode_kernels import (
    CASES,
    check_linear,
    check_normed_linear,
    check_relu_squared,
    check_rotate_and_store,
    check_rotated_split_decode,
    check_split_decode,
    draw,
)
from support.kernels.sizes import sized

CUDA = torch.device("cuda")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@pytest.mark.parametrize("name", CASES)
def test_kernels_match_the_interpreter(name: str) -> None:
    CASES[name](CUDA)


@pytest.mark.parametrize(
    ("dtype", "with_bias"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)]
)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(
    ("inputs", "outputs", "gated"),
    [
        (1024, 4096, False),
        (1024, 3072, True),
        (2048, 2051, True),
        (5120, 7168, False),
        (5120, 17_408, True),
        (896, 1152, False),
        (896, 4864, True),
        (2048, 8192, True),
        (3584, 4608, False),
    ],
)
def test_normed_linear(
    inputs: int, outputs: int, gated: bool, with_bias: bool, with_residual: bool, dtype: torch.dtype
) -> None:
    check_normed_linear(
        CUDA, inputs=inputs, outputs=outputs, gated=gated, with_residual=with_residual, dtype=dtype, with_bias=with_bias
    )


def test_routers_in_float32() -> None:
    common: dict[str, Any] = {"inputs": 2688, "outputs": 128, "dtype": torch.bfloat16, "weight_dtype": torch.float32}
    for rows in (1, 2, 8):
        check_linear(CUDA, rows=rows, **common)
    check_normed_linear(CUDA, gated=False, with_residual=True, **common)


@pytest.mark.parametrize("width", [8, 1000, 1856, 3712])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_square_of_relu(dtype: torch.dtype, width: int) -> None:
    check_relu_squared(CUDA, width=width, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("q_heads", "k_heads", "head_dim"), [(16, 8, 128), (5, 1, 64), (4, 2, 80), (40, 8, 128)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("count", "kept_from"), [(1, 1), (77, 0), (77, 30)])
def test_rotate_and_store(
    count: int, kept_from: int, q_heads: int, k_heads: int, head_dim: int, norm: bool, dtype: torch.dtype
) -> None:
    check_rotate_and_store(
        CUDA, count=count, q_heads=q_heads, k_heads=k_heads, head_dim=head_dim, norm=norm, kept_from=kept_from,
        dtype=dtype,
    )  # fmt: skip


@DTYPES
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "page_size"),
    [
        (8, 2, 128, 64),
        (8, 5, 128, 64),
        (1, 16, 64, 32),
        (2, 7, 64, 64),
        (4, 7, 128, 64),
        (8, 4, 64, 64),
        (2, 4, 256, 64),
    ],
)
@pytest.mark.parametrize("lengths", [(1,), (2,), (1028,), (64, 65, 700, 5000)])
def test_split_decode(
    lengths: tuple[int, ...], kv_heads: int, group: int, head_dim: int, page_size: int, dtype: torch.dtype
) -> None:
    check_split_decode(
        CUDA, lengths=lengths, kv_heads=kv_heads, group=group, head_dim=head_dim, page_size=page_size, dtype=dtype
    )


@pytest.mark.parametrize("window", [1, 70, 512])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [(1,), (1028,), (64, 65, 700, 5000)])
def test_split_decode_with_a_window(lengths: tuple[int, ...], head_dim: int, window: int) -> None:
    check_split_decode(
        CUDA,
        lengths=lengths,
        kv_heads=2,
        group=7,
        head_dim=head_dim,
        page_size=64,
        dtype=torch.bfloat16,
        window=window,
    )


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim"), [(8, 2, 128), (8, 4, 64), (2, 7, 64), (4, 7, 128), (2, 4, 256)]
)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("lengths", "window"), [((1,), None), ((1028,), None), ((64, 65, 700, 5000), 600)])
def test_split_decode_that_rotates_and_stores(
    lengths: tuple[int, ...],
    window: int | None,
    norm: bool,
    kv_heads: int,
    group: int,
    head_dim: int,
) -> None:
    check_rotated_split_decode(
        CUDA,
        lengths=lengths,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        norm=norm,
        dtype=torch.bfloat16,
        window=window,
    )


@pytest.mark.captures
@pytest.mark.parametrize("rows", [1, 3, 8, 64])
def test_a_long_chain_of_early_launches_equals_the_chain_with_waits(rows: int) -> None:
    """Every kernel reads what the one before wrote, and memory is used again and again: a kernel that does not wait,
    or writes too early, changes the result of one of many replays."""
    hidden, heads, layers = 1024, 8, sized(12, 4)
    replays = sized(200, 3)
    dtype = torch.bfloat16
    qkv_weights = [draw(3 * hidden + i, hidden, dtype=dtype, device=CUDA, scale=0.03)[i:] for i in range(layers)]
    weights = [draw(hidden + i, hidden, dtype=dtype, device=CUDA, scale=0.03)[i:].contiguous() for i in range(layers)]
    gain = 1 + draw(hidden, dtype=dtype, device=CUDA, scale=0.1)
    keys, values = (torch.zeros(layers, 8, 16, heads, 128, dtype=dtype, device=CUDA) for _ in "kv")
    locations = torch.arange(rows, device=CUDA)
    start = draw(rows, hidden, dtype=dtype, device=CUDA)
    cos_sin = draw(rows, 128, dtype=torch.float32, device=CUDA)
    one_by_one = False

    def step() -> None:
        if one_by_one:
            torch.cuda.synchronize()

    def chain() -> torch.Tensor:
        x, residual = start * 1.0, start * 2.0
        for layer in range(layers):
            if rows == 1:
                qkv, residual = normed_linear(x, residual, gain, 1e-6, qkv_weights[layer])
            else:
                x, residual = add_rms_norm(x, residual, gain, 1e-6)
                step()
                qkv = skinny_linear(x, qkv_weights[layer]) if rows <= 8 else x @ qkv_weights[layer].T
            step()
            q, k, v = qkv.view(rows, 3 * heads, 128).split(heads, dim=1)
            rotation = Rotation(cos_sin, gain[:128], gain[128:256], 1e-6)
            x, kept, _ = rotate_and_store(q, k, v, rotation, keys[layer], values[layer], locations, 0)
            step()
            x = x.flatten(1) + kept.flatten(1) if layer % 3 == 0 else x.flatten(1)
            x = skinny_linear(x, weights[layer]) if rows <= 8 else x @ weights[layer].T
            step()
        return add_rms_norm(x, residual, gain, 1e-6)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        one_by_one = True
        expected, expected_keys, expected_values = chain().clone(), keys.clone(), values.clone()
        one_by_one = False
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        result = chain()
        graph.capture_end()
        for _ in range(replays):
            keys.zero_()
            values.zero_()
            graph.replay()
        stream.synchronize()
        differ = torch.zeros((), dtype=torch.int64, device=CUDA)
        for _ in range(replays):
            result.fill_(torch.nan)
            graph.replay()
            differ += (result != expected).sum()
        stream.synchronize()
    assert int(differ) == 0
    assert torch.equal(keys, expected_keys) and torch.equal(values, expected_values)


@pytest.mark.captures
@pytest.mark.parametrize("rows", [1, 3])
def test_layers_with_attention_in_a_graph_equal_layers_with_waits(rows: int) -> None:
    """The kernel that rotates, stores and attends reads the pool while the projection before it still runs."""
    hidden, q_heads, kv_heads, head_dim, layers = 1024, 8, 4, 64, sized(12, 3)
    dtype, page, length = torch.bfloat16, 64, 200
    width = (q_heads + 2 * kv_heads) * head_dim
    qkv_weights = [
        draw(width + i, hidden, dtype=dtype, device=CUDA, scale=0.03)[i:].contiguous() for i in range(layers)
    ]
    weights = [
        draw(hidden + i, q_heads * head_dim, dtype=dtype, device=CUDA, scale=0.03)[i:].contiguous()
        for i in range(layers)
    ]
    gain = 1 + draw(hidden, dtype=dtype, device=CUDA, scale=0.1)
    history = [draw(layers, 4 * rows + 1, page, kv_heads, head_dim, dtype=dtype, device=CUDA) for _ in "kv"]
    start = draw(rows, hidden, dtype=dtype, device=CUDA)
    cos_sin = draw(rows, head_dim, dtype=torch.float32, device=CUDA)
    table = torch.arange(4 * rows, dtype=torch.int32, device=CUDA).view(rows, 4)
    lengths = torch.full((rows,), length, dtype=torch.int32, device=CUDA)
    slots = torch.arange(rows, dtype=torch.int32, device=CUDA)
    keys, values = (pool.clone() for pool in history)
    sums = torch.empty(rows, q_heads, split_kv_decode_triton.SPLITS, device=CUDA)
    parts = torch.empty(*sums.shape, head_dim, device=CUDA)

    def chain(*, wait: bool) -> torch.Tensor:
        x, residual = start * 1.0, start * 2.0
        for layer in range(layers):
            if rows == 1:
                qkv, residual = normed_linear(x, residual, gain, 1e-6, qkv_weights[layer])
            else:
                x, residual = add_rms_norm(x, residual, gain, 1e-6)
                qkv = skinny_linear(x, qkv_weights[layer])
            if wait:
                torch.cuda.synchronize()
            q, k, v = qkv.view(rows, -1, head_dim).split([q_heads, kv_heads, kv_heads], dim=1)
            out = torch.empty(q.shape, dtype=dtype, device=CUDA)
            new = split_kv_decode_triton.NewTokens(k, v, Rotation(cos_sin, gain[:head_dim], gain[64:128], 1e-6))
            split_kv_decode_triton.split_decode(
                q, keys[layer], values[layer], table, slots, lengths, parts, sums, out, scale=0.2, new=new
            )
            if wait:
                torch.cuda.synchronize()
            x = skinny_linear(out.flatten(1), weights[layer])
        return add_rms_norm(x, residual, gain, 1e-6)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = chain(wait=True).clone()
        stored = keys.clone(), values.clone()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        result = chain(wait=False)
        graph.capture_end()
        differ = torch.zeros((), dtype=torch.int64, device=CUDA)
        for _ in range(sized(300, 3)):
            keys.copy_(history[0])
            values.copy_(history[1])
            result.fill_(torch.nan)
            graph.replay()
            differ += (result != expected).sum() + (keys != stored[0]).sum() + (values != stored[1]).sum()
        stream.synchronize()
    assert int(differ) == 0
