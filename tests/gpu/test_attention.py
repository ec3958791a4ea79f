"""Every attention backend against dense float64 attention, in bfloat16 on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from minisgl.attention import fa3_backend, flashinfer_backend, triton_backend, xqa_backend
from minisgl.attention.backend import AttentionShape, DecodeBackend, PrefillBackend
from minisgl.attention.fa3_backend import Fa3Prefill
from minisgl.attention.flashinfer_backend import FlashInferDecode, FlashInferPrefill
from minisgl.attention.torch_backend import TorchDecode, TorchPrefill
from minisgl.attention.triton_backend import TritonPrefill
from minisgl.attention.xqa_backend import XqaDecode
from support.kernels.dense_attention import DenseCase, Sequences, attention_shape

DECODE = Sequences(decode=(1, 2, 63, 64, 65, 700, 1500, 17))
FRESH = Sequences(segments=((0, 1), (0, 300), (0, 64), (0, 129)))
EXTEND = Sequences(segments=((64, 200), (0, 33), (700, 5), (128, 128)))
CONTINUED_AND_FRESH = Sequences(decode=(5,), segments=((640, 200), (0, 300), (0, 1), (0, 129)))
MIXED = Sequences(decode=(5, 900, 64), segments=((0, 65), (192, 100)))
BEHIND_ODD_PREFIXES = Sequences(decode=(5,), segments=((700, 1), (1201, 5), (1, 1), (129, 300), (63, 64)))
SHARED = Sequences(decode=(70,), segments=((64, 20), (0, 150)), shares=(1, None))

Why = Callable[[AttentionShape], str | None]


def _shape(
    group: int = 2,
    page_size: int = 64,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    window: int | None = None,
) -> AttentionShape:
    return attention_shape(
        query_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        longest=2048,
        dtype=dtype,
        device="cuda",
        window=window,
    )


def _check(case: DenseCase, prefill: PrefillBackend, decode: DecodeBackend) -> None:
    result, expected = case.run(prefill, decode).double().cpu(), case.expected()
    assert result.isfinite().all()
    assert float((result - expected).norm() / expected.norm()) < 1e-2
    torch.testing.assert_close(result, expected, atol=3e-2, rtol=3e-2)


def _require(why_not: Why, shape: AttentionShape) -> None:
    if reason := why_not(shape):
        pytest.skip(reason)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sequences", [DECODE, EXTEND, MIXED, SHARED], ids=["decode", "extend", "mixed", "shared"])
def test_torch(sequences: Sequences, dtype: torch.dtype) -> None:
    shape = _shape(dtype=dtype)
    _check(DenseCase(shape, sequences), TorchPrefill(shape), TorchDecode(shape))


@pytest.mark.parametrize("group", [2, 5, 8])
@pytest.mark.parametrize("nan_tails", [False, True], ids=["zero_tails", "nan_tails"])
def test_xqa_decode(group: int, nan_tails: bool) -> None:
    shape = _shape(group)
    _require(xqa_backend.why_not, shape)
    _check(DenseCase(shape, DECODE, nan_tails=nan_tails), TorchPrefill(shape), XqaDecode(shape))


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("group", [2, 5])
@pytest.mark.parametrize("nan_tails", [False, True], ids=["zero_tails", "nan_tails"])
def test_flashinfer_decode(group: int, page_size: int, nan_tails: bool) -> None:
    shape = _shape(group, page_size)
    _require(flashinfer_backend.why_not, shape)
    _check(DenseCase(shape, DECODE, nan_tails=nan_tails), TorchPrefill(shape), FlashInferDecode(shape))


@pytest.mark.parametrize("sequences", [FRESH, EXTEND, MIXED, SHARED], ids=["fresh", "extend", "mixed", "shared"])
@pytest.mark.parametrize("nan_tails", [False, True], ids=["zero_tails", "nan_tails"])
def test_flashinfer_prefill(sequences: Sequences, nan_tails: bool) -> None:
    shape = _shape()
    _require(flashinfer_backend.why_not, shape)
    _check(DenseCase(shape, sequences, nan_tails=nan_tails), FlashInferPrefill(shape), TorchDecode(shape))


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("group", "head_dim"), [(2, 128), (5, 128), (4, 64), (2, 256)])
@pytest.mark.parametrize(
    "sequences",
    [FRESH, EXTEND, CONTINUED_AND_FRESH, BEHIND_ODD_PREFIXES, MIXED, SHARED],
    ids=["fresh", "extend", "continued_and_fresh", "behind_odd_prefixes", "mixed", "shared"],
)
def test_fa3_prefill(sequences: Sequences, group: int, head_dim: int, page_size: int) -> None:
    shape = _shape(group, page_size, head_dim=head_dim)
    _require(fa3_backend.why_not, shape)
    _check(DenseCase(shape, sequences), Fa3Prefill(shape, TorchPrefill(shape)), TorchDecode(shape))


@pytest.mark.parametrize("window", [1, 64, 130, 1000])
@pytest.mark.parametrize(("group", "head_dim"), [(4, 128), (4, 64)])
@pytest.mark.parametrize(
    "sequences", [FRESH, EXTEND, BEHIND_ODD_PREFIXES, MIXED], ids=["fresh", "extend", "behind_odd_prefixes", "mixed"]
)
@pytest.mark.parametrize("name", ["fa3", "flashinfer", "triton", "torch"])
def test_prefill_with_a_window(name: str, sequences: Sequences, group: int, head_dim: int, window: int) -> None:
    shape = _shape(group, head_dim=head_dim, window=window)
    prefill: PrefillBackend = TorchPrefill(shape)
    if name == "fa3":
        _require(fa3_backend.why_not, shape)
        prefill = Fa3Prefill(shape, prefill)
    elif name == "flashinfer":
        _require(flashinfer_backend.why_not, shape)
        prefill = FlashInferPrefill(shape)
    elif name == "triton":
        _require(triton_backend.why_not, shape)
        prefill = TritonPrefill(shape)
    _check(DenseCase(shape, sequences), prefill, TorchDecode(shape))


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (5, 128), (8, 64), (2, 256), (8, 512)])
@pytest.mark.parametrize(
    "sequences",
    [FRESH, EXTEND, CONTINUED_AND_FRESH, BEHIND_ODD_PREFIXES, MIXED, SHARED],
    ids=["fresh", "extend", "continued_and_fresh", "behind_odd_prefixes", "mixed", "shared"],
)
def test_triton_prefill(sequences: Sequences, group: int, head_dim: int, page_size: int) -> None:
    shape = _shape(group, page_size, head_dim=head_dim)
    _require(triton_backend.why_not, shape)
    _check(DenseCase(shape, sequences), TritonPrefill(shape), TorchDecode(shape))


@pytest.mark.parametrize("window", [1, 64, 130, 1000])
@pytest.mark.parametrize("make", [XqaDecode, FlashInferDecode, TorchDecode], ids=["xqa", "flashinfer", "torch"])
def test_decode_with_a_window(make: type[XqaDecode] | type[FlashInferDecode] | type[TorchDecode], window: int) -> None:
    shape = _shape(window=window)
    if make is not TorchDecode:
        _require(xqa_backend.why_not if make is XqaDecode else flashinfer_backend.why_not, shape)
    _check(DenseCase(shape, DECODE), TorchPrefill(shape), make(shape))


def test_fa3_reads_nothing_of_earlier_steps_behind_its_keys() -> None:
    """A step leaves NaN in the copy, and the next one has fewer keys."""
    shape = _shape()
    _require(fa3_backend.why_not, shape)
    prefill = Fa3Prefill(shape, TorchPrefill(shape))
    faulty = DenseCase(shape, Sequences(segments=((640, 300),)))
    faulty.v.fill_(torch.nan)
    assert faulty.run(prefill, TorchDecode(shape)).isnan().any()
    _check(DenseCase(shape, BEHIND_ODD_PREFIXES), prefill, TorchDecode(shape))


@pytest.mark.parametrize("make", [XqaDecode, FlashInferDecode], ids=["xqa", "flashinfer"])
def test_a_decode_graph_replays_for_other_lengths(make: type[XqaDecode] | type[FlashInferDecode]) -> None:
    shape = _shape()
    _require(xqa_backend.why_not if make is XqaDecode else flashinfer_backend.why_not, shape)
    first = DenseCase(shape, Sequences(decode=(700, 2, 65, 64)), seed=1)
    second = DenseCase(shape, Sequences(decode=(702, 6, 67, 62)), seed=2)
    assert first.kv.keys.shape == second.kv.keys.shape
    decode = make(shape).for_graph(4)
    out = torch.empty_like(first.q)
    batch = first.batch
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        first.store()
        for _ in range(2):
            decode.prepare(batch)
            decode.begin(batch)
            decode.decode(0, first.kv, first.q, out)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        decode.begin(batch)
        decode.decode(0, first.kv, first.q, out)
        graph.capture_end()
        for case in (first, second):
            # A replay sees what the captured tensors hold now.
            for ours, theirs in (
                (batch.page_table, case.batch.page_table),
                (batch.decode_slots, case.batch.decode_slots),
                (batch.decode_lengths, case.batch.decode_lengths),
                (first.q, case.q),
                (first.kv.keys, case.kv.keys),
                (first.kv.values, case.kv.values),
            ):
                ours.copy_(theirs.clone())
            for pool, new in ((first.kv.keys, case.k), (first.kv.values, case.v)):
                pool[0].flatten(0, 1)[case.locations] = new
            decode.prepare(case.batch)
            graph.replay()
            stream.synchronize()
            torch.testing.assert_close(out.flatten(1).double().cpu(), case.expected(), atol=3e-2, rtol=3e-2)
