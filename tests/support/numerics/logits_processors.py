"""Requests with penalties, biases, minimum lengths, constraints and log-probabilities: answers computed from
transformers' logits, and answers of a scheduler with a real engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from minisgl.config import EngineConfig
from minisgl.engine.interface import Engine
from minisgl.kernels.sampling.resample import top_k_top_p_thresholds
from minisgl.kernels.sampling.sample import sample
from minisgl.scheduler.compiling import ConstraintCompiler
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.process import scheduler_config
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.step_output import StepOutput
from minisgl.wire.messages import FINISH_REASONS, Submit, TokenLogprobs
from support.constrained import ToyGrammars, allowed_tokens
from support.kernels.sampling import sampling_rows
from support.messages import submit_of
from support.scheduler_audit import check

_IDS = itertools.count(1)


def submit(prompt: Sequence[int], max_tokens: int = 16, **fields: object) -> Submit:
    """A request, greedy by default."""
    return submit_of(
        id=next(_IDS).to_bytes(16, "big"),
        prompt=np.array(prompt, np.int32).tobytes(),
        max_tokens=max_tokens,
        **({"temperature": 0.0, "seed": 0} | fields),
    )


@dataclass
class Scores:
    """Log-probabilities at consecutive positions."""

    chosen: list[float] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)

    def add(self, message: TokenLogprobs) -> None:
        chosen = np.frombuffer(message.chosen, "<f4")
        ids = np.frombuffer(message.top_ids, "<i4").reshape(len(chosen), -1).tolist()
        values = np.frombuffer(message.top, "<f4").reshape(len(chosen), -1).tolist()
        self.chosen += chosen.tolist()
        self.tops += [dict(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    cached: int = 0
    scores: Scores = field(default_factory=Scores)
    prompt_scores: Scores = field(default_factory=Scores)


class Model:
    """A model in transformers, one sequence at a time."""

    def __init__(self, checkpoint: Path, eos_token_ids: Sequence[int] = ()) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._eos = set(eos_token_ids)
        self._cache: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[vocab] after the last of `tokens`."""
        key = tuple(tokens)
        if key not in self._cache:
            self._cache[key] = self._model(torch.tensor([tokens])).logits[0, -1]
        return self._cache[key]

    def answer(self, request: Submit) -> Answer:
        prompt = np.frombuffer(request.prompt, np.int32).tolist()
        answer = defined_answer(request, lambda output: self.logits([*prompt, *output]), self._eos)
        if request.params.prompt_logprobs is not None:
            for i in range(1, len(prompt)):
                _score(self.logits(prompt[:i]), prompt[i], request.params.prompt_logprobs, answer.prompt_scores)
        return answer


def defined_answer(request: Submit, logits_after: Callable[[list[int]], torch.Tensor], eos: set[int]) -> Answer:
    """Answer by the definition, token by token, from the logits [vocab] after each output so far."""
    prompt = np.frombuffer(request.prompt, np.int32).tolist()
    answer = Answer()
    ends = set(request.params.stop_token_ids) | (set() if request.params.ignore_eos else eos)
    while answer.finish is None:
        raw = logits_after(answer.tokens)
        logits = _controlled(raw, request, prompt, answer.tokens, ends, eos)
        token = _sample(logits, request, len(prompt) + len(answer.tokens))
        if request.params.logprobs is not None:
            _score(raw, token, request.params.logprobs, answer.scores, request.params.logprob_token_ids)
        answer.tokens.append(token)
        if token in ends:
            answer.finish = "stop"
        elif len(answer.tokens) == request.params.max_tokens:
            answer.finish = "length"
    return answer


