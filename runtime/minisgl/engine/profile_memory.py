"""Measure what a step takes besides weights and pool, by running the largest one."""

from __future__ import annotations

import numpy as np
import torch

from minisgl.engine.batch import PackedStep
from minisgl.engine.runner import Runner
from minisgl.wire.plan import StepPlan


def measure_step(runner: Runner, *, max_step_tokens: int, max_running: int, max_model_len: int) -> int:
    """Peak bytes of an eager step with `max_step_tokens` prompt tokens and as many sampled rows as there can be.

    All its rows are the dummy one, so it needs no page of the pool; its tokens mean nothing.
    """
    segments = min(max_running, max_step_tokens)
    lengths = np.full(segments, max_step_tokens // segments, np.int32)
    lengths[0] += max_step_tokens - lengths.sum()
    np.minimum(lengths, max_model_len, out=lengths)
    plan = StepPlan.build(
        epoch=0,
        step=0,
        prefill_slots=np.full(segments, runner.tables.dummy_slot, np.int32),
        prefill_starts=np.zeros(segments, np.int32),
        prefill_lengths=lengths,
        prefill_sample=np.ones(segments, np.int32),
        prefill_tokens=np.zeros(lengths.sum(), np.int32),
    )
    device = runner.tables.page_table.device
    packed = PackedStep(plan, runner.tables)
    host = np.empty(packed.size, np.int32)
    packed.write(host)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode():
        runner.run(plan, packed, packed.view(torch.from_numpy(host).to(device)))
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
