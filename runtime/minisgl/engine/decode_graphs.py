"""CUDA graphs of pure decode steps: embed, layers, head, sample, and write the next input token, in one launch."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from minisgl.attention.batch import AttentionBatch
from minisgl.attention.paged import PagedAttention
from minisgl.engine.batch import PackedStep
from minisgl.engine.runner import Runner
from minisgl.wire.plan import PARAM_COLUMNS, StepPlan


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes that get a graph, up to and with `largest`; dense, so that few rows are padding."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, *range(24, 257, 8), *range(272, 513, 16), *range(544, largest, 32)]
    return sorted({size for size in sizes if size < largest} | {largest}) if largest else []


class DecodeGraph:
    """One captured step of `size` rows. It reads its rows at the beginning of the upload buffer."""

    def __init__(self, runner: Runner, attention: PagedAttention, size: int, upload: torch.Tensor, pool: Any) -> None:
        """Run once to load and tune kernels, then capture, on the current stream. Every row is the dummy one."""
        self.size = size
        self._attention = attention
        packed = PackedStep(_no_rows(), runner.tables, size)
        host = np.empty(packed.size, np.int32)
        packed.write(host)
        upload[: packed.size].copy_(torch.from_numpy(host))
        step = packed.view(upload)
        batch = runner.attention_batch(packed, step)
        attention.prepare(batch)
        runner.sample(runner.logits(packed, step, batch, attention), step)
        torch.cuda.current_stream().synchronize()

        self._graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog) may call CUDA meanwhile: only this one is held to what a capture allows.
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            logits = runner.logits(packed, step, batch, attention)
            self.tokens = runner.sample(logits, step)
            """[size] int32, valid until the next replay."""
        finally:
            self._graph.capture_end()
        # Not owned: graphs are replayed one at a time, so all of them may put their logits in the same memory.
        self.logits = _borrow(logits)
        """[size, vocab_local], valid until the next replay of any graph."""

    def replay(self, batch: AttentionBatch) -> None:
        self._attention.prepare(batch)
        self._graph.replay()


class DecodeGraphs:
    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._graphs: dict[int, DecodeGraph] = {}

    def capture(
        self, runner: Runner, sizes: list[int], upload: torch.Tensor, progress: Callable[[float], None]
    ) -> None:
        """Largest first, so that the smaller ones find room in the memory of the larger."""
        pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(sorted(sizes, reverse=True), 1):
            attention = runner.attention.for_graph(size)
            if attention is None:
                return
            self._graphs[size] = DecodeGraph(runner, attention, size, upload, pool)
            progress(done / len(sizes))
        self._sizes = sorted(self._graphs)

    def find(self, plan: StepPlan) -> DecodeGraph | None:
        """The smallest graph that holds the step; None: it must run eagerly."""
        if len(plan.prefill_slots) or not len(plan.decode_slots):
            return None
        index = bisect.bisect_left(self._sizes, len(plan.decode_slots))
        return None if index == len(self._sizes) else self._graphs[self._sizes[index]]

    def clear(self) -> None:
        """Graphs hold on to NCCL's communicator: they go before the group does."""
        self._sizes.clear()
        self._graphs.clear()


def _no_rows() -> StepPlan:
    empty = np.empty(0, np.int32)
    return StepPlan.build(
        epoch=0,
        step=0,
        decode_slots=empty,
        decode_positions=empty,
        prefill_slots=empty,
        prefill_starts=empty,
        prefill_lengths=empty,
        prefill_sample=empty,
        prefill_tokens=empty,
        page_updates=np.empty((3, 0), np.int32),
        new_rows=np.empty((PARAM_COLUMNS, 0), np.int32),
        poison_pages=empty,
    )


class _Memory:
    """Device memory that somebody else owns, as an array of bytes."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _borrow(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor at the same place that does not keep the memory from being used again."""
    assert tensor.is_contiguous()
    memory = torch.as_tensor(_Memory(tensor.data_ptr(), tensor.nbytes), device=tensor.device)
    return memory.view(tensor.dtype).view(tensor.shape)
