"""CUDA graphs of whole steps: embedding, layers, head, sampling and the next input tokens, in one launch."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minisgl.attention.batch import AttentionBatch
from minisgl.attention.cascade import CascadeLayout
from minisgl.attention.paged import PagedAttention
from minisgl.engine.capture import captured, padding_step
from minisgl.engine.graph_sizes import StepSize, cascade_sizes, fitting_size, graph_sizes, prefers_cascade
from minisgl.engine.runner import Runner
from minisgl.engine.warm_up import representative_layers
from minisgl.wire.plan import IntArray, StepPlan


class StepGraph:
    """Captured step of one size. It reads its inputs at the beginning of the upload buffer."""

    def __init__(
        self,
        runner: Runner,
        few_layers: Runner,
        attention: PagedAttention,
        size: StepSize,
        cascade: CascadeLayout | None,
        upload: torch.Tensor,
        pool: Any,
    ) -> None:
        """Run the step once with `few_layers` to load and tune kernels, then capture it, on the current stream. All
        rows have the dummy slot. `cascade`: the layout for shared prefixes."""
        self.size = size
        self.cascade = cascade
        self._attention = attention
        packed, step = padding_step(runner.tables, size, cascade, upload)
        batch = runner.attention_batch(packed, step)
        attention.prepare(batch)
        few_layers.sample(few_layers.logits(packed, step, batch, attention), step)
        with captured(pool) as self._graph:
            logits = runner.logits(packed, step, batch, attention)
            self.tokens = runner.sample(logits, step)
            """[S] int32, valid until the next replay."""
        # Borrowed: graphs are replayed one at a time, so all of them may write their logits to the same memory.
        self.logits = _borrow(logits)
        """[S, vocab_local], valid until the next replay of any graph."""

    def replay(self, batch: AttentionBatch) -> None:
        """Queue the step; `tokens` and `logits` hold its results."""
        self._attention.prepare(batch)
        self._graph.replay()


class StepGraphs:
    """All captured steps: of decode rows, with and without shared prefixes and long contexts, and with prompts."""

    def __init__(self) -> None:
        # In ascending order of size.
        self._plain: list[StepGraph] = []
        self._cascade: list[StepGraph] = []
        self._long: list[StepGraph] = []
        self._is_long: Callable[[IntArray], bool] = _never
        self._prefill: dict[StepSize, StepGraph] = {}
        self._most_keys = 0
        self._page_bytes = 0

    def capture(
        self,
        runner: Runner,
        largest: int,
        prefill: Sequence[StepSize],
        upload: torch.Tensor,
        progress: Callable[[float], None],
    ) -> None:
        """Capture decode steps up to and including `largest` rows, and steps of the sizes `prefill`, in descending
        order, so that smaller ones reuse the memory of larger ones."""
        few_layers = runner.with_layers(representative_layers(runner.model_config))
        pool = torch.cuda.graph_pool_handle()
        attention = runner.attention
        self._most_keys = attention.most_graph_keys
        self._is_long = attention.is_long
        self._page_bytes = 2 * runner.kv.keys[0, 0].nbytes
        kinds: list[tuple[list[StepGraph], list[StepSize], CascadeLayout | None]]
        with_prompts: list[StepGraph] = []
        decode = list(map(StepSize, graph_sizes(largest)))
        kinds = [(with_prompts, list(prefill), None), (self._plain, decode, None)]
        if attention.cascade is not None:
            kinds.append((self._cascade, list(map(StepSize, cascade_sizes(largest))), attention.cascade.layout))
        kinds.append((self._long, [size for size in decode if attention.for_long_graph(size.decode)], None))
        done, total = 0, sum(len(sizes) for _, sizes, _ in kinds)
        for graphs, sizes, cascade in kinds:
            for size in reversed(sizes):
                captured = (
                    attention.for_long_graph(size.decode)
                    if graphs is self._long
                    else attention.for_graph(size.decode, size.tokens, segments=size.segments + 1, prefix=size.prefix)
                )
                done += 1
                if captured is None:
                    continue
                graphs.insert(0, StepGraph(runner, few_layers, captured, size, cascade, upload, pool))
                progress(done / total)
        self._prefill = {graph.size: graph for graph in with_prompts}

    def find(self, plan: StepPlan) -> StepGraph | None:
        """The smallest graph that fits the step, preferably one for shared prefixes where its rows have any; None when
        the step must run eagerly."""
        if len(plan.prefill_slots):
            eager = prefers_cascade(plan, self._page_bytes)
            size = None if eager else fitting_size(self._prefill, plan, self._most_keys)
            return None if size is None else self._prefill[size]
        rows = len(plan.decode_slots)
        if self._is_long(plan.decode_positions + 1):
            return _smallest(self._long, rows)
        shared = _smallest(self._cascade, rows) if len(plan.shared_prefixes) else None
        return shared or _smallest(self._plain, rows)

    @property
    def decode(self) -> list[StepGraph]:
        """Graphs of steps without prompts."""
        return [*self._plain, *self._cascade, *self._long]

    def clear(self) -> None:
        """Drop all graphs: they refer to NCCL's communicator, so they must be freed before the group."""
        self._plain.clear()
        self._cascade.clear()
        self._long.clear()
        self._prefill.clear()
        # A method of attention, which holds the KV pool.
        self._is_long = _never


def _never(lengths: IntArray) -> bool:
    """Return False: no graphs are captured yet."""
    return False


def _smallest(graphs: list[StepGraph], rows: int) -> StepGraph | None:
    index = bisect.bisect_left(graphs, rows, key=lambda graph: graph.size.decode)
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
