"""Steps that belong to no request, to warm up an engine and to measure its memory. All of their rows read and write the
dummy page, to which the page tables of new engines refer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from minisgl.engine.batch import PackedStep
from minisgl.engine.runner import Runner
from minisgl.wire.logits_processors import RowLogitsProcessors
from minisgl.wire.messages import MOST_DRAFTS
from minisgl.wire.plan import EMPTY, NO_UPDATES, SAMPLING_COLUMNS, IntArray, StepPlan
from minisgl.wire.shared_prefixes import SharedPrefix, encode_prefixes


class StepLimits(NamedTuple):
    """Limits of the steps of an engine."""

    max_running: int
    max_step_tokens: int
    max_model_len: int
    page_size: int
    dummy_page: int
    dummy_window_page: int | None
    """That of layers with a window; None: there are none."""
    decode_rows: int
    """Most decode rows of a step, those of drafts included."""


class Sampling(NamedTuple):
    """Sampling parameters of a row."""

    filters: bool = False
    """Temperature with top-k, top-p and min-p."""
    penalties: bool = False
    lists: bool = False
    """Biases and masks."""
    masks: bool = False
    """Bitmasks, which the step does not wait for."""
    logprobs: bool = False
    """Log-probabilities of the answer and, where the row begins with its prompt, of that."""


PLAIN: Final = Sampling()


_DECODE_ROWS: Final = (64, 512)


def decode_rows(requests: int) -> int:
    """Most decode rows of an engine that speculates and runs so many requests: at least those of eight with all their
    drafts, and twice the requests up to a number of rows that fills a GPU."""
    least, most = _DECODE_ROWS
    return max(least, requests, min(2 * requests, most))


def step_limits(runner: Runner, *, max_step_tokens: int, max_model_len: int) -> StepLimits:
    """Limits of the steps that `runner` can run."""
    kv = runner.kv
    return StepLimits(
        max_running=runner.tables.dummy_slot,
        max_step_tokens=max_step_tokens,
        max_model_len=max_model_len,
        page_size=kv.page_size,
        dummy_page=kv.dummy_page(in_window=False),
        dummy_window_page=kv.dummy_page(in_window=True) if kv.has_windows else None,
        decode_rows=runner.tables.sampled_rows,
    )


def dummy_plan(
    limits: StepLimits,
    *,
    decode: int = 0,
    drafts: bool = False,
    prompts: Sequence[int] = (),
    start: int = 0,
    sample: bool = True,
    shared: bool = False,
    long: bool = False,
    sampling: Sequence[Sampling] = (),
) -> StepPlan:
    """A step of `decode` rows and of segments of `prompts` tokens each, cut to the limits.

    drafts: as many decode rows as there may be, without prompts: each request has drafts. start: first position of the
    segments. sample: they end their prompts. shared: the decode rows share a page. long: the decode rows have the
    longest context. sampling: all rows join, and have these parameters in turn.
    """
    decode, widths = min(decode, limits.max_running - bool(prompts)), EMPTY
    if drafts:
        width = min(limits.decode_rows // limits.max_running, MOST_DRAFTS + 1)
        widths = np.full(limits.max_running, width, np.int32)
        decode = int(widths.sum())
    start = max(min(start, limits.max_model_len - max(prompts, default=0)), 0)
    longest = limits.max_model_len - start
    lengths = _cut(prompts[: limits.max_running - decode], limits.max_step_tokens - decode, longest)
    rows = (len(widths) or decode) + len(lengths)
    joined = [(slot, sampling[slot % len(sampling)]) for slot in range(rows)] if sampling else []
    position = limits.max_model_len - 1 if long else min(limits.page_size, limits.max_model_len - 1)
    # A row's own token is never shared.
    shared = shared and decode > 0 and position == limits.page_size
    groups = [SharedPrefix(1, np.arange(decode, dtype=np.int32))] if shared else []
    return StepPlan.build(
        epoch=0,
        step=0,
        decode_slots=np.repeat(np.arange(limits.max_running, dtype=np.int32), widths)
        if len(widths)
        else np.arange(decode, dtype=np.int32),
        decode_positions=np.full(decode, position, np.int32),
        prefill_slots=np.arange(rows - len(lengths), rows, dtype=np.int32),
        prefill_starts=np.full(len(lengths), start, np.int32),
        prefill_lengths=np.array(lengths, np.int32),
        prefill_sample=np.full(len(lengths), sample, np.int32),
        prefill_tokens=np.zeros(sum(lengths), np.int32),
        page_updates=np.array([[0], [0], [limits.dummy_page]], np.int32),
        new_rows=np.array([_new_row(slot, each) for slot, each in joined], np.int32).reshape(-1, SAMPLING_COLUMNS).T,
        logits_processors=np.concatenate([EMPTY, *(_processors(slot, each) for slot, each in joined)]),
        shared_prefixes=encode_prefixes(groups),
        widths=widths,
        window_updates=NO_UPDATES
        if limits.dummy_window_page is None
        else np.array([[0], [0], [limits.dummy_window_page]], np.int32),
    )


def run_eagerly(runner: Runner, plan: StepPlan) -> None:
    """Run the step on the current stream, kernel by kernel."""
    cascade = runner.attention.cascade if len(plan.shared_prefixes) else None
    packed = PackedStep(plan, runner.tables, None, None if cascade is None else cascade.layout)
    with torch.inference_mode():
        step = packed.view(packed.on_host().to(runner.tables.page_table.device))
        if not runner.generates:
            runner.run_hidden(packed, step)
            return
        plain = runner.run_model(plan, packed, step)
        if plain.is_late:
            tables = runner.tables.device_processors
            masks = tables.bitmask.new_full((len(step.late_slots), tables.bitmask.shape[1]), -1)
            tables.set_bitmasks(step.late_slots, masks)
        runner.resample(plain)


def _cut(lengths: Sequence[int], tokens: int, longest: int) -> list[int]:
    """The first segments that `tokens` tokens in all can hold, of up to `longest` tokens each."""
    found: list[int] = []
    for length in lengths:
        found.append(min(length, longest, tokens - sum(found)))
    return [length for length in found if length > 0]


def _new_row(slot: int, sampling: Sampling) -> IntArray:
    """Column of `StepPlan.new_rows`."""
    temperature, top_p, min_p = np.array([0.8, 0.9, 0.01] if sampling.filters else [0, 1, 0], np.float32).view(np.int32)
    return np.array([slot, temperature, 20 * sampling.filters, top_p, min_p, 0, 0], np.int32)


def _processors(slot: int, sampling: Sampling) -> IntArray:
    """Part of `StepPlan.logits_processors`, empty for rows without any."""
    if not (sampling.penalties or sampling.lists or sampling.masks or sampling.logprobs):
        return EMPTY
    repetition, others = (1.1, 0.1) if sampling.penalties else (1.0, 0.0)
    listed = np.zeros(int(sampling.lists), np.int32)
    tops = 2 if sampling.logprobs else -1
    return RowLogitsProcessors(
        slot=slot,
        prompt_length=1,
        repetition=repetition,
        frequency=others,
        presence=others,
        # Beyond all positions, so that the mask applies.
        min_tokens=1 << 30,
        logprobs=tops,
        prompt_logprobs=tops,
        prompt_logprobs_from=1,
        masked_ids=listed,
        bias_ids=listed,
        bias_values=listed.astype(np.float32),
        prompt=np.zeros(2, np.int32),
        output=np.zeros(1, np.int32),
        late=sampling.masks,
    ).encode()


def measure_step(runner: Runner, limits: StepLimits) -> int:
    """Peak bytes of an eager step with the maximum number of prompt tokens and of sampled rows."""
    tokens = limits.max_step_tokens
    segments = min(limits.max_running, tokens)
    plan = dummy_plan(limits, prompts=[tokens // segments + tokens % segments, *[tokens // segments] * (segments - 1)])
    device = runner.tables.page_table.device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_eagerly(runner, plan)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
