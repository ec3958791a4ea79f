"""CUDA graphs of pure decode steps: embedding, layers, head, sampling and the next input tokens, in one launch."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import torch

from minisgl.attention.batch import AttentionBatch
from minisgl.attention.cascade import CascadeLayout
from minisgl.attention.paged import PagedAttention
from minisgl.engine.batch import PackedStep
from minisgl.engine.runner import Runner
from minisgl.wire.plan import StepPlan


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes with a graph, up to and including `largest`; dense, so that few rows are padding."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, *range(24, 257, 8), *range(272, 513, 16), *range(544, largest, 32)]
    return sorted({size for size in sizes if size < largest} | {largest}) if largest else []


def cascade_sizes(largest: int) -> list[int]:
    """Batch sizes with a second graph for rows that share a prefix; coarser, since such batches are large."""
    sizes = [*range(32, 257, 32), *range(320, 513, 64), *range(640, largest, 128)]
    return sorted({size for size in sizes if size < largest} | {largest}) if largest else []


class DecodeGraph:
    """Captured step of `size` rows. It reads its rows at the beginning of the upload buffer."""

    def __init__(
        self,
        runner: Runner,
        attention: PagedAttention,
        size: int,
        cascade: CascadeLayout | None,
        upload: torch.Tensor,
        pool: Any,
    ) -> None:
        """Run the step once to load and tune kernels, then capture it, on the current stream. All rows have the dummy
        slot. `cascade`: the layout for shared prefixes."""
        self.size = size
        self.cascade = cascade
        self._attention = attention
        packed = PackedStep(StepPlan.build(epoch=0, step=0), runner.tables, size, cascade)
        upload[: packed.size].copy_(packed.on_host())
        step = packed.view(upload)
        batch = runner.attention_batch(packed, step)
        attention.prepare(batch)
        runner.sample(runner.logits(packed, step, batch, attention), step)
        torch.cuda.current_stream().synchronize()

        self._graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog) may call CUDA meanwhile: only this thread must obey the rules of a capture.
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            logits = runner.logits(packed, step, batch, attention)
            self.tokens = runner.sample(logits, step)
            """[size] int32, valid until the next replay."""
        finally:
            self._graph.capture_end()
        # Borrowed: graphs are replayed one at a time, so all of them may write their logits to the same memory.
        self.logits = _borrow(logits)
        """[size, vocab_local], valid until the next replay of any graph."""

    def replay(self, batch: AttentionBatch) -> None:
        """Queue the step; `tokens` and `logits` hold its results."""
        self._attention.prepare(batch)
        self._graph.replay()


class DecodeGraphs:
    """All captured decode steps, with and without shared prefixes."""

    def __init__(self) -> None:
        # Both in ascending order of size.
        self._plain: list[DecodeGraph] = []
        self._cascade: list[DecodeGraph] = []

    def capture(self, runner: Runner, largest: int, upload: torch.Tensor, progress: Callable[[float], None]) -> None:
        """Capture graphs up to and including `largest` rows, the largest first, so that smaller ones reuse its
        memory."""
        pool = torch.cuda.graph_pool_handle()
        kinds: list[tuple[list[DecodeGraph], list[int], CascadeLayout | None]]
        kinds = [(self._plain, graph_sizes(largest), None)]
        if runner.attention.cascade is not None:
            kinds.append((self._cascade, cascade_sizes(largest), runner.attention.cascade.layout))
        done, total = 0, sum(len(sizes) for _, sizes, _ in kinds)
        for graphs, sizes, cascade in kinds:
            for size in reversed(sizes):
                attention = runner.attention.for_graph(size)
                if attention is None:
                    return
                graphs.insert(0, DecodeGraph(runner, attention, size, cascade, upload, pool))
                done += 1
                progress(done / total)

    def find(self, plan: StepPlan) -> DecodeGraph | None:
        """The smallest graph that fits the step, preferably one for shared prefixes where its rows have any; None when
        the step must run eagerly."""
        if len(plan.prefill_slots) or not len(plan.decode_slots):
            return None
        rows = len(plan.decode_slots)
        shared = _smallest(self._cascade, rows) if len(plan.shared_prefixes) else None
        return shared or _smallest(self._plain, rows)

    def clear(self) -> None:
        """Drop all graphs: they refer to NCCL's communicator, so they must be freed before the group."""
        self._plain.clear()
        self._cascade.clear()


def _smallest(graphs: list[DecodeGraph], rows: int) -> DecodeGraph | None:
    index = bisect.bisect_left(graphs, rows, key=lambda graph: graph.size)
    return graphs[index] if index < len(graphs) else None


class _BorrowedMemory:
    """Device memory with another owner, as an array of bytes."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _borrow(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor at the same address that does not keep the memory allocated."""
    assert tensor.is_contiguous()
    memory = torch.as_tensor(_BorrowedMemory(tensor.data_ptr(), tensor.nbytes), device=tensor.device)
    return memory.view(tensor.dtype).view(tensor.shape)
