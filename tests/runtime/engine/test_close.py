"""A closed engine frees its memory, even while a reference to the engine remains."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.engine import create_engine
from support.plans import Segment, make_plan, new_row


@pytest.mark.parametrize("collected", [True, False])
def test_close_frees_weights_and_pool(checkpoint: Path, collected: bool) -> None:
    torch.set_num_threads(1)
    engine = create_engine(EngineConfig(model=str(checkpoint), page_size=4, num_pages=16, max_running=2))
    assert isinstance(engine, CpuEngine)
    handle = engine.launch(make_plan(0, prefill=[Segment(0, 0, [3, 4, 5])], pages=[(0, 0, 7)], rows=[new_row(0)]))
    if collected:
        engine.collect(handle)
    [kv], model = engine.runner.kv.groups, engine.runner._model
    left = [
        weakref.ref(tensor)
        for tensor in (kv.keys, kv.values, model.embedding.weight, model.layers[0].attention.qkv.weight.values)
    ]
    del kv, model
    # Immediately, without a garbage collection: the next engine measures the free memory.
    gc.disable()
    try:
        engine.close()
        assert [reference() for reference in left] == [None] * len(left)
    finally:
        gc.enable()
    assert engine.limits.num_pages == 16 and engine.stats.steps == 1
