"""The sampling kernels compared with the torch version on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from minisgl.kernels.pointwise.step_inputs import step_inputs
from minisgl.kernels.sampling.sample import sample
from minisgl.kernels.sampling.sampling_rows import SamplingRows
from support.kernels.sampling import sampling_rows


def _cuda(rows: SamplingRows) -> SamplingRows:
    return SamplingRows(rows.table.cuda(), rows.slots.cuda(), rows.positions.cuda())


def _logits(count: int, vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(count)) * 4).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "vocabulary"), [(1, 151_936), (3, 100), (64, 8192), (33, 8193), (8, 32_001)])
def test_sampled_tokens_match_a_cpu(count: int, vocabulary: int, dtype: torch.dtype) -> None:
    logits = _logits(count, vocabulary, dtype)
    temperatures = [(0.0, 1.0, 0.6, 2.5)[i % 4] for i in range(count)]
    rows = sampling_rows(count, temperature=temperatures, seeds=[(i - 3) * 0x1234_5678_9ABC for i in range(count)])
    values, indices = sample(logits, rows, 1000)
    cuda_values, cuda_indices = sample(logits.cuda(), _cuda(rows), 1000)
    assert torch.equal(cuda_indices.cpu(), indices)
    torch.testing.assert_close(cuda_values.cpu(), values, atol=1e-4, rtol=1e-5)


def test_rows_that_are_not_finite_have_no_token() -> None:
    logits = _logits(6, 20_000, torch.bfloat16)
    logits[1, 19_999], logits[2, 0], logits[4, 9000] = math.nan, math.inf, -math.inf
    for temperature in (0.0, 1.0):
        rows = _cuda(sampling_rows(6, temperature=temperature))
        indices = sample(logits.cuda(), rows, 0)[1].tolist()
        assert [index < 0 for index in indices] == [False, True, True, False, True, False]


def test_the_lowest_of_equal_logits_is_sampled() -> None:
    logits = torch.zeros(2, 50_000, device="cuda")
    logits[1, [49_999, 30_000, 12_345]] = 1.0
    assert sample(logits, _cuda(sampling_rows(2, temperature=0.0)), 0)[1].tolist() == [0, 12_345]


def test_step_inputs_match_a_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    page_table = torch.randint(0, 1000, (20, 33), generator=generator, dtype=torch.int32)
    last_token = torch.randint(0, 1000, (20,), generator=generator, dtype=torch.int32)
    for total, prefill in ((1, 0), (7, 7), (300, 290), (129, 1)):
        slots = torch.randint(0, 20, (total,), generator=generator, dtype=torch.int32)
        positions = torch.randint(0, 33 * 16, (total,), generator=generator, dtype=torch.int32)
        tokens = torch.arange(prefill, dtype=torch.int32)
        given = slots, positions, tokens, page_table, last_token
        on_device = slots.cuda(), positions.cuda(), tokens.cuda(), page_table.cuda(), last_token.cuda()
        expected = step_inputs(*given, page_size=16)
        result = step_inputs(*on_device, page_size=16)
        for ours, theirs in zip(result, expected, strict=True):
            assert torch.equal(ours.cpu(), theirs)