def _controlled(
    raw: torch.Tensor, request: Submit, prompt: list[int], output: list[int], ends: set[int], eos: set[int]
) -> torch.Tensor:
    logits, params = raw.tolist(), request.params
    if len(output) < params.min_tokens and not request.is_constrained:
        for token in ends:
            logits[token] = -1e30
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in {*prompt, *output}:
        value = logits[token]
        logits[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token in set(output):
        logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if request.is_constrained:
        allowed = allowed_tokens(request, output, len(logits), eos)
        logits = [logit if token in allowed else -1e30 for token, logit in enumerate(logits)]
    return torch.tensor(logits)


def _sample(logits: torch.Tensor, request: Submit, position: int) -> int:
    rows = sampling_rows(
        1,
        temperature=request.params.temperature,
        top_k=request.params.top_k,
        top_p=request.params.top_p,
        min_p=request.params.min_p,
        seeds=[request.params.seed or 0],
        positions=[position],
    )
    limits = None if request.params.temperature == 0 else top_k_top_p_thresholds(logits[None], rows)
    return int(sample(logits[None], rows, 0, limits)[1])


def _score(raw: torch.Tensor, token: int, tops: int, scores: Scores, named: Sequence[int] = ()) -> None:
    logprobs = torch.log_softmax(raw, -1)
    values, ids = logprobs.topk(tops)
    if named:
        ids = torch.tensor(named)
        values = logprobs[ids]
    scores.chosen.append(float(logprobs[token]))
    scores.tops.append(dict(zip(ids.tolist(), values.tolist(), strict=True)))


class Serving:
    """A scheduler in front of a real engine."""

    def __init__(
        self, engine: Engine, *, overlap: bool = True, max_step_tokens: int = 64, cache: str = "radix"
    ) -> None:
        self.scheduler = Scheduler(
            scheduler_config(
                EngineConfig(
                    model="",
                    max_step_tokens=max_step_tokens,
                    overlap=overlap,
                    cache=cache,  # type: ignore[arg-type]
                    audit=True,
                ),
                engine.limits,
            ),
            compiler=cast(ConstraintCompiler, ToyGrammars(engine.limits.vocab_size, at_once=True)),
        )
        self._loop = StepLoop(self.scheduler, engine)

    def answers(self, requests: Sequence[Submit]) -> list[Answer]:
        """Serve the requests together."""
        answers = {request.id: Answer() for request in requests}
        for request in requests:
            self.scheduler.submit(request)
        while self.scheduler.has_work:
            output = self._loop.step()
            check(self.scheduler)
            if output is not None:
                _take(output, answers)
        return list(answers.values())


def _take(output: StepOutput, answers: dict[bytes, Answer]) -> None:
    assert not output.failures
    for _, message in output.prompt_logprobs:
        answer = answers[message.id]
        assert not answer.tokens, "the prompt comes before the answer"
        assert message.start == len(answer.prompt_scores.chosen) + 1, "a prompt token's score was lost or came twice"
        answer.prompt_scores.add(message.logprobs)
    for row, token in enumerate(output.tokens.tolist()):
        answer = answers[output.ids[row].tobytes()]
        answer.tokens.append(token)
        answer.finish = FINISH_REASONS[int(output.finish[row])]
        answer.cached = int(output.cached[row])
        if row in output.logprobs:
            answer.scores.add(output.logprobs[row])


def assert_same(actual: Answer, expected: Answer) -> None:
    """Check for equal tokens, and for log-probabilities that are equal but for rounding."""
    assert actual.tokens == expected.tokens
    assert actual.finish == expected.finish
    for ours, theirs in ((actual.scores, expected.scores), (actual.prompt_scores, expected.prompt_scores)):
        np.testing.assert_allclose(ours.chosen, theirs.chosen, rtol=0, atol=1e-4)
        assert len(ours.tops) == len(theirs.tops)
        for top, wanted in zip(ours.tops, theirs.tops, strict=True):
            assert len(top) == len(wanted)
            np.testing.assert_allclose(list(top.values()), list(wanted.values()), rtol=0, atol=1e-4)
            for token in set(top) & set(wanted):
                assert abs(top[token] - wanted[token]) < 1e-4
            # Tokens of equal probability may change places at the end of the list.
            assert len(set(top) & set(wanted)) >= len(wanted) - 1
