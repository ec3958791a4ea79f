"""Warm-up: every kind of step once, so that no kernel is compiled while requests wait.

A start runs it on the device; `rehearsal` runs it on tensors without memory, to compile the launched kernels ahead of
time. A few layers are enough, since the others launch the same kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from minisgl.engine.start.dummy_steps import PLAIN, Sampling, StepLimits, dummy_plan
from minisgl.wire.plan import StepPlan

_TOKENS: Final = (1, 2, 3, 5, 9, 17, 33, 65, 129, 193, 257, 513, 1025, 2049)
"""Tokens of a step: matrix products and experts have kernels of their own for few tokens, and larger tiles for more.
Odd numbers, so that the parts of a step's inputs are not aligned."""
_ROWS: Final = (1, 2, 5, 9, 17)
"""Decode rows: attention and sampling have other kernels for few rows."""
_LONG_ROWS: Final = (1, 2)
"""Decode rows with long contexts: only few rows have another kernel for them."""
_ALL: Final = Sampling(filters=True, penalties=True, lists=True, masks=True, logprobs=True)
_SAMPLINGS: Final = (
    *([Sampling(filters=True)], [Sampling(penalties=True)], [Sampling(lists=True)]),
    *([Sampling(masks=True)], [Sampling(logprobs=True)]),
    *([_ALL], [PLAIN, _ALL, Sampling(filters=True)]),
)
_DRAFT_SAMPLINGS: Final = (
    [Sampling(filters=True)],
    [Sampling(lists=True)],
    [Sampling(logprobs=True)],
    [PLAIN, Sampling(filters=True, lists=True, logprobs=True)],
)
"""Of rows with drafts, which have no penalties or masks."""

_TEXT_TOKENS: Final = (1, 2, 5, 17, 33, 65, 129, 257, 513, 1025, 2049)
"""Tokens of a text: other numbers of rows may have other kernels."""


def text_plans(max_model_len: int, max_running: int, max_step_tokens: int) -> Iterator[StepPlan]:
    """Plans with texts that reach all kernels of a model that computes whole texts; the last one is the largest."""
    largest = [max_model_len] * min(max(max_step_tokens // max_model_len, 1), max_running)
    for lengths in (*([n] for n in _TEXT_TOKENS if n <= max_model_len), [min(40, max_model_len), 1], largest):
        yield plan_of_texts(lengths)


def plan_of_texts(lengths: Sequence[int]) -> StepPlan:
    """A step of whole texts."""
    return StepPlan.build(
        epoch=0,
        step=0,
        prefill_slots=np.arange(len(lengths), dtype=np.int32),
        prefill_starts=np.zeros(len(lengths), np.int32),
        prefill_lengths=np.array(lengths, np.int32),
        prefill_sample=np.ones(len(lengths), np.int32),
        prefill_tokens=np.zeros(sum(lengths), np.int32),
    )


def warm_up_plans(limits: StepLimits) -> Iterator[StepPlan]:
    """Plans that reach all kernels of an engine's steps. All rows read and write the dummy page; their slots have the
    parameters of a new table afterwards."""
    for tokens in _TOKENS:
        yield dummy_plan(limits, prompts=[tokens])
    yield dummy_plan(limits, prompts=[40, 1])
    yield dummy_plan(limits, prompts=[40, 30], start=limits.page_size, sample=False)
    # Attention may have another backend for few queries behind a long prefix.
    yield dummy_plan(limits, prompts=[1], start=limits.max_model_len)
    for rows in _ROWS:
        yield dummy_plan(limits, decode=rows, prompts=[40])
        yield dummy_plan(limits, decode=rows, prompts=[40], start=limits.page_size)
    for rows in _LONG_ROWS:
        yield dummy_plan(limits, decode=rows, long=True)
        yield dummy_plan(limits, decode=rows, prompts=[40], long=True)
    for prompts in ([], [40]):
        yield dummy_plan(limits, decode=limits.max_running, prompts=prompts, shared=True)
    if limits.decode_rows > limits.max_running:
        yield dummy_plan(limits, drafts=True)
        for sampling in _DRAFT_SAMPLINGS:
            yield dummy_plan(limits, drafts=True, sampling=sampling)
        yield dummy_plan(limits, decode=limits.max_running, sampling=[PLAIN])
    for rows in (*_ROWS, limits.max_running):
        yield dummy_plan(limits, decode=rows)
        for sampling in _SAMPLINGS:
            yield dummy_plan(limits, decode=rows, sampling=sampling)
        yield dummy_plan(limits, decode=rows, sampling=[PLAIN])
    for sampling in _SAMPLINGS:
        yield dummy_plan(limits, prompts=[40, 30], sampling=sampling)
    yield dummy_plan(limits, decode=limits.max_running, sampling=[PLAIN])
