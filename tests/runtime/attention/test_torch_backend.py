from __future__ import annotations

import pytest
import torch

from minisgl.attention.torch_backend import TorchDecode, TorchPrefill
from minisgl.kernels.attention.stored_kv import FP8
from support.kernels.dense_attention import DenseCase, Sequences, attention_shape, small_shape


def _run(case: DenseCase) -> torch.Tensor:
    return case.run(TorchPrefill(case.shape), TorchDecode(case.shape))


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize(("query_heads", "kv_heads"), [(4, 2), (6, 1), (3, 3)])
@pytest.mark.parametrize(
    "sequences",
    [
        Sequences(decode=(1, 17, 130, 64, 65)),
        Sequences(segments=((0, 5), (0, 70), (0, 1))),
        Sequences(decode=(33, 2, 100), segments=((0, 20), (64, 1), (7, 66), (15, 3))),
    ],
    ids=["decode", "prefill", "mixed"],
)
def test_it_equals_dense_attention_with_nan_in_all_other_pages(
    page_size: int, query_heads: int, kv_heads: int, sequences: Sequences
) -> None:
    shape = attention_shape(
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=16,
        page_size=page_size,
        longest=256,
        dtype=torch.float32,
        device="cpu",
    )
    case = DenseCase(shape, sequences, seed=page_size)
    torch.testing.assert_close(_run(case).double(), case.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [1, 2, 16, 33, 64, 129, 1000])
def test_a_window_hides_earlier_positions(window: int, page_size: int) -> None:
    shape = small_shape(page_size, window)
    decode = (1, window, window + 1, 130, 200)
    segments = ((0, 5), (0, 70), (64, 1), (7, 130), (40, 3))
    case = DenseCase(shape, Sequences(decode=tuple(min(length, 256) for length in decode), segments=segments))
    torch.testing.assert_close(_run(case).double(), case.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("owner_first", [True, False])
def test_a_segment_reads_a_prefix_that_another_segment_of_the_step_computes(owner_first: bool) -> None:
    shape = attention_shape(
        query_heads=4, kv_heads=2, head_dim=16, page_size=16, longest=64, dtype=torch.float32, device="cpu"
    )
    if owner_first:
        sequences = Sequences(decode=(9,), segments=((0, 40), (32, 6)), shares=(None, 0))
    else:
        sequences = Sequences(decode=(9,), segments=((32, 6), (0, 40)), shares=(1, None))
    case = DenseCase(shape, sequences)
    torch.testing.assert_close(_run(case).double(), case.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("page_size", [3, 16])
def test_a_pool_in_fp8_is_read_with_its_scales(page_size: int) -> None:
    sequences = Sequences(decode=(33, 2, 100), segments=((0, 20), (64, 1), (7, 66)))
    case = DenseCase(small_shape(page_size, kv_dtype=FP8), sequences)
    torch.testing.assert_close(_run(case).double(), case.expected(), atol=2e-5, rtol=1e-5)


def test_rows_are_split_if_a_gather_would_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.attention.torch_backend._GATHER_ELEMENTS", 50 * 2 * 16)
    shape = attention_shape(
        query_heads=4, kv_heads=2, head_dim=16, page_size=4, longest=64, dtype=torch.float32, device="cpu"
    )
    case = DenseCase(shape, Sequences(decode=(20, 21, 60, 3, 4, 5)))
    torch.testing.assert_close(_run(case).double(), case.expected(), atol=2e-6, rtol=1e-5)


def test_bfloat16_has_the_error_of_bfloat16() -> None:
    shape = attention_shape(
        query_heads=8, kv_heads=2, head_dim=64, page_size=16, longest=256, dtype=torch.bfloat16, device="cpu"
    )
    case = DenseCase(shape, Sequences(decode=(33, 2, 100), segments=((0, 20), (7, 66))))
    torch.testing.assert_close(_run(case).double(), case.expected(), atol=2e-2, rtol=2e-2)
