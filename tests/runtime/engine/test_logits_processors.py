"""Penalties, biases, minimum lengths, constraints and log-probabilities, against transformers' logits and the
definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.engine import create_engine
from minisgl.engine.interface import EngineLimits, EngineStats
from minisgl.wire.messages import Submit, Thinking
from minisgl.wire.plan import IntArray, StepPlan, StepResult
from support.constrained import ToyGrammar
from support.messages import with_params
from support.numerics.logits_processors import Model, Serving, assert_same, submit

PROMPT = np.random.default_rng(5).integers(3, 500, 11).tolist() * 2
"""Holds every token twice, so that repetition counts presence, not occurrences."""


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    config = EngineConfig(model=str(checkpoint), page_size=4, num_pages=64, max_running=2)
    engine = create_engine(config)
    model = Model(checkpoint, engine.limits.eos_token_ids)
    engine.close()
    return model


@pytest.fixture(scope="module")
def plain(model: Model) -> list[int]:
    """The greedy answer without processors."""
    return model.answer(submit(PROMPT)).tokens


@pytest.fixture(scope="module")
def requests(model: Model, plain: list[int]) -> list[Submit]:
    """Each processor with values that change the answer, alone and together."""
    # Fourth token of the answer when its most likely second token is masked.
    detour = model.answer(submit(PROMPT, stop_token_ids=(plain[1],), min_tokens=2)).tokens[3]
    chosen: dict[str, Any] = {"logit_bias": {plain[0]: -100.0, 40: 1.5}}
    fields: list[dict[str, Any]] = [
        {},
        {"presence_penalty": 0.5},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 0.3},
        {"frequency_penalty": -1.0},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.6},
        {"logit_bias": {plain[0]: -100.0}},
        {"logit_bias": {77: 100.0, 78: 100.5}},
        {"stop_token_ids": (plain[1],)},
        {"stop_token_ids": (plain[1], detour), "min_tokens": 2},
        {"stop_token_ids": (plain[1], detour), "min_tokens": 9},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3, **chosen},
        {"temperature": 0.8, "seed": 5, "presence_penalty": 2.0, "logprobs": 2},
        {"temperature": 0.8, "seed": 5, "top_k": 7, "top_p": 0.9},
        {"temperature": 0.8, "seed": 5, "top_k": 7, "top_p": 0.9, "repetition_penalty": 1.5, "logprobs": 1},
        {"temperature": 1.2, "seed": 6, "min_p": 0.05, "frequency_penalty": 1.5, **chosen, "min_tokens": 8},
        {"logprobs": 0},
        {"logprobs": 5, "ignore_eos": True, "min_tokens": 4},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 3, "logprobs": 1, "presence_penalty": 1.5, "min_tokens": 2},
        {"allowed_token_ids": tuple(range(3, 500, 5)), "temperature": 0.8, "seed": 5, "top_p": 0.9, "logprobs": 2},
        {"bad_words": ((plain[0],), (plain[1],), (plain[2], plain[3]))},
        {"grammar": ToyGrammar(factor=3, length=60, least=60).text},
        {
            "grammar": ToyGrammar(factor=7, length=60, least=2).text,
            **{"temperature": 1.2, "seed": 6, "min_p": 0.01, "repetition_penalty": 1.5, "min_tokens": 8, "logprobs": 1},
        },
        {"grammar": ToyGrammar(factor=5, length=60, least=2).text, "temperature": 0.8, "seed": 7, "top_k": 9},
        {"logprobs": 0, "logprob_token_ids": (40, 5, 499, 77)},
        {"logprobs": 3, "logprob_token_ids": (7,), "temperature": 0.8, "seed": 9, "top_k": 5, "prompt_logprobs": 2},
        {
            "thinking": Thinking(start=(70,), end=(71, 72), is_open=True, budget=3),
            "grammar": ToyGrammar(factor=2, length=60, least=60).text,
            **{"logit_bias": {73: 1.5}, "prompt_logprobs": 1, "frequency_penalty": 0.3},
        },
    ]
    return [submit(PROMPT, **each) for each in fields]


def _again(requests: list[Submit]) -> list[Submit]:
    return [msgspec.structs.replace(request, id=submit([1]).id) for request in requests]


def test_each_processor_changes_the_answer(model: Model, requests: list[Submit]) -> None:
    answers = [tuple(model.answer(request).tokens) for request in requests[:17]]
    assert [index for index, answer in enumerate(answers) if answer in answers[:index]] == []


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("budget", [3, 64])
def test_answers_match_the_definition(
    start: Callable[..., CpuEngine], model: Model, requests: list[Submit], overlap: bool, budget: int
) -> None:
    """In one batch, with prompts in one piece and in pieces of three tokens; then again with a warm prefix cache."""
    serving = Serving(start(num_pages=256, max_running=32), overlap=overlap, max_step_tokens=budget)
    for turn in range(2):
        again = _again(requests)
        for request, answer in zip(again, serving.answers(again), strict=True):
            assert_same(answer, model.answer(request))
            assert answer.cached == 0 or request.params.prompt_logprobs is None
            if turn == 1 and request.params.prompt_logprobs is None:
                assert answer.cached == 20


@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_a_preempted_request_keeps_its_history(
    start: Callable[..., CpuEngine], model: Model, requests: list[Submit], cache: str
) -> None:
    """Two requests fit together until they grow; then the later one is preempted."""
    engine = start(num_pages=24, max_running=2, max_model_len=64)
    for request in _again(requests):
        longer = with_params(request, max_tokens=36, ignore_eos=True)
        # A new one each time: a scheduler that has preempted admits more cautiously.
        serving = Serving(engine, max_step_tokens=9, cache=cache)
        answer = serving.answers([submit(range(3, 25), 36, ignore_eos=True), longer])[1]
        assert_same(answer, model.answer(longer))
        assert len(answer.tokens) < 36 or serving.scheduler.counters.preemptions > 0


def test_an_answer_continues_behind_an_earlier_output(
    start: Callable[..., CpuEngine], model: Model, requests: list[Submit]
) -> None:
    """Output of an earlier engine counts as generated; log-probabilities of the prompt are not repeated."""
    requests = [with_params(request, ignore_eos=True, stop_token_ids=()) for request in requests]
    whole = [model.answer(request) for request in requests]
    resumed = [
        msgspec.structs.replace(request, output=np.array(answer.tokens[:2], np.int32).tobytes())
        for request, answer in zip(_again(requests), whole, strict=True)
    ]
    serving = Serving(start(num_pages=256, max_running=32))
    for expected, answer in zip(whole, serving.answers(resumed), strict=True):
        assert answer.tokens == expected.tokens[2:]
        assert answer.finish == expected.finish
        assert answer.prompt_scores.chosen == []
        np.testing.assert_allclose(answer.scores.chosen, expected.scores.chosen[2:], atol=1e-4)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "constraint",
    [{}, {"allowed_token_ids": (*range(500), 514)}, {"grammar": ToyGrammar(factor=1, length=60, least=1).text}],
    ids=["free", "allowed tokens", "grammar"],
)
@pytest.mark.parametrize("is_eos", [False, True])
def test_min_tokens_counts_the_tokens_before_a_loss(
    start: Callable[..., CpuEngine], model: Model, overlap: bool, constraint: dict[str, Any], is_eos: bool
) -> None:
    """The token that ends the answer is the most likely one at each position."""
    engine = start(num_pages=256)
    end = engine.limits.eos_token_ids[0] if is_eos else 77
    fields = {"stop_token_ids": () if is_eos else (end,), "logit_bias": {end: 100.0}, "min_tokens": 5, **constraint}
    whole = model.answer(submit(PROMPT, **fields))
    assert (len(whole.tokens), whole.tokens[5], whole.finish) == (6, end, "stop")
    lost_at = [1, 2, 4, 5]
    outputs = [np.array(whole.tokens[:count], np.int32).tobytes() for count in lost_at]
    resumed = Serving(engine, overlap=overlap).answers([submit(PROMPT, output=output, **fields) for output in outputs])
    assert [answer.tokens for answer in resumed] == [whole.tokens[count:] for count in lost_at]
    assert [answer.finish for answer in resumed] == ["stop"] * len(lost_at)


def test_a_row_drops_the_processors_of_the_previous_request(
    start: Callable[..., CpuEngine], model: Model, requests: list[Submit]
) -> None:
    serving = Serving(start(max_running=1))
    for request in (requests[12], requests[0], requests[3], requests[0], requests[20], requests[5]):
        [again] = _again([request])
        [answer] = serving.answers([again])
        assert_same(answer, model.answer(again))


def test_prompt_log_probabilities_in_several_pieces(start: Callable[..., CpuEngine], model: Model) -> None:
    prompt = np.random.default_rng(1).integers(3, 500, 300).tolist()
    request = submit(prompt, 2, prompt_logprobs=1, logprobs=0)
    serving = Serving(start(num_pages=256, max_model_len=512), max_step_tokens=400)
    [answer] = serving.answers([request])
    assert_same(answer, model.answer(request))


def test_the_whole_vocabulary_can_be_reported(start: Callable[..., CpuEngine], model: Model) -> None:
    request = submit(PROMPT, 2, logprobs=128, prompt_logprobs=128)
    [answer] = Serving(start()).answers([request])
    assert_same(answer, model.answer(request))


class _Pair:
    """Two ranks in one process, which execute the same plans."""

    def __init__(self, ranks: list[CpuEngine]) -> None:
        self._ranks = ranks
        self.limits: EngineLimits = ranks[0].limits
        self.stats: EngineStats = ranks[0].stats

    def launch(self, plan: StepPlan) -> list[Any]:
        return [rank.launch(StepPlan.decode(plan.encode())) for rank in self._ranks]

    def use_idle_time(self) -> bool:
        return False

    def waits_for_masks(self, handle: list[Any]) -> bool:
        return self._ranks[0].waits_for_masks(handle[0])

    def mask_memory(self, rows: int) -> IntArray:
        return self._ranks[0].mask_memory(rows)

    def sample(self, handle: list[Any], masks: IntArray) -> None:
        self._ranks[0].sample(handle[0], masks)

    def collect(self, handle: list[Any]) -> StepResult:
        first, second = (rank.collect(one) for rank, one in zip(self._ranks, handle, strict=True))
        assert np.array_equal(first.tokens, second.tokens)
        return first

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


@pytest.fixture
def pair(checkpoint: Path, tmp_path: Path) -> Iterator[_Pair]:
    torch.set_num_threads(1)
    configs = [
        EngineConfig(
            model=str(checkpoint),
            page_size=4,
            num_pages=128,
            max_running=32,
            tensor_parallel=2,
            rank=rank,
            rendezvous=f"file://{tmp_path}/rendezvous",
            audit=True,
        )
        for rank in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(create_engine, configs))
    pair = _Pair([rank for rank in ranks if isinstance(rank, CpuEngine)])
    yield pair
    pair.close()


def test_two_ranks_answer_as_one_rank(pair: _Pair, model: Model, requests: list[Submit]) -> None:
    again = _again(requests)
    for request, answer in zip(again, Serving(pair, max_step_tokens=17).answers(again), strict=True):
        assert_same(answer, model.answer(request))
