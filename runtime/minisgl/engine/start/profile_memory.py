"""Memory of a step besides weights and pool, measured by running the largest step."""

from __future__ import annotations

import torch

from minisgl.engine.runner import Runner
from minisgl.engine.start.dummy_steps import StepLimits, dummy_plan, run_eagerly


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
