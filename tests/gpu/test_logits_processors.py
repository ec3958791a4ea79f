"""Penalties, biases, minimum lengths, constraints and log-probabilities on a CUDA device, behind graphs and in eager
steps."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.engine.cuda_engine import CudaEngine
from minisgl.engine.engine import create_engine
from minisgl.wire.messages import Thinking
from minisgl.wire.plan import StepPlan
from support.constrained import ToyGrammar
from support.numerics.logits_processors import Scores, Serving, assert_same, defined_answer, submit

GRAMMAR = ToyGrammar(factor=3, length=100, least=100).text
PROMPT = np.random.default_rng(5).integers(3, 500, 75).tolist()
CONTROLS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.5, "logprobs": 0},
    {"repetition_penalty": 1.4, "logprobs": 5},
    {"repetition_penalty": 0.7},
    {"logit_bias": {77: 100.0, 78: 99.5}, "frequency_penalty": 0.3},
    {"min_tokens": 12, "stop_token_ids": tuple(range(256))},
    {"temperature": 0.9, "seed": 3, "presence_penalty": 1.0, "logprobs": 1},
    {"temperature": 0.9, "seed": 4, "top_k": 5, "repetition_penalty": 1.2},
    {"temperature": 0.9, "seed": 5, "top_k": 5},
    {"temperature": 0.9, "seed": 6, "top_k": 5, "logprobs": 0, "logprob_token_ids": (5, 400, 77)},
    {"temperature": 0.9, "seed": 6, "grammar": GRAMMAR},
    {"grammar": GRAMMAR, "logprobs": 2},
    {"temperature": 0.9, "seed": 7, "grammar": GRAMMAR, "top_p": 0.9, "presence_penalty": 1.0, "logprobs": 1},
    {"temperature": 0.9, "seed": 8, "top_k": 5, "allowed_token_ids": tuple(range(3, 500, 7)), "min_tokens": 20},
    {"thinking": Thinking(start=(70,), end=(71, 72), is_open=True, budget=3), "bad_words": ((5,), (6, 7))},
]


def _engine(checkpoint: Path, **settings: object) -> CudaEngine:
    defaults = {"model": str(checkpoint), "device": "cuda", "page_size": 64, "num_pages": 64, "max_running": 16}
    engine = create_engine(EngineConfig(**(defaults | settings)))  # type: ignore[arg-type]
    assert isinstance(engine, CudaEngine)
    return engine


@pytest.mark.parametrize("largest_graph", [0, 16])
@pytest.mark.parametrize("prefill_graphs", [0, 2048])
@pytest.mark.parametrize("overlap", [True, False])
def test_answers_match_the_definition_on_the_engines_logits(
    checkpoint: Path, largest_graph: int, prefill_graphs: int, overlap: bool
) -> None:
    engine = _engine(checkpoint, cuda_graph_max_batch=largest_graph, cuda_graph_max_tokens=prefill_graphs)
    serving = Serving(engine, overlap=overlap, max_step_tokens=100)
    logits: dict[bytes, list[torch.Tensor]] = defaultdict(list)

    def tap(plan: StepPlan, tapped: torch.Tensor) -> None:
        for row, slot in enumerate(plan.sampled_slots.tolist()):
            request = serving.scheduler.table.requests[slot]
            assert request is not None
            logits[request.id].append(tapped[row].float().cpu())

    engine.runner.logits_hook = tap
    requests = [submit(PROMPT, 24, **fields) for fields in CONTROLS]
    answers = serving.answers(requests)
    eos = set(engine.limits.eos_token_ids)
    for request, answer in zip(requests, answers, strict=True):
        known = logits[request.id]
        expected = defined_answer(request, lambda output, known=known: known[len(output)], eos)  # type: ignore[misc]
        assert_same(answer, expected)
    engine.close()


def test_prompt_log_probabilities_match_those_of_the_generated_tokens(checkpoint: Path) -> None:
    """The prompt is computed in several steps; bfloat16 rounds differently in prefill and decode."""
    engine = _engine(checkpoint)
    serving = Serving(engine, max_step_tokens=90)
    [answer] = serving.answers([submit(PROMPT, 200, ignore_eos=True, logprobs=3)])
    [scored] = serving.answers([submit([*PROMPT, *answer.tokens], 1, prompt_logprobs=3)])
    assert len(scored.prompt_scores.chosen) == len(PROMPT) + 199
    ours = Scores(scored.prompt_scores.chosen[len(PROMPT) - 1 :], scored.prompt_scores.tops[len(PROMPT) - 1 :])
    np.testing.assert_allclose(ours.chosen, answer.scores.chosen, atol=0.3)
    assert all(len(top) == 3 for top in ours.tops)
    engine.close()


def test_neighbours_of_constrained_rows_keep_their_tokens(checkpoint: Path) -> None:
    engine = _engine(checkpoint)
    tokens = []
    # The same number of rows, since products of other sizes are rounded differently.
    for grammar in ("", GRAMMAR):
        free = [submit(PROMPT, 24, temperature=0.8, seed=n, top_p=1 - n % 2 / 10, ignore_eos=True) for n in range(5)]
        others = [submit(PROMPT, 24, temperature=0.8, seed=n, ignore_eos=True, grammar=grammar) for n in range(5)]
        answers = Serving(engine).answers([*free, *others])
        assert [len(answer.tokens) for answer in answers] == [24] * 10
        tokens.append([answer.tokens for answer in answers])
    assert tokens[0][:5] == tokens[1][:5] and tokens[0][5:] != tokens[1][5:]
    engine.close()
