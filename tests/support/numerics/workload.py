"""Requests of a case: the probe, and other requests that disturb it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from minisgl.config import Device, DType, EngineConfig, SchedulerConfig
from minisgl.models.config import ModelConfig
from minisgl.wire.messages import SamplingParams
from support.numerics.cases import Case

VOCAB: Final = 576
ANSWER: Final = 64
"""Tokens that the probe generates."""
_PROMPT: Final = 80
_SHARED: Final = 70
"""Number of tokens that the probe's prompt shares with an earlier request: more than the largest page."""
_OTHERS: Final = 32
_RECURRENT: Final = ("qwen3-next", "qwen3.5", "granite4", "lfm2", "nemotron-h")
"""Beginnings of the names of architectures with recurrent states."""
GREEDY: Final = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    after: int = -1
    """Number of tokens of the probe after which the request is submitted; −1: at the start."""
    sampling: SamplingParams = GREEDY
    """Sampling parameters; only those that select tokens, and `stop_token_ids`, are used."""


@dataclass(frozen=True)
class Workload:
    probe: int
    """Index into `asks`."""
    asks: tuple[Ask, ...]
    """Requests in the order in which they are submitted."""
    earlier: tuple[Ask, ...] = field(default=())
    """Requests that are served completely before the others."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(ask.prompt) + ask.max_tokens for ask in (*self.earlier, *self.asks))

    def pages(self, page: int) -> int:
        """Number of pages with which no request ever waits for pages of another."""
        return sum(-(-(len(ask.prompt) + ask.max_tokens) // page) for ask in (*self.earlier, *self.asks))


def workload(case: Case, sampling: SamplingParams = GREEDY) -> Workload:
    """Build the requests of a case. `sampling` is for the probe; if it is not greedy, half of the others sample as
    well, with their own seeds."""
    prompt = _prompt(VOCAB - 1, _PROMPT)
    # The request that runs last is preempted: lowest priority, then latest arrival.
    rank = int(case.preemption)
    if case.company == "others":
        before, after = _before(case), _after(case)
    elif case.preemption:
        # A request that has the pool to itself is never preempted, so "alone" means with one rival in this case. It
        # arrives while the probe generates, fits beside it, and outgrows the rest of the pool.
        before, after = [], [Ask(_prompt(0, 8), ANSWER, rank, after=4)]
    else:
        before, after = [], []
    if sampling != GREEDY:
        before, after = _sampled(before), _sampled(after)
    asks = (*before, Ask(prompt, ANSWER, sampling=sampling), *after)
    # Recurrent states are kept where the second of two prompts parts from the first.
    others = 0 if case.prefix != "hit" else 2 if case.arch.startswith(_RECURRENT) else 1
    earlier = (Ask(prompt[:_SHARED] + _prompt(other, _PROMPT - _SHARED), 4) for other in range(others))
    return Workload(len(before), asks, tuple(earlier))


def cached_tokens(case: Case) -> int:
    """Number of prompt tokens that the probe must find in the cache: whole pages of the shared part."""
    return _SHARED // case.page * case.page if case.prefix == "hit" else 0


def _before(case: Case) -> list[Ask]:
    """First half of the others, ahead of the probe. They generate until the probe has started, with any chunk size."""
    lengths = [45] + [(3, 5, 8)[i % 3] for i in range(1, _OTHERS // 2)]
    asks = []
    for i, length in enumerate(lengths):
        steps = (sum(lengths[i:]) + _PROMPT) // _prefill_speed(case)
        asks.append(Ask(_prompt(i, length), steps + _stay(case, i), int(case.preemption)))
    return asks


def _after(case: Case) -> list[Ask]:
    """Second half of the others, which arrive while the probe generates: short enough to join in time at one token per
    step."""
    return [
        Ask(_prompt(i, (3, 3, 5)[i % 3]), _stay(case, i), int(case.preemption), after=1 + i - _OTHERS // 2)
        for i in range(_OTHERS // 2, _OTHERS)
    ]


def _stay(case: Case, i: int) -> int:
    """Number of tokens that another request generates beside the probe: mixed, and long where the pool must run out."""
    hungry = case.preemption and _prefill_speed(case) > 1
    return (48 if hungry else 8) + i * 11 % 40


def _prefill_speed(case: Case) -> int:
    """Number of prompt tokens in a step beside many decode rows, which leave only one token of a small budget."""
    return case.budget if case.budget > _OTHERS else 1


def _prompt(first: int, length: int) -> tuple[int, ...]:
    """Random tokens behind `first`, by which prompts differ from the start."""
    draw = random.Random(first)
    return (first, *(int(draw.random() * VOCAB) for _ in range(length - 1)))


def _sampled(asks: list[Ask]) -> list[Ask]:
    return [
        Ask(a.prompt, a.max_tokens, a.priority, a.after, SamplingParams(temperature=0.9, top_p=0.9, seed=i))
        if i % 2
        else a
        for i, a in enumerate(asks)
    ]


def scheduler_config(
    case: Case, work: Workload, num_pages: int, checkpoint: Path, device: Device = "cpu", dtype: DType = "auto"
) -> SchedulerConfig:
    engine = EngineConfig(
        model="",
        device=device,
        dtype=dtype,
        page_size=case.page,
        max_running=_OTHERS + 1,
        max_step_tokens=case.budget,
    )
    layout = ModelConfig.read(checkpoint).kv_layout(engine, work.longest)
    return SchedulerConfig(
        num_pages=num_pages,
        window=layout.window,
        num_window_pages=layout.window_pages(num_pages),
        state_checkpoints=layout.state_checkpoints(num_pages) if layout.state_bytes else None,
        checkpoints_per_row=layout.checkpoints_per_row,
        page_size=case.page,
        max_running=_OTHERS + 1,
        max_model_len=work.longest,
        vocab_size=VOCAB,
        max_step_tokens=case.budget,
        overlap=case.overlap,
        cache="naive" if case.prefix == "naive" else "radix",
        audit=True,
    )


def engine_config(
    checkpoint: Path, config: SchedulerConfig, device: Device = "cpu", dtype: DType = "auto"
) -> EngineConfig:
    return EngineConfig(
        model=str(checkpoint),
        device=device,
        dtype=dtype,
        page_size=config.page_size,
        num_pages=config.num_pages,
        max_running=config.max_running,
        max_model_len=config.max_model_len,
        max_step_tokens=config.max_step_tokens,
        audit=True,
    )
