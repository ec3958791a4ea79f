from __future__ import annotations

import math

import pytest
import torch

from minisgl.kernels.sampling.random_bits import gumbel_noise, random_bits, row_keys
from minisgl.kernels.sampling.resample import top_k_top_p_thresholds
from minisgl.kernels.sampling.sample import sample
from support.kernels.sampling import sampling_rows


def _chi_square_passes(counts: torch.Tensor, probabilities: torch.Tensor) -> bool:
    """At a level of 1e-4, with the normal approximation of the cube root (Wilson & Hilferty 1931). Tokens that cannot
    be drawn must not have been drawn."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * counts.sum()
    assert expected.min() >= 5, "the approximation needs at least five expected draws of each token"
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    deviation = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - deviation)) / math.sqrt(deviation) < 3.72


def _hugging_face(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Probabilities as transformers computes them."""
    from transformers.generation import logits_process as hf

    scores = logits[None] / temperature
    processors = []
    if top_k:
        processors.append(hf.TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(hf.TopPLogitsWarper(top_p))
    if min_p:
        processors.append(hf.MinPLogitsWarper(min_p))
    for processor in processors:
        scores = processor(torch.zeros(1, 1, dtype=torch.long), scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (1.7, 0, 1.0, 0.0),
        (1.0, 7, 1.0, 0.0),
        (0.8, 0, 0.7, 0.0),
        (1.0, 0, 1.0, 0.1),
        (0.9, 20, 0.8, 0.05),
        (1.5, 3, 0.95, 0.0),
    ],
)
def test_samples_follow_the_distribution_of_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    draws, vocabulary = 100_000, 24
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(3)) * 0.9
    probabilities = _hugging_face(logits, temperature, top_k, top_p, min_p)
    # Neighbouring seeds and positions, as real requests have them.
    seeds, positions = [i % 100 for i in range(draws)], [i // 100 for i in range(draws)]
    rows = sampling_rows(
        draws, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seeds=seeds, positions=positions
    )
    wide = logits.expand(draws, vocabulary)
    limits = top_k_top_p_thresholds(wide[:1], rows[:1]).expand(draws) if top_k or top_p < 1 or min_p else None
    _, indices = sample(wide, rows, 0, limits)
    assert _chi_square_passes(indices.bincount(minlength=vocabulary), probabilities)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1.0, 0.0),
        (40, 1.0, 0.0),
        (0, 0.5, 0.0),
        (0, 0.0, 0.0),
        (0, 1.0, 0.3),
        (0, 1.0, 1.0),
        (30, 0.9, 0.02),
        (999, 0.99, 0.0),
    ],
)
def test_filters_keep_the_tokens_that_transformers_keeps(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(40, 400, generator=torch.Generator().manual_seed(1)) * 3
    temperatures = [0.3 + 0.05 * i for i in range(40)]
    rows = sampling_rows(40, temperature=temperatures, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = logits >= top_k_top_p_thresholds(logits, rows)[:, None]
    for row, temperature in enumerate(temperatures):
        expected = _hugging_face(logits[row], temperature, min(top_k, 400), top_p, min_p) > 0
        assert torch.equal(kept[row], expected)


def test_tokens_with_equal_logits_are_kept_or_removed_together() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0, -1.0]])
    assert top_k_top_p_thresholds(logits, sampling_rows(1, top_k=2)).tolist() == [1.0]
    assert top_k_top_p_thresholds(logits, sampling_rows(1, top_p=0.6)).tolist() == [1.0]


