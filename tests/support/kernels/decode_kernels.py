"""The kernels of a decode step against float64, on a GPU or on a CPU in Triton's interpreter:
`TRITON_INTERPRET=1 python -m support.kernels.decode_kernels` prints, as JSON, the fault of each case (null: none).

A process of its own for the interpreter: whether kernels are interpreted is settled when Triton is imported.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final
from unittest import mock

import torch
import torch.nn.functional as F

from minisgl.attention.batch import PagedKV
from minisgl.kernels.attention import sinks_triton, split_kv_decode_triton
from minisgl.kernels.attention.rotary_triton import rotate_and_store_cuda
from minisgl.kernels.attention.rotation import Rotation
from minisgl.kernels.attention.stored_kv import FP8, KVScales, as_stored
from minisgl.kernels.experts import gate_rows_triton, grouped_gemm_triton
from minisgl.kernels.experts.gate import Gate
from minisgl.kernels.linear import dense_skinny_triton
from minisgl.kernels.pointwise.activation_triton import relu_squared_cuda
from minisgl.kernels.pointwise.norm import rms_norm
from minisgl.kernels.pointwise.output_gate_triton import add_gated_cuda, open_heads_cuda
from minisgl.layers.activation import ClampedGate
from support.kernels.dense_attention import DenseCase, Sequences, attention_shape
from support.kernels.interpreted_cascade import allow_loops_to_a_loaded_end

_MARGIN: Final = 64
Case = Callable[[torch.device], None]
_NOBODYS: Final = -7.0
"""Value of pool locations where nothing was stored."""


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Fill results of `torch.empty`, and memory before and behind them, with NaN; check that the margins keep it."""
    given: list[tuple[torch.Tensor, int]] = []
    empty = torch.empty

    def poisoned(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if not dtype.is_floating_point:
            return empty(shape, dtype=dtype, device=device)
        size = math.prod(shape)
        memory = torch.full((size + 2 * _MARGIN,), math.nan, dtype=dtype, device=device)
        given.append((memory, size))
        return memory[_MARGIN : _MARGIN + size].view(shape)

    with mock.patch("torch.empty", poisoned):
        yield
    for memory, size in given:
        assert memory[:_MARGIN].isnan().all() and memory[_MARGIN + size :].isnan().all(), "written beyond the output"


def draw(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(device)


def assert_close(ours: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
    """Not farther from the `exact` result than `plain` torch in the same dtype, but for a little."""
    assert ours.shape == exact.shape
    assert ours.isfinite().all(), "an element was not written, or is not finite"
    error, allowed = (float((part.double() - exact).norm()) for part in (ours, plain))
    assert error <= 1.1 * allowed + 1e-6 * float(exact.norm()), f"error {error:.3g}, plain torch has {allowed:.3g}"


def check_rotate_and_store(
    device: torch.device,
    *,
    count: int,
    q_heads: int,
    k_heads: int,
    head_dim: int,
    norm: bool,
    kept_from: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    gated: bool = False,
) -> None:
    """`gated`: a gate stands behind the queries of each head, and gains are those of Qwen3.5."""
    # Heads of queries, keys and values lie in one row, as the fused projection leaves them.
    parts = [2 * q_heads if gated else q_heads, k_heads, k_heads]
    q, k, v = draw(count, sum(parts), head_dim, dtype=dtype, device=device).split(parts, dim=1)
    if gated:
        q = q.unflatten(1, (-1, 2))[:, :, 0]
    gain = 1 + draw(head_dim, dtype=dtype, device=device, scale=0.2) if norm else None
    other_gain = None if gain is None else 2 - gain
    angles = torch.outer(torch.arange(count) * 7.0, torch.linspace(1, 0.001, head_dim // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).to(device)
    scales = KVScales(0.02, 0.05) if kv_dtype == FP8 else KVScales()
    pools = [torch.full((5, 16, k_heads, head_dim), _NOBODYS, device=device).to(kv_dtype or dtype) for _ in "kv"]
    locations = torch.randperm(5 * 16, generator=torch.Generator().manual_seed(count))[:count].to(device)

    gains = [gain if gain is None or not gated else gain - 1 for gain in (gain, other_gain)]
    rotation = Rotation(cos_sin, gains[0], gains[1], 1e-6, unit_offset=gated, round_last=gated)
    plain_q, plain_k = rotation.apply(q, k)
    with poisoned_outputs():
        our_q, kept_keys, kept_values = rotate_and_store_cuda(
            q, k, v, rotation, pools[0], pools[1], locations, kept_from, scales
        )
    keys, values = (pool.flatten(0, 1).to(dtype) for pool in pools)
    assert_close(our_q, _rotated(q, cos_sin, gain), plain_q)
    assert torch.equal(kept_keys, keys[locations][kept_from:])
    assert torch.equal(kept_values, values[locations][kept_from:])
    if kv_dtype is None:
        assert_close(keys[locations], _rotated(k, cos_sin, other_gain), plain_k)
        assert torch.equal(values[locations], v)
    else:
        # The interpreter loses the carry of a number that is rounded up to the next power of two.
        rtol = 0.13 if device.type == "cuda" else 0.51
        for ours, exact, scale in ((keys, plain_k, scales.key), (values, v, scales.value)):
            expected = as_stored(exact, FP8, scale).to(dtype)
            torch.testing.assert_close(ours[locations], expected, rtol=rtol, atol=2**-9)
            # Angles of another rounding may move a few to a neighbour.
            assert (ours[locations] == expected).float().mean() > 0.9
    others = torch.ones(len(keys), dtype=torch.bool, device=device).index_fill_(0, locations, False)
    nobodys = torch.tensor(_NOBODYS).to(kv_dtype or dtype).to(dtype).item()
    assert (keys[others] == nobodys).all() and (values[others] == nobodys).all(), "written beyond the tokens' places"


def _rotated(x: torch.Tensor, cos_sin: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
    """In float64."""
    x = x.double()
    if gain is not None:
        x = _normed(x, gain)
    (first, second), (cos, sin) = x.chunk(2, -1), cos_sin.double().unsqueeze(1).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain.double()


def check_linear(
    device: torch.device,
    *,
    rows: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None = None,
    with_bias: bool = False,
) -> None:
    x = draw(rows, inputs, dtype=dtype, device=device)
    weight = draw(outputs, inputs, dtype=weight_dtype or dtype, device=device, scale=inputs**-0.5)
    bias = draw(outputs, dtype=dtype, device=device, scale=3.0) if with_bias else None
    assert dense_skinny_triton.fits(x, weight)
    with poisoned_outputs():
        ours = dense_skinny_triton.skinny_linear(x, weight, bias)
    exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    assert ours.dtype == weight.dtype
    assert_close(ours, exact, F.linear(x.to(weight.dtype), weight, bias))


def check_relu_squared(device: torch.device, *, width: int, dtype: torch.dtype) -> None:
    x = draw(3, width, dtype=dtype, device=device, scale=4.0)
    assert torch.equal(relu_squared_cuda(x), F.relu(x).square())


def check_normed_linear(
    device: torch.device,
    *,
    inputs: int,
    outputs: int,
    gated: bool,
    with_residual: bool,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None = None,
    with_bias: bool = False,
    round_last: bool = False,
) -> None:
    x = draw(1, inputs, dtype=dtype, device=device, scale=2.0)
    residual = draw(1, inputs + 1, dtype=dtype, device=device, scale=5.0)[:, 1:].contiguous()
    gain = 1 + draw(inputs, dtype=dtype, device=device, scale=0.2)
    weight = draw(outputs * (1 + gated), inputs, dtype=weight_dtype or dtype, device=device, scale=inputs**-0.5)
    # Small enough that no single output dominates the error.
    bias = draw(len(weight), dtype=dtype, device=device, scale=0.5) if with_bias else None
    stream = x + residual if with_residual else x
    before = x.clone(), residual.clone()

    plain_norm = rms_norm(stream, gain, 1e-6, round_last=round_last)
    exact_norm = _normed(stream.double(), gain)
    exact = exact_norm @ weight.double().T + (0.0 if bias is None else bias.double())
    plain = F.linear(plain_norm.to(weight.dtype), weight, bias)
    if gated:
        exact, plain = (F.silu(both[:, :outputs]) * both[:, outputs:] for both in (exact, plain))
    assert dense_skinny_triton.fits(x, weight, normed=True)
    with poisoned_outputs():
        ours, our_stream = dense_skinny_triton.normed_linear(
            x, residual if with_residual else None, gain, 1e-6, weight, bias, gated=gated, round_last=round_last
        )
        normed = torch.empty_like(x)
        again, _ = dense_skinny_triton.normed_linear(
            x,
            residual if with_residual else None,
            gain,
            1e-6,
            weight,
            bias,
            gated=gated,
            normed=normed,
            round_last=round_last,
        )
    assert_close(ours, exact, plain)
    assert torch.equal(again, ours)
    assert_close(normed, exact_norm, plain_norm)
    assert torch.equal(our_stream, stream), "the residual stream is not the sum"
    # Other programs may still read them.
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def check_split_decode(
    device: torch.device,
    *,
    lengths: tuple[int, ...],
    kv_heads: int,
    group: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    window: int | None = None,
    kv_dtype: torch.dtype | None = None,
    sinks: bool = False,
) -> None:
    shape = attention_shape(
        query_heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        longest=max(lengths),
        dtype=dtype,
        device=device.type,
        window=window,
        kv_dtype=kv_dtype,
        sinks=sinks,
    )
    dense = DenseCase(shape, Sequences(decode=lengths))
    dense.store()
    out = _split_decode(dense, dense.q, dense.kv, window, None)
    error = (out.flatten(1).double().cpu() - dense.expected()).abs().max()
    assert error < (2e-2 if dtype is torch.bfloat16 else 2e-3), f"error {float(error):.3g}"


def check_sinks(device: torch.device, *, dtype: torch.dtype, natural: bool) -> None:
    scores = draw(7, 5, 40, dtype=torch.float32, device=device, scale=3.0)
    values, sinks = draw(5, 40, 24, dtype=torch.float32, device=device), draw(5, dtype=dtype, device=device, scale=2.0)
    with_sink = torch.cat((scores, sinks.float()[None, :, None].expand(7, 5, 1)), dim=-1)
    expected = torch.einsum("thk,hkd->thd", with_sink.softmax(-1)[..., :-1], values)
    out = torch.einsum("thk,hkd->thd", scores.softmax(-1), values).to(dtype).contiguous()
    sums = scores.logsumexp(-1) * (1.0 if natural else math.log2(math.e))
    # FlashAttention has heads first.
    sinks_triton.scale_by_share(out, sums.T.contiguous().T if natural else sums, sinks, natural=natural)
    torch.testing.assert_close(out.float(), expected, atol=2e-3, rtol=8e-3)


def check_gated_rows(device: torch.device, *, dtype: torch.dtype) -> None:
    product, bias = draw(9, 48, dtype=dtype, device=device, scale=2.0), draw(5, 48, dtype=dtype, device=device)
    experts = torch.tensor([0, 0, 1, 2, 2, 2, 4, 4, 4], device=device)
    ours = gate_rows_triton.gate_rows(product, experts, bias, Gate(1.7, 1.5))
    expected = ClampedGate(alpha=1.7, limit=1.5)(product.double() + bias.double()[experts])
    torch.testing.assert_close(ours.double(), expected, atol=2e-3, rtol=8e-3)


def check_weighted_sum(device: torch.device, *, dtype: torch.dtype) -> None:
    chosen, weights = draw(6, 40, dtype=dtype, device=device), draw(3, 2, dtype=dtype, device=device)
    bias, experts = draw(5, 40, dtype=dtype, device=device), torch.tensor([[4, 1], [0, 3], [2, 4]], device=device)
    places = torch.tensor([5, 0, 3, 1, 2, 4], device=device)
    ours = grouped_gemm_triton.weighted_sum(chosen, weights, places, experts, bias)
    rows = (chosen.double()[places] + bias.double()[experts.flatten()]).view(3, 2, 40)
    torch.testing.assert_close(ours.double(), (rows * weights.double()[..., None]).sum(1), atol=2e-3, rtol=8e-3)


def _split_decode(
    dense: DenseCase, q: torch.Tensor, kv: PagedKV, window: int | None, new: split_kv_decode_triton.NewTokens | None
) -> torch.Tensor:
    batch, splits = dense.batch, (*q.shape[:2], split_kv_decode_triton.SPLITS)
    out = torch.full(q.shape, math.nan, dtype=q.dtype, device=q.device)
    split_kv_decode_triton.split_decode(
        q,
        kv.keys[0],
        kv.values[0],
        batch.page_table,
        batch.decode_slots,
        batch.decode_lengths,
        torch.full((*splits, q.shape[2]), math.nan, device=q.device),
        torch.full(splits, math.nan, device=q.device),
        out,
        scale=q.shape[2] ** -0.5 * math.log2(math.e),
        scales=kv.scales[0],
        window=window,
        sinks=dense.sinks,
        new=new,
    )
    return out


def check_rotated_split_decode(
    device: torch.device,
    *,
    lengths: tuple[int, ...],
    kv_heads: int,
    group: int,
    head_dim: int,
    norm: bool,
    dtype: torch.dtype,
    window: int | None = None,
    kv_dtype: torch.dtype | None = None,
    gated: bool = False,
) -> None:
    """The kernel that rotates and stores equals the two kernels that it replaces. `gated`: as above."""
    shape = attention_shape(
        query_heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=32,
        longest=max(lengths),
        dtype=dtype,
        device=device.type,
        window=window,
        kv_dtype=kv_dtype,
    )
    dense, rows = DenseCase(shape, Sequences(decode=lengths)), len(lengths)
    # Heads of queries, keys and values lie in one row, as the fused projection leaves them.
    parts = [(2 if gated else 1) * group * kv_heads, kv_heads, kv_heads]
    q, k, v = draw(rows, sum(parts), head_dim, dtype=dtype, device=device).split(parts, dim=1)
    if gated:
        q = q.unflatten(1, (-1, 2))[:, :, 0]
    gain = 1 + draw(head_dim, dtype=dtype, device=device, scale=0.2) if norm else None
    angles = torch.outer(torch.arange(rows) * 7.0 + 1.0, torch.linspace(1, 0.001, head_dim // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).to(device)
    other_gain = None if gain is None else 2 - gain
    rotation = Rotation(cos_sin, gain, other_gain, 1e-6, unit_offset=gated, round_last=gated)
    stored = PagedKV(dense.kv.keys.clone(), dense.kv.values.clone(), dense.kv.scales)
    rotated, *_ = rotate_and_store_cuda(
        q, k, v, rotation, stored.keys[0], stored.values[0], dense.locations, kept_from=rows, scales=dense.scales
    )
    expected = _split_decode(dense, rotated, stored, window, None)
    ours = _split_decode(dense, q, dense.kv, window, split_kv_decode_triton.NewTokens(k, v, rotation))
    assert ours.isfinite().all()
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=8e-3)
    for pool, other in ((dense.kv.keys, stored.keys), (dense.kv.values, stored.values)):
        # The rest of the pool is NaN in both.
        torch.testing.assert_close(pool.float(), other.float(), atol=1e-4, rtol=8e-3, equal_nan=True)


def check_output_gates(device: torch.device, *, dtype: torch.dtype) -> None:
    """Of attention, whose gates stand behind the queries of each head, and of a shared expert."""
    queries = draw(3, 5, 2, 48, dtype=dtype, device=device)
    heads, gates = draw(3, 5 * 48, dtype=dtype, device=device), queries[:, :, 1]
    ours = open_heads_cuda(heads, gates)
    plain = heads * torch.sigmoid(gates.flatten(1))
    assert_close(ours, heads.double() * torch.sigmoid(gates.flatten(1).double()), plain)
    total, part = (draw(3, 40, dtype=dtype, device=device, scale=scale) for scale in (1.0, 2.0))
    x, gate = draw(3, 72, dtype=dtype, device=device), draw(1, 72, dtype=dtype, device=device)
    ours = add_gated_cuda(total, part, x, gate)
    plain = total + torch.sigmoid(torch.nn.functional.linear(x, gate)) * part
    opening = torch.sigmoid(x.double() @ gate.double().T)
    assert_close(ours, total.double() + opening * part.double(), plain)


def _cases() -> dict[str, Case]:
    """Without bfloat16, which the interpreter rounds towards zero."""
    half, single = torch.float16, torch.float32
    cases: dict[str, Case] = {}
    for count, q_heads, k_heads, head_dim, norm, kept_from, dtype, *stored in (
        (1, 16, 8, 128, True, 1, half),
        (3, 5, 1, 64, False, 0, half),
        (2, 4, 2, 80, True, 1, half),
        (1, 6, 3, 128, False, 0, single),
        (3, 16, 8, 128, True, 1, half, FP8),
        (2, 5, 1, 64, False, 0, half, FP8),
        (2, 8, 1, 512, False, 1, half, FP8),
    ):
        kv_dtype = stored[0] if stored else None
        name = f"rotate and store {count}x{q_heads}/{k_heads}x{head_dim} {dtype} norm={norm} kept from {kept_from}"
        name += f" in {kv_dtype}" if kv_dtype else ""
        cases[name] = partial(
            check_rotate_and_store, count=count, q_heads=q_heads, k_heads=k_heads, head_dim=head_dim, norm=norm,
            kept_from=kept_from, dtype=dtype, kv_dtype=kv_dtype,
        )  # fmt: skip
    queries_with_gates = partial(check_rotate_and_store, q_heads=4, k_heads=2, head_dim=64, norm=True, gated=True)
    cases["rotate and store queries with gates"] = partial(queries_with_gates, count=2, kept_from=1, dtype=half)
    for rows, inputs, outputs in (
        (1, 1024, 35),
        (1, 2048, 9),
        (1, 9216, 5),
        (2, 3072, 17),
        (3, 1024, 5),
        (4, 5120, 2),
        (5, 1024, 40),
        (8, 2048, 3),
        (1, 896, 21),
        (2, 4864, 6),
        (6, 896, 130),
    ):
        for with_bias in (False, True):
            cases[f"linear {rows}x{inputs} to {outputs} bias={with_bias}"] = partial(
                check_linear, rows=rows, inputs=inputs, outputs=outputs, dtype=half, with_bias=with_bias
            )
    for inputs, outputs, gated, with_residual, with_bias in (
        (1024, 35, False, False, False),
        (1024, 29, True, True, False),
        (2048, 19, False, True, False),
        (3072, 7, True, False, False),
        (5120, 5, False, True, False),
        (896, 21, False, True, True),
        (896, 150, True, True, True),
        (3584, 9, False, False, True),
    ):
        name = f"norm, linear {inputs} to {outputs} gated={gated} residual={with_residual} bias={with_bias}"
        cases[name] = partial(
            check_normed_linear, inputs=inputs, outputs=outputs, gated=gated, with_residual=with_residual,
            dtype=half, with_bias=with_bias,
        )  # fmt: skip
    for rows in (1, 5):
        cases[f"linear {rows}x896 to 24 in float32"] = partial(
            check_linear, rows=rows, inputs=896, outputs=24, dtype=half, weight_dtype=torch.float32
        )
    cases["norm, linear 896 to 24 in float32"] = partial(
        check_normed_linear, inputs=896, outputs=24, gated=False, with_residual=True, dtype=half,
        weight_dtype=torch.float32,
    )  # fmt: skip
    cases["square of ReLU"] = partial(check_relu_squared, width=1100, dtype=half)
    cases["norm rounded last, linear 192 to 21"] = partial(
        check_normed_linear, inputs=192, outputs=21, gated=False, with_residual=True, dtype=half, with_bias=True,
        round_last=True,
    )  # fmt: skip
    for lengths, kv_heads, group, head_dim, page_size, window, *stored in (
        ((1, 2, 33, 300), 2, 3, 64, 32, None),
        ((129, 128), 1, 2, 128, 64, None),
        ((300, 77), 1, 7, 64, 64, None),
        ((65, 33), 1, 2, 256, 32, None),
        ((40, 33), 1, 8, 512, 32, None),
        ((300, 77, 40, 41), 1, 2, 64, 32, 40),
        ((300, 65), 2, 1, 64, 32, 1),
        ((1, 2, 33, 300), 2, 3, 64, 32, None, FP8),
        ((129, 128), 1, 2, 128, 64, None, FP8),
        ((300, 77, 40, 41), 1, 2, 64, 32, 40, FP8),
        ((40, 33), 1, 8, 512, 32, None, FP8),
    ):
        kv_dtype = stored[0] if stored else None
        name = f"split decode {lengths} {kv_heads}x{group}x{head_dim} pages of {page_size} window {window}"
        name += f" in {kv_dtype}" if kv_dtype else ""
        cases[name] = partial(
            check_split_decode, lengths=lengths, kv_heads=kv_heads, group=group, head_dim=head_dim,
            page_size=page_size, dtype=half, window=window, kv_dtype=kv_dtype,
        )  # fmt: skip
    for stored_in in (None, FP8):
        cases["split decode with sinks" + (f" in {stored_in}" if stored_in else "")] = partial(
            check_split_decode, lengths=(1, 2, 33, 300), kv_heads=2, group=8, head_dim=64, page_size=32, dtype=half,
            window=40, sinks=True, kv_dtype=stored_in,
        )  # fmt: skip
    cases["biases and activation of experts"] = partial(check_gated_rows, dtype=half)
    cases["sum of experts with biases"] = partial(check_weighted_sum, dtype=half)
    for natural in (False, True):
        cases[f"sinks behind another kernel, natural={natural}"] = partial(check_sinks, dtype=half, natural=natural)
    for lengths, kv_heads, group, head_dim, norm, window, *stored in (
        ((1, 2, 33, 300), 2, 7, 64, False, None),
        ((129, 128), 1, 2, 128, True, None),
        ((300, 40), 1, 4, 64, True, 40),
        ((40, 33), 1, 8, 512, False, None),
        ((129, 128), 1, 2, 128, True, None, FP8),
        ((300, 40), 1, 4, 64, True, 40, FP8),
        ((40, 33), 1, 8, 512, False, None, FP8),
    ):
        kv_dtype = stored[0] if stored else None
        name = f"rotated split decode {lengths} {kv_heads}x{group}x{head_dim} norm={norm} window {window}"
        name += f" in {kv_dtype}" if kv_dtype else ""
        cases[name] = partial(
            check_rotated_split_decode, lengths=lengths, kv_heads=kv_heads, group=group, head_dim=head_dim, norm=norm,
            dtype=half, window=window, kv_dtype=kv_dtype,
        )  # fmt: skip
    cases["rotated split decode of queries with gates"] = partial(
        check_rotated_split_decode, lengths=(129, 40), kv_heads=2, group=3, head_dim=64, norm=True, dtype=half,
        gated=True,
    )  # fmt: skip
    cases["output gates"] = partial(check_output_gates, dtype=half)
    return cases


CASES: Final = _cases()


def _what_is_wrong(case: Case) -> str | None:
    try:
        case(torch.device("cpu"))
    except AssertionError as error:
        return str(error) or repr(error)
    return None


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    allow_loops_to_a_loaded_end()
    # Programs of several outputs, although these products are small.
    dense_skinny_triton._PROGRAMS = 3
    # And several blocks of tokens in a split.
    split_kv_decode_triton.SPLITS = 4
    print(json.dumps({name: _what_is_wrong(case) for name, case in CASES.items()}))
