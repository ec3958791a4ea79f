"""Memory of a step besides weights and pool, measured by running the largest step."""

from __future__ import annotations

import torch

from minisgl.engine.batch import PackedStep, dummy_plan
from minisgl.engine.runner import Runner


def measure_step(runner: Runner, *, max_step_tokens: int, max_running: int, max_model_len: int) -> int:
    """Peak bytes of an eager step with `max_step_tokens` prompt tokens and the maximum number of sampled rows.

    All rows have the dummy slot, so the step needs no page of the pool; its tokens are arbitrary.
    """
    segments = min(max_running, max_step_tokens)
    lengths = [max_step_tokens // segments] * segments
    lengths[0] += max_step_tokens % segments
    prompts = [min(length, max_model_len) for length in lengths]
    plan = dummy_plan(runner.tables.dummy_slot, prompts=prompts)
    device = runner.tables.page_table.device
    packed = PackedStep(plan, runner.tables)
    host = packed.on_host()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode():
        runner.run(plan, packed, packed.view(host.to(device)))
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