def test_greedy_sampling_takes_the_lowest_index_of_equal_logits() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 5.0, 5.0]], dtype=torch.bfloat16)
    values, indices = sample(logits, sampling_rows(2, temperature=0.0), 100)
    assert indices.tolist() == [101, 100] and values.tolist() == [3.0, 5.0]


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_logits_that_are_not_finite_has_no_token(fault: float, temperature: float) -> None:
    logits = torch.zeros(3, 9)
    logits[1, 4] = fault
    rows = sampling_rows(3, temperature=temperature, top_p=0.5)
    for limits in (None, top_k_top_p_thresholds(logits, rows)):
        values, indices = sample(logits, rows, 0, limits)
        assert indices[1] == -1 and values[1] == math.inf
        assert (indices[[0, 2]] >= 0).all() and values[[0, 2]].isfinite().all()


def test_a_requests_tokens_depend_neither_on_its_row_nor_on_its_neighbours() -> None:
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(5))
    rows = sampling_rows(64, temperature=[0.0, 0.7, 1.0, 3.0] * 16, seeds=[(-7) ** i % 2**62 for i in range(64)])
    _, together = sample(logits, rows, 0)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(6))
    assert torch.equal(sample(logits[order], rows[order], 0)[1], together[order])
    alone = [int(sample(logits[i : i + 1], rows[i : i + 1], 0)[1]) for i in range(64)]
    assert alone == together.tolist()


def test_vocabulary_shards_use_the_random_numbers_of_the_whole() -> None:
    logits = torch.randn(32, 300, generator=torch.Generator().manual_seed(7))
    rows = sampling_rows(32)
    values, indices = sample(logits, rows, 0)
    parts = [sample(logits[:, first : first + 100], rows, first) for first in (0, 100, 200)]
    best = torch.stack([part[0] for part in parts]).argmax(0)
    assert torch.equal(torch.stack([part[1] for part in parts]).gather(0, best[None])[0], indices)
    assert torch.equal(torch.stack([part[0] for part in parts]).max(0).values, values)


def test_large_batches_are_sampled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(10, 300, generator=torch.Generator().manual_seed(8))
    rows = sampling_rows(10)
    whole = sample(logits, rows, 0)[1]
    monkeypatch.setattr("minisgl.kernels.sampling.sample._CHUNK_ELEMENTS", 700)
    assert torch.equal(sample(logits, rows, 0)[1], whole)


def test_random_bits_never_change() -> None:
    """A resumed request must continue its stream on another version: these numbers never change."""
    rows = sampling_rows(2, seeds=[0, -(2**63) + 12345], positions=[0, 1_000_000])
    keys = row_keys(rows.seed_low, rows.seed_high, rows.positions)
    assert random_bits(keys, 151_934, 2).tolist() == [[0xA61C8650, 0x438892FB], [0x002FDD7E, 0x5A8699E2]]


def test_every_bit_of_seed_position_and_index_changes_about_half_of_the_bits() -> None:
    def bits(seed: int, position: int, index: int) -> int:
        rows = sampling_rows(1, seeds=[seed - (1 << 64) if seed >> 63 else seed], positions=[position])
        return int(random_bits(row_keys(rows.seed_low, rows.seed_high, rows.positions), index, 1))

    generator = torch.Generator().manual_seed(9)
    for part, width in ((0, 64), (1, 20), (2, 17)):
        flips = []
        for bit in range(width):
            for _ in range(8):
                key = [int(torch.randint(1 << 30, (), generator=generator)) * 0x3_0000_0001 & (1 << 64) - 1, 77, 4242]
                changed = list(key)
                changed[part] ^= 1 << bit
                flips.append((bits(*key) ^ bits(*changed)).bit_count())
        assert 14.5 < sum(flips) / len(flips) < 17.5


def test_noise_is_finite_and_gumbel_distributed() -> None:
    extremes = gumbel_noise(torch.tensor([0, 1, 1 << 24, (1 << 32) - 1]))
    assert extremes.isfinite().all()
    assert extremes[0] == pytest.approx(33 * math.log(2), rel=1e-6)
    rows = sampling_rows(100)
    noise = gumbel_noise(random_bits(row_keys(rows.seed_low, rows.seed_high, rows.positions), 0, 1000)).double()
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.05)
