"""A draft head on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.engine.cuda_engine import CudaEngine
from minisgl.kernels.attention.block_attention import block_attention
from minisgl.kernels.attention.block_contexts import Contexts
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.process import scheduler_config
from minisgl.scheduler.scheduler import Scheduler
from support.engines import create_engine
from support.messages import submit_of
from support.numerics.gpu_engine import engine_config
from support.speculation import same_number
from support.tiny_drafter import CONSTANT, write_copying_pair


@pytest.mark.parametrize("lengths", [(1000,), (0, 63, 64, 65, 500), (300,) * 100])
@pytest.mark.parametrize("group", [1, 4, 5])
def test_blocks_attend_as_in_torch(lengths: tuple[int, ...], group: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, tokens, heads, size = len(lengths), 16, 8, 128
    per_row = -(-max(lengths) // 64)
    table = torch.randperm(rows * per_row, generator=generator).int().view(rows, per_row)
    slots = torch.arange(rows, dtype=torch.int32).flip(0)
    of_slots = torch.tensor(lengths, dtype=torch.int32).flip(0)
    pools = torch.randn(2, rows * per_row, 64, heads, size, generator=generator).bfloat16()
    parts = torch.randn(rows * tokens, (group + 2) * heads, size, generator=generator).bfloat16()
    found = []
    for device in ("cpu", "cuda"):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        q, k, v = parts.to(device, dtype).split([group * heads, heads, heads], 1)
        keys, values = pools.to(device, dtype)
        contexts = Contexts(table.to(device), slots.to(device), of_slots.to(device))
        found.append(block_attention(q, k, v, keys, values, contexts, size**-0.5).float().cpu())
    torch.testing.assert_close(found[1], found[0], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("rows", [1, 3, 7])
@pytest.mark.parametrize("captured", [True, False])
def test_drafts_that_are_right_are_accepted(rows: int, captured: bool, tmp_path: Path) -> None:
    target, head = write_copying_pair(tmp_path, hidden=256, heads=4, kv_heads=2, head_dim=128)
    graphs = {} if captured else {"cuda_graph_max_batch": 0}
    config = engine_config(target, max_running=16, num_pages=512, draft_model=str(head), **graphs)
    engine = create_engine(config)
    assert isinstance(engine, CudaEngine)
    scheduler = Scheduler(scheduler_config(config, engine.limits))
    scheduler.drafts._numbers = same_number(7)  # type: ignore[method-assign, assignment]
    loop = StepLoop(scheduler, engine)
    for row in range(rows):
        prompt = np.random.default_rng(row).permutation(500)[: 20 + 30 * row].astype(np.int32)
        submit = submit_of(
            id=bytes([row]) * 16, prompt=prompt.tobytes(), max_tokens=64, seed=0, temperature=0.0, ignore_eos=True
        )
        scheduler.submit(submit)
    while scheduler.has_work:
        if (output := loop.step()) is not None:
            assert not output.failures
            assert set(output.tokens.tolist()) <= {CONSTANT}
    assert scheduler.counters.accepted_draft_tokens > 40 * rows
    # Drafts behind the end of an answer do not count.
    assert scheduler.counters.accepted_draft_tokens > 0.8 * scheduler.counters.draft_tokens
    engine.close()
