"""CUDA graphs of whole steps: embedding, layers, head, sampling and the next input tokens, in one launch."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from minisgl.attention.batch import AttentionBatch
from minisgl.attention.cascade import CascadeLayout
from minisgl.attention.layered import LayeredAttention
from minisgl.attention.split_backend import MOST_ROWS
from minisgl.engine.batch import StepSize
from minisgl.engine.graphs.capture import captured, padding_step
from minisgl.engine.graphs.sizes import cascade_sizes, fitting_size, graph_sizes, prefers_cascade
from minisgl.engine.runner import Runner
from minisgl.models.decoder_config import representative_layers
from minisgl.wire.plan import IntArray, StepPlan


class StepGraph:
    """Captured step of one size. It reads its inputs at the beginning of the upload buffer."""

    def __init__(
        self,
        runner: Runner,
        few_layers: Runner,
        attention: LayeredAttention,
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


class _Kind:
    """Captured steps of one kind. Each is captured when it is needed first, or ahead."""

    def __init__(
        self, sizes: Sequence[StepSize] = (), new: Callable[[StepSize], StepGraph | None] | None = None
    ) -> None:
        """`sizes` in ascending order. `new` captures a step; its result None: there is no graph for it."""
        self.sizes = list(sizes)
        self._new = new
        self._graphs: dict[StepSize, StepGraph] = {}

    def get(self, size: StepSize) -> StepGraph | None:
        """The graph of one of the sizes, captured now if it was not."""
        if size not in self._graphs:
            assert self._new is not None
            graph = self._new(size)
            if graph is None:
                self.sizes.remove(size)
                return None
            self._graphs[size] = graph
        return self._graphs[size]

    def smallest(self, rows: int) -> StepGraph | None:
        """The smallest graph of at least so many decode rows."""
        index = bisect.bisect_left(self.sizes, rows, key=lambda size: size.decode)
        return self.get(self.sizes[index]) if index < len(self.sizes) else None

    @property
    def captured(self) -> Iterable[StepGraph]:
        return self._graphs.values()

    def missing(self) -> Iterator[StepSize]:
        """Sizes that are not captured yet."""
        return (size for size in self.sizes if size not in self._graphs)


class StepGraphs:
    """All captured steps: of decode rows, with and without shared prefixes and long contexts, and with prompts.

    A start captures only the largest of each kind: the others would take longer than all else of a restart. They follow
    in idle time or for their first step, which takes one to three times as long as to launch it kernel by kernel."""

    def __init__(self) -> None:
        self._prefill = self._plain = self._cascade = self._long = _Kind()
        self._is_long: Callable[[IntArray], bool] = _never
        self._most_keys = 0
        self._page_bytes = 0
        self.count = 0
        """Captures so far."""

    def capture(
        self,
        runner: Runner,
        largest: int,
        prefill: Sequence[StepSize],
        upload: torch.Tensor,
        progress: Callable[[float], None],
        before: Callable[[], None],
    ) -> None:
        """Capture the largest decode step, of `largest` rows, and the largest one of the sizes `prefill`: the others
        reuse their memory. `before` is called before each capture, now and later."""
        few_layers = runner.with_layers(representative_layers(runner.model_config.layers))
        pool = torch.cuda.graph_pool_handle()
        attention = runner.attention
        self._most_keys = attention.most_graph_keys
        self._is_long = attention.is_long
        self._page_bytes = 2 * max(group.keys[0, 0].nbytes for group in runner.kv.groups)

        def for_graph(size: StepSize) -> LayeredAttention | None:
            return attention.for_graph(size.decode, size.tokens, segments=size.segments + 1, prefix=size.prefix)

        def new_graph(
            size: StepSize,
            cascade: CascadeLayout | None = None,
            for_size: Callable[[StepSize], LayeredAttention | None] = for_graph,
        ) -> StepGraph | None:
            before()
            if (captured := for_size(size)) is None:
                return None
            self.count += 1
            return StepGraph(runner, few_layers, captured, size, cascade, upload, pool)

        decode = list(map(StepSize, graph_sizes(largest)))
        long = [size for size in decode if attention.for_long_graph(size.decode)]
        self._prefill, self._plain = _Kind(prefill, new_graph), _Kind(decode, new_graph)
        self._long = _Kind(long, lambda size: new_graph(size, None, lambda size: attention.for_long_graph(size.decode)))
        if attention.cascade is not None:
            # Drafts have no part in it, so there are no more rows than requests.
            rows = min(largest, runner.tables.dummy_slot)
            layout, shared = attention.cascade.layout, list(map(StepSize, cascade_sizes(rows)))
            self._cascade = _Kind(shared, lambda size: new_graph(size, layout))
        kinds = [kind for kind in self._kinds if kind.sizes]
        for done, kind in enumerate(kinds, 1):
            kind.get(kind.sizes[-1])
            progress(done / len(kinds))

    @property
    def captured(self) -> list[StepGraph]:
        """All graphs that are captured."""
        return [graph for kind in self._kinds for graph in kind.captured]

    @property
    def _kinds(self) -> tuple[_Kind, ...]:
        """In the order of their largest memory."""
        return self._prefill, self._plain, self._cascade, self._long

    def capture_next(self) -> StepGraph | None:
        """Capture a step that is not captured yet; None: there is none."""
        for kind in (self._plain, self._prefill, self._cascade, self._long):
            for size in list(kind.missing()):
                if graph := kind.get(size):
                    return graph
        return None

    def find(self, plan: StepPlan) -> StepGraph | None:
        """The smallest graph that fits the step, preferably one for shared prefixes where its rows have any; None when
        the step must run eagerly. May capture it, on the current stream."""
        if len(plan.prefill_slots):
            eager = prefers_cascade(plan, self._page_bytes)
            size = None if eager else fitting_size(self._prefill.sizes, plan, self._most_keys)
            return None if size is None else self._prefill.get(size)
        rows = len(plan.decode_slots)
        if self._is_long(plan.decode_positions + 1):
            return self._long.smallest(rows)
        if rows > len(plan.widths) > 0:
            # Graphs of fewer rows store keys and values while they attend.
            return self._plain.smallest(max(rows, MOST_ROWS + 1))
        shared = self._cascade.smallest(rows) if len(plan.shared_prefixes) else None
        return shared or self._plain.smallest(rows)

    def clear(self) -> None:
        """Drop all graphs: they refer to NCCL's communicator, so they must be freed before the group."""
        self._prefill = self._plain = self._cascade = self._long = _Kind()
        # A method of attention, which holds the KV pool.
        self._is_long = _never


def _never(lengths: IntArray) -> bool:
    """Return False: no graphs are captured yet."""
    return False


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
