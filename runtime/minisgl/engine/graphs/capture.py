"""Capture of a step's work as a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from minisgl.attention.cascade import CascadeLayout
from minisgl.engine.batch import DeviceStep, PackedStep, StepSize
from minisgl.engine.tables import Tables
from minisgl.wire.plan import StepPlan


def padding_step(
    tables: Tables, size: StepSize, cascade: CascadeLayout | None, upload: torch.Tensor
) -> tuple[PackedStep, DeviceStep]:
    """A step of `size` whose rows all have the dummy slot, at the beginning of the `upload` buffer, where steps that
    replay a graph have their inputs."""
    packed = PackedStep(StepPlan.build(epoch=0, step=0), tables, size, cascade)
    upload[: packed.size].copy_(packed.on_host())
    return packed, packed.view(upload)


@contextmanager
def captured(pool: Any = None) -> Iterator[torch.cuda.CUDAGraph]:
    """Context whose work on the current stream becomes the graph. The work must have run once before, so that its
    kernels are loaded. `pool`: memory pool of the graph; None: one of its own."""
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads (NCCL's watchdog) may call CUDA meanwhile: only this thread must obey the rules of a capture.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield graph
    finally:
        graph.capture_end()
