"""Calls of FlashAttention-3, with a stand-in for its kernel. tests/gpu tests the kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minisgl.attention import fa3_backend
from minisgl.attention.fa3_backend import Fa3Prefill
from minisgl.attention.torch_backend import TorchDecode, TorchPrefill
from minisgl.kernels.attention.stored_kv import FP8, KVScales
from support.kernels.dense_attention import DenseCase, Sequences, small_shape


class Kernel:
    """Attention of segments in torch, which records the queries and keys of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        query_offsets: torch.Tensor,
        key_offsets: torch.Tensor,
        *,
        longest_query: int,
        longest_key: int,
        splits: int,
        scale: float,
        scales: KVScales,
    ) -> None:
        queries, keys = query_offsets.tolist(), key_offsets.tolist()
        assert queries[0] == 0 and queries[-1] == len(q) and splits >= 1
        self.calls.append((len(q), keys[-1]))
        for begin, end, first, last in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True):
            assert end - begin <= longest_query and last - first <= longest_key
            mask = torch.ones(end - begin, last - first, dtype=torch.bool).tril(last - first - (end - begin))
            query, key, value = (x.transpose(0, 1)[None] for x in (q[begin:end], k[first:last], v[first:last]))
            attended = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=scale * scales.key, enable_gqa=True
            )
            out[begin:end] = attended[0].transpose(0, 1) * scales.value


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(fa3_backend, "attend_segments", kernel)
    return kernel


def _check(
    sequences: Sequences, *, page_size: int = 16, window: int | None = None, kv_dtype: torch.dtype | None = None
) -> None:
    shape = small_shape(page_size, window, kv_dtype)
    case = DenseCase(shape, sequences)
    result = case.run(Fa3Prefill(shape, TorchPrefill(shape)), TorchDecode(shape))
    torch.testing.assert_close(result.double(), case.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("segments", "calls"),
    [
        (((0, 30), (0, 1), (0, 65)), [(96, 96)]),
        (((64, 20), (0, 30), (0, 5)), [(55, 119)]),
        (((0, 30), (63, 20), (0, 30), (17, 2), (0, 7)), [(89, 169)]),
        (((5, 1),), [(1, 6)]),
    ],
)
@pytest.mark.parametrize("page_size", [16, 64])
def test_one_call_serves_new_and_continued_segments(
    kernel: Kernel, segments: tuple[tuple[int, int], ...], calls: list[tuple[int, int]], page_size: int
) -> None:
    _check(Sequences(decode=(5, 40), segments=segments), page_size=page_size)
    assert kernel.calls == calls


def test_a_segment_behind_a_prefix_that_the_same_step_computes(kernel: Kernel) -> None:
    _check(Sequences(segments=((64, 20), (0, 150)), shares=(1, None)))
    assert kernel.calls == [(170, 234)]


def test_segments_whose_keys_do_not_fit_together_get_several_calls(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fa3_backend, "_COPY_BYTES", 250 * 2 * 2 * 16 * 4)
    _check(Sequences(decode=(7,), segments=((100, 20), (0, 130), (30, 1), (200, 50), (0, 3))))
    assert kernel.calls == [(150, 250), (1, 31), (50, 250), (3, 3)]


def test_a_prefix_that_does_not_fit_uses_the_fallback(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa3_backend, "_COPY_BYTES", 100 * 2 * 2 * 16 * 4)
    _check(Sequences(decode=(7,), segments=((100, 20), (0, 30))))
    _check(Sequences(segments=((0, 200),)))
    assert kernel.calls == [(200, 200)]


def test_sequences_beyond_a_sliding_window_use_the_fallback(kernel: Kernel) -> None:
    _check(Sequences(decode=(90,), segments=((20, 60), (0, 80))), window=80)
    assert kernel.calls == [(140, 160)]
    _check(Sequences(decode=(90,), segments=((20, 60), (0, 81))), window=80)
    _check(Sequences(segments=((100, 1),)), window=80)
    assert len(kernel.calls) == 1


def test_few_queries_behind_many_keys_use_flashinfer(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa3_backend, "_MANY_KEYS", 300)
    monkeypatch.setattr(TorchPrefill, "name", "flashinfer")
    _check(Sequences(segments=((200, 4), (150, 1))))
    assert kernel.calls == []
    _check(Sequences(segments=((200, 4),)))
    monkeypatch.setattr(TorchPrefill, "name", "torch")
    _check(Sequences(segments=((200, 4), (150, 1))))
    assert kernel.calls == [(4, 204), (5, 355)]


def test_a_captured_call_serves_any_segments_with_the_same_number_of_tokens(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = small_shape()
    prefill = Fa3Prefill(shape, TorchPrefill(shape))
    # A step before the capture used the fallback.
    with monkeypatch.context() as patch:
        patch.setattr(prefill, "copied_keys", 100)
        prefill.prepare(DenseCase(shape, Sequences(segments=((200, 4),))).batch)
    captured = prefill.for_graph(60, segments=4, prefix=True)
    fresh = DenseCase(shape, Sequences(segments=((0, 40), (0, 0), (0, 20), (0, 0))))
    result = fresh.run(prefill.for_graph(60, segments=4, prefix=False), TorchDecode(shape))
    torch.testing.assert_close(result.double(), fresh.expected(), atol=1e-5, rtol=1e-5)
    for segments in (((0, 60), (0, 0), (0, 0), (0, 0)), ((64, 20), (33, 1), (0, 39), (0, 0)), ((7, 15),) * 4):
        case = DenseCase(shape, Sequences(segments=segments))
        torch.testing.assert_close(
            case.run(captured, TorchDecode(shape)).double(), case.expected(), atol=1e-5, rtol=1e-5
        )
    assert [queries for queries, _ in kernel.calls] == [60] * 4
    assert prefill.most_graph_keys == prefill.copied_keys


@pytest.mark.parametrize("segments", [((0, 5), (0, 70)), ((64, 20), (0, 9), (33, 40))], ids=["new", "continued"])
def test_a_pool_in_fp8_gives_the_same_attention_to_new_and_to_stored_keys(
    kernel: Kernel, segments: tuple[tuple[int, int], ...]
) -> None:
    _check(Sequences(decode=(9, 33), segments=segments), kv_dtype=FP8)
