"""Filters, logits processors and log-probabilities on a CUDA device, compared with the torch version on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.kernels.sampling.resample_triton import Workspace, report_cuda, resample_cuda
from support.kernels.interpreted_resampling import CASES
from support.kernels.resampling import Row, expected_tokens, flat, make_batch, peaked

FILTERS = [
    Row(temperature=t, top_k=k, top_p=p, min_p=m)
    for t in (0.6, 1.0)
    for k, p, m in (
        (20, 0.95, 0.0),
        (1, 1.0, 0.0),
        (200, 1.0, 0.0),
        (1000, 0.9, 0.0),
        (0, 0.9, 0.0),
        (0, 0.5, 0.0),
        (0, 0.02, 0.0),
        (0, 1.0, 0.05),
        (0, 0.9, 0.1),
        (50, 0.8, 0.02),
    )
]
PENALTIES: dict[str, Any] = {
    "repetition": 1.2,
    "frequency": 0.3,
    "presence": 0.7,
    "prompt": range(0, 9000, 11),
    "output": [8, 8, 21] * 5,
}


def _resampled(logits: torch.Tensor, rows: list[Row]) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    batch = make_batch(logits, rows, "cuda")
    workspace = Workspace(len(rows), logits.shape[1], torch.device("cuda"))
    resample_cuda(
        batch.logits, batch.rows, batch.samples, batch.tables, workspace, lists=any(row.listed for row in rows)
    )
    report = report_cuda(batch.logits, batch.rows, batch.samples.tokens, workspace)
    return batch.samples.tokens.tolist(), batch.tables.counts.cpu(), report.cpu()


def _check(logits: torch.Tensor, rows: list[Row]) -> None:
    tokens, counts, _ = _resampled(logits, rows)
    wrong = {
        i: token
        for i, (token, allowed) in enumerate(zip(tokens, expected_tokens(logits, rows), strict=True))
        if token not in allowed
    }
    assert wrong == {}
    if all(row.top_p == 1 for row in rows):
        assert torch.equal(counts, make_batch(logits, rows).resampled()[2])


@pytest.mark.parametrize("name", CASES)
def test_rows_are_sampled_as_on_a_cpu(name: str) -> None:
    case = CASES[name]
    _check(case.logits(len(case.rows), case.vocabulary, case.dtype), case.rows)


@pytest.mark.parametrize("make", [flat, peaked])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_large_vocabulary_is_filtered_as_on_a_cpu(make, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    _check(make(len(FILTERS), 151_936, dtype), FILTERS)


@pytest.mark.parametrize("make", [flat, peaked])
def test_penalties_of_a_large_vocabulary_are_those_of_a_cpu(make) -> None:  # type: ignore[no-untyped-def]
    rows = [Row(temperature=0.0, **PENALTIES), Row(temperature=0.8, **PENALTIES)]
    rows += [Row(temperature=r.temperature, top_k=r.top_k, top_p=r.top_p, min_p=r.min_p, **PENALTIES) for r in FILTERS]
    _check(make(len(rows), 151_936), rows)


def test_tokens_do_not_depend_on_the_batch() -> None:
    rows = [*FILTERS, Row(**PENALTIES), Row(), Row(tops=5)] * 3
    logits = flat(len(rows), 151_936)
    together, _, reports = _resampled(logits, rows)
    for number in range(0, len(rows), 5):
        batch = make_batch(logits, rows, "cuda")
        one = batch.rows[number : number + 1]
        samples = type(batch.samples)(batch.samples.tokens[number : number + 1].clone(), batch.samples.last_token)
        workspace = Workspace(1, logits.shape[1], torch.device("cuda"))
        resample_cuda(batch.logits[number : number + 1], one, samples, batch.tables, workspace, lists=False)
        assert samples.tokens.item() == together[number]
        if rows[number].tops >= 0:
            report = report_cuda(batch.logits[number : number + 1], one, samples.tokens, workspace)
            assert torch.equal(report[0].cpu(), reports[number])


def test_rows_beside_filtered_rows_keep_their_tokens() -> None:
    rows = [FILTERS[i // 2] if i % 2 else Row(temperature=i % 4 * 0.3) for i in range(40)]
    logits = flat(40, 151_936)
    plain = make_batch(logits, rows, "cuda").samples.tokens.tolist()
    assert _resampled(logits, rows)[0][::2] == plain[::2]


@pytest.mark.parametrize("make", [flat, peaked])
def test_log_probabilities_are_those_of_torch(make) -> None:  # type: ignore[no-untyped-def]
    rows = [Row(tops=tops) for tops in (0, 1, 5, 20)] * 8
    logits = make(len(rows), 151_936)
    tokens, _, report = _resampled(logits, rows)
    most = (report.shape[1] - 1) // 2
    logprobs = logits.float().log_softmax(1)
    for number, row in enumerate(rows):
        values = report[number].view(torch.float32)
        torch.testing.assert_close(values[0], logprobs[number, tokens[number]], atol=2e-5, rtol=0)
        top = logprobs[number].topk(row.tops).values
        torch.testing.assert_close(values[1 + most : 1 + most + row.tops], top, atol=2e-5, rtol=0)
        ids = report[number, 1 : 1 + row.tops].long()
        assert len(set(ids.tolist())) == row.tops
        torch.testing.assert_close(logprobs[number, ids], top, atol=2e-5, rtol=0)


def test_rows_that_are_not_finite_have_no_token() -> None:
    rows = [Row(top_k=5), Row(top_p=0.5, **PENALTIES), Row(**PENALTIES), Row(top_k=5)]
    logits = flat(4, 20_000)
    logits[0, 100], logits[1, 19_999], logits[2, 0] = float("nan"), float("inf"), float("-inf")
    assert [token < 0 for token in _resampled(logits, rows)[0]] == [True, True, True, False]
