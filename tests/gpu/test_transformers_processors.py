"""Filters and penalties on a CUDA device, compared with the logits processors of transformers in float32, alone and in
one batch. Presence and frequency penalties, which transformers does not have, are compared with their definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as hf

from minisgl.kernels.sampling.random_bits import gumbel_noise, random_bits, row_keys
from minisgl.kernels.sampling.resample_triton import Workspace, resample_cuda
from support.kernels.resampling import EDGE, Batch, Row, flat, make_batch, peaked

VOCABULARY = 20_011
DRAWS = 64
"""Rows of each kind: the same parameters and logits at other positions."""
PROMPT = tuple(range(0, 3000, 7))
OUTPUT = (5, 5, 14, 14, 14, 2999, 20_010)
HISTORY: dict[str, Any] = {"prompt": PROMPT, "output": OUTPUT}
KINDS = {
    "greedy": Row(temperature=0.0),
    "temperature": Row(temperature=0.7),
    "top-k of one": Row(top_k=1),
    "top-k": Row(top_k=20, temperature=50.0),
    "many": Row(top_k=400, temperature=9.0),
    "top-p": Row(top_p=0.9, temperature=0.8),
    "small top-p": Row(top_p=0.2, temperature=1.5),
    "min-p": Row(min_p=0.02, temperature=2.0),
    "all filters": Row(top_k=50, top_p=0.8, min_p=0.01, temperature=3.0),
    "repetition": Row(repetition=1.3, **HISTORY),
    "greedy repetition": Row(repetition=1.3, temperature=0.0, **HISTORY),
    "reward of repetition": Row(repetition=0.6, top_k=30, temperature=20.0, **HISTORY),
    "repetition and filters": Row(repetition=1.2, top_k=40, top_p=0.9, min_p=0.001, temperature=5.0, **HISTORY),
    "minimum length": Row(masked=range(0, VOCABULARY, 2), mask_until=1 << 30, top_k=9, temperature=20.0),
    "bias": Row(biases={77: 30.0, 78: 29.5, 4: -9.0}, top_k=9, temperature=20.0),
    "presence": Row(presence=1.5, temperature=0.6, **HISTORY),
    "frequency": Row(frequency=-0.7, top_k=50, temperature=4.0, **HISTORY),
    "all penalties": Row(repetition=1.4, presence=0.7, frequency=0.3, top_p=0.95, **HISTORY),
}


def _processed(logits: torch.Tensor, row: Row) -> torch.Tensor:
    """Logits [vocab] float32 after biases, penalties and masks."""
    scores, history = logits[None].clone(), torch.tensor([[*row.prompt, *row.output]], dtype=torch.long)
    if row.biases:
        bias = [[[token], value] for token, value in row.biases.items()]
        scores = hf.SequenceBiasLogitsProcessor(bias)(history, scores)
    if row.repetition != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(row.repetition)(history, scores)
    for token in set(row.output):
        scores[0, token] -= torch.tensor(row.frequency) * list(row.output).count(token)
        scores[0, token] -= row.presence
    if row.masked:
        minimum = hf.MinNewTokensLengthLogitsProcessor(history.shape[1], 1, list(row.masked))
        scores = minimum(history, scores)
    return scores[0]


def _kept(processed: torch.Tensor, row: Row, top_p: float) -> torch.Tensor:
    """[vocab] tokens that the filters keep."""
    scores = processed[None] / row.temperature
    warpers: list[Any] = [hf.TopKLogitsWarper(row.top_k)] if row.top_k else []
    warpers += [hf.TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [hf.MinPLogitsWarper(row.min_p)] if row.min_p else []
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
    return scores[0].isfinite()


def _expected(logits: torch.Tensor, row: Row, noise: torch.Tensor) -> list[set[int]]:
    """Tokens that the draws with `noise` [N, vocab] may have: two where a sum within `EDGE` of top-p decides."""
    processed = _processed(logits, row)
    if row.temperature == 0:
        return [{int(processed.argmax())}] * len(noise)
    scores = processed / row.temperature + noise
    found: list[set[int]] = [set() for _ in noise]
    for factor in {1 - EDGE, 1.0, 1 + EDGE} if row.top_p < 1 else {1.0}:
        kept = _kept(processed, row, min(1.0, row.top_p * factor))
        for tokens, token in zip(found, scores.masked_fill(~kept, -torch.inf).argmax(1).tolist(), strict=True):
            tokens.add(token)
    return found


def _resample(batch: Batch, rows: Sequence[Row]) -> Workspace:
    workspace = Workspace(len(rows), batch.logits.shape[1], torch.device("cuda"))
    lists = any(row.listed for row in rows)
    resample_cuda(batch.logits, batch.rows, batch.samples, batch.tables, workspace, lists=lists)
    return workspace


def _noise(batch: Batch, rows: Sequence[int]) -> torch.Tensor:
    some = batch.rows[torch.tensor(list(rows), device="cuda")]
    keys = row_keys(some.seed_low.cpu(), some.seed_high.cpu(), some.positions.cpu())
    return gumbel_noise(random_bits(keys, 0, VOCABULARY))


def _check(logits: torch.Tensor, kinds: Sequence[Row], rows: Sequence[Row]) -> None:
    """`rows` and their `logits` in one batch; each of the `kinds` is that of some rows."""
    batch = make_batch(logits, rows, "cuda")
    _resample(batch, rows)
    tokens = batch.samples.tokens.tolist()
    for kind in kinds:
        numbers = [number for number, row in enumerate(rows) if row is kind]
        allowed = _expected(logits[numbers[0]], kind, _noise(batch, numbers))
        wrong = [(n, tokens[n], may) for n, may in zip(numbers, allowed, strict=True) if tokens[n] not in may]
        assert not wrong, kind


@pytest.mark.parametrize("make", [flat, peaked])
@pytest.mark.parametrize("name", KINDS)
def test_rows_of_one_kind_are_sampled_from_what_transformers_keeps(name: str, make: Any) -> None:
    logits = make(1, VOCABULARY, torch.float32).expand(DRAWS, VOCABULARY).contiguous()
    _check(logits, [KINDS[name]], [KINDS[name]] * DRAWS)


@pytest.mark.parametrize("make", [flat, peaked])
def test_rows_of_all_kinds_in_one_batch_are_sampled_from_what_transformers_keeps(make: Any) -> None:
    kinds = list(KINDS.values())
    rows = kinds * 8
    _check(make(1, VOCABULARY, torch.float32).expand(len(rows), VOCABULARY).contiguous(), kinds, rows)


def test_penalized_logits_are_those_of_transformers_bit_by_bit() -> None:
    filtered = [row for row in KINDS.values() if row.repetition != 1 and (row.top_k or row.top_p < 1)]
    logits = flat(len(filtered), VOCABULARY, torch.float32)
    workspace = _resample(make_batch(logits, filtered, "cuda"), filtered)
    for number, row in enumerate(filtered):
        assert torch.equal(workspace.changed_logits[number].cpu(), _processed(logits[number], row))


@pytest.mark.captures
def test_a_captured_graph_samples_as_the_launches_that_it_has_recorded() -> None:
    rows = list(KINDS.values()) * 2
    logits = peaked(len(rows), VOCABULARY)
    eager = make_batch(logits, rows, "cuda")
    _resample(eager, rows)
    batch = make_batch(logits, rows, "cuda")
    workspace = Workspace(len(rows), VOCABULARY, torch.device("cuda"))
    tokens, last_token, counts = batch.samples.tokens.clone(), batch.samples.last_token.clone(), batch.tables.counts
    history = counts.clone()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        resample_cuda(batch.logits, batch.rows, batch.samples, batch.tables, workspace, lists=True)
        graph.capture_end()
        for _ in range(2):
            batch.samples.tokens.copy_(tokens)
            batch.samples.last_token.copy_(last_token)
            counts.copy_(history)
            graph.replay()
            stream.synchronize()
            assert torch.equal(batch.samples.tokens, eager.samples.tokens)
            assert torch.equal(batch.samples.last_token, eager.samples.last_token)
            assert torch.equal(counts, eager.tables.counts)
