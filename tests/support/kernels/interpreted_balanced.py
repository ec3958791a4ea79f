"""The balanced decode kernel on a CPU, against float64: `python -m support.kernels.interpreted_balanced`.

Gluon has no interpreter. Its functions are Python all the same: here they are called with a language whose tensors are
torch's, and whose copies arrive as late as they may, when their barrier is waited for, or as early. A process of its
own, for whether the Triton kernel beside it is interpreted is settled when Triton is imported. Prints, as JSON, the
largest error of each case; an error that is not finite is −1.
"""

from __future__ import annotations

import json
import math
import os
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minisgl.kernels.attention.stored_kv import FP8
from support.kernels.dense_attention import DenseCase, Sequences, attention_shape
from support.kernels.interpreted_cascade import allow_loops_to_a_loaded_end


@dataclass(frozen=True)
class Case:
    decode: Sequence[int]
    group: int = 2
    page_size: int = 64
    head_dim: int = 64
    block: int = 32
    stages: int = 3
    spans: int = 5
    window: int | None = None
    fp8: bool = False
    sinks: bool = False
    late: bool = True
    """Copies arrive when they are waited for; False: as soon as they are begun."""


MANY = (1, 64, 65, 130, 300, 31, 32, 33, 2, 200, 511)
CASES = {
    "more rows than spans": Case(MANY),
    "early copies": Case(MANY, late=False),
    "one span": Case(MANY, spans=1),
    "more spans than blocks": Case((40, 1, 100), spans=40),
    "a row in many spans": Case((3, 1000, 5), spans=9),
    "one row": Case((700,), spans=4),
    "rows of one block": Case((1, 2, 3, 4, 5, 6, 7), spans=3),
    "as many spans as rows": Case((64, 64, 64, 64), spans=4),
    "more stages than blocks": Case((64, 3), spans=2, stages=6),
    "rows without a token": Case((0, 64, 0, 65, 0), spans=2),
    "one head in a group": Case(MANY, group=1),
    "four heads": Case(MANY, group=4, spans=7),
    "five heads": Case(MANY, group=5, stages=4),
    "eight heads": Case(MANY, group=8, spans=6),
    "sixteen heads": Case(MANY, group=16),
    "wide heads": Case((140, 150, 129), head_dim=128),
    "heads of 256": Case((140, 150, 129), head_dim=256, block=16),
    "pages of 16": Case(MANY, page_size=16, block=16),
    "pages of 32": Case(MANY, page_size=32),
    "pages of 128": Case(MANY, page_size=128, block=64),
    "seven heads": Case(MANY, group=7),
    "a window": Case(MANY, window=70, spans=7),
    "a window of whole blocks": Case(MANY, window=64),
    "a window of one token": Case(MANY, window=1, spans=9),
    "a window longer than all rows": Case(MANY, window=600),
    "FP8": Case(MANY, fp8=True, group=5, spans=7),
    "FP8, wide heads": Case((140, 150, 129), fp8=True, head_dim=128, stages=6),
    "FP8, a window": Case(MANY, fp8=True, window=70, spans=7),
    "FP8, a window and heads of 256": Case((140, 150, 129), fp8=True, head_dim=256, block=16, stages=6, window=70),
    "sinks": Case((0, *MANY), sinks=True),
    "sinks and a window of FP8": Case(MANY, sinks=True, window=70, fp8=True, group=8, spans=7),
}


class _Pointer:
    def __init__(self, memory: torch.Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> _Pointer:
        return _Pointer(self.memory, self.offset + offset)

    def __sub__(self, offset: Any) -> _Pointer:
        return _Pointer(self.memory, self.offset - offset)


class _Barrier:
    """A phase ends when all bytes that it expects have come."""

    def __init__(self) -> None:
        self.expected = self.phase = 0
        self.copies: list[Callable[[], int]] = []


class _Shared:
    """Shared memory of NaN; an index gives a view."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def index(self, place: Any) -> _Shared:
        return _Shared(self.memory[int(place)])

    def permute(self, order: tuple[int, ...]) -> _Shared:
        return _Shared(self.memory.permute(order))

    def load(self, layout: object) -> torch.Tensor:
        return self.memory.clone()


class _Barriers:
    def __init__(self, count: int) -> None:
        self._all = [_Barrier() for _ in range(count)]

    def index(self, place: Any) -> _Barrier:
        return self._all[int(place)]


class _Tiles:
    def __init__(self, matrix: torch.Tensor, block: int, head_dim: int) -> None:
        self.matrix, self.dtype, self.layout = matrix, matrix.dtype, None
        self.bytes = block * head_dim * matrix.itemsize
        self.block_type = types.SimpleNamespace(shape=(block, head_dim), nbytes=self.bytes)


class _Language:
    """The functions of `gl` that the kernel uses, for one program."""

    constexpr = object
    int16, int32, int64 = torch.int16, torch.int32, torch.int64
    float16, float32 = torch.float16, torch.float32
    static_range = range

    def __init__(self, programs: tuple[int, int], program: tuple[int, int]) -> None:
        self._programs, self._program = programs, program

    def program_id(self, axis: int) -> torch.Tensor:
        return torch.tensor(self._program[axis])

    def num_programs(self, axis: int) -> torch.Tensor:
        return torch.tensor(self._programs[axis])

    def load(self, place: _Pointer, mask: Any = True, other: Any = math.nan, cache_modifier: str = "") -> torch.Tensor:
        offset, mask = torch.broadcast_tensors(torch.as_tensor(place.offset), torch.as_tensor(mask))
        value = place.memory.flatten()[torch.where(mask, offset, 0)]
        return torch.where(mask, value, torch.tensor(other, dtype=value.dtype) if math.isfinite(other) else value)

    def store(self, place: _Pointer, value: Any, mask: Any = True) -> None:
        offset, mask = torch.broadcast_tensors(torch.as_tensor(place.offset), torch.as_tensor(mask))
        value = torch.as_tensor(value, dtype=place.memory.dtype).expand(offset.shape)
        place.memory.view(-1)[offset[mask]] = value[mask]

    def atomic_add(self, place: _Pointer, value: int, *, sem: str, scope: str) -> torch.Tensor:
        before = place.memory.view(-1)[place.offset].clone()
        place.memory.view(-1)[place.offset] += value
        return before

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: object) -> _Shared | _Barriers:
        return _Barriers(shape[0]) if dtype == torch.int64 else _Shared(_nothing(torch.empty(shape, dtype=dtype)))

    def arange(self, begin: int, end: int, layout: object) -> torch.Tensor:
        return torch.arange(begin, end)

    def full(self, shape: list[int], value: float, dtype: torch.dtype, layout: object) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype)

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: object) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def where(self, condition: Any, yes: Any, no: Any) -> torch.Tensor:
        # A number takes the type of the tensor beside it.
        return torch.where(torch.as_tensor(condition), yes, no)

    def max(self, value: torch.Tensor, axis: int) -> torch.Tensor:
        return value.amax(axis)

    def sum(self, value: torch.Tensor, axis: int) -> torch.Tensor:
        return value.sum(axis)

    def minimum(self, one: Any, other: Any) -> torch.Tensor:
        return torch.minimum(torch.as_tensor(one), torch.as_tensor(other))

    def maximum(self, one: Any, other: Any) -> torch.Tensor:
        return torch.maximum(torch.as_tensor(one), torch.as_tensor(other))

    def convert_layout(self, value: torch.Tensor, layout: object) -> torch.Tensor:
        return value

    exp2, log2 = staticmethod(torch.exp2), staticmethod(torch.log2)

    def thread_barrier(self) -> None: ...

    def MBarrierLayout(self) -> None: ...

    def NVMMADistributedLayout(self, **_: object) -> None: ...

    def DotOperandLayout(self, *_: object) -> None: ...

    def SliceLayout(self, *_: object) -> None: ...


class _Copies:
    """`mbarrier` and `tma`."""

    def __init__(self, *, late: bool) -> None:
        self._late = late

    def MBarrierLayout(self) -> None: ...

    def init(self, barrier: _Barrier, count: int) -> None:
        assert count == 1

    def expect(self, barrier: _Barrier, size: int, pred: Any) -> None:
        if pred:
            assert barrier.expected == 0 and not barrier.copies, "one phase at a time"
            barrier.expected = size

    def async_copy_global_to_shared(
        self, tiles: _Tiles, place: list[Any], barrier: _Barrier, shared: _Shared, pred: Any
    ) -> None:
        if not pred:
            return
        rows, columns = map(int, place)
        tile = tiles.matrix[rows : rows + len(shared.memory), columns : columns + shared.memory.shape[1]]
        # Until it has come, what was there before is worth nothing.
        shared.memory.copy_(_nothing(shared.memory))

        def arrive() -> int:
            shared.memory.copy_(tile)
            return tiles.bytes

        if self._late:
            barrier.copies.append(arrive)
        else:
            barrier.expected -= arrive()
            if barrier.expected == 0:
                barrier.phase += 1

    def wait(self, barrier: _Barrier, phase: Any) -> None:
        if self._late:
            assert barrier.phase % 2 == int(phase), "waits for a phase that is over"
            for arrive in barrier.copies:
                barrier.expected -= arrive()
            barrier.copies.clear()
            barrier.phase += 1
        assert barrier.expected == 0 and (barrier.phase + 1) % 2 == int(phase), "would wait for ever"


def _nothing(memory: torch.Tensor) -> torch.Tensor:
    """Memory like it, of numbers that are not finite; for pairs of FP8 numbers, too."""
    if memory.dtype == torch.int16:
        return torch.full_like(memory, 0x7F7F)
    return torch.full_like(memory, math.nan)


def _halves(pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's function of this name."""
    numbers = pairs.contiguous().view(FP8).to(torch.float16).unflatten(-1, (-1, 2))
    return numbers[..., 0], numbers[..., 1]


def _run(kernel: Any, programs: tuple[int, int], arguments: dict[str, Any], *, late: bool) -> None:
    """All programs, the last one first."""
    from minisgl.kernels.attention import stream_k_decode_gluon as module

    for span in reversed(range(programs[1])):
        for head in range(programs[0]):
            language, copies = _Language(programs, (head, span)), _Copies(late=late)
            names: dict[str, Any] = dict(vars(module))
            names |= {"gl": language, "tma": copies, "mbarrier": copies, "fence_async_shared": lambda: None}
            names["range"] = lambda *limits: map(torch.tensor, range(*map(int, limits)))
            names["start_next"] = names["wait_for_previous"] = lambda PDL: None
            names["mma_v2"] = lambda x, y, total: (x.double() @ y.double()).float() + total
            names["_halves"] = _halves
            for constant in ("_QUERY_SHRINK", "_LOG2_E"):
                names[constant] = getattr(module, constant).value
            for helper in ("_copy", "_add", "_share_beside_sink", "_store"):
                names[helper] = types.FunctionType(getattr(module, helper).fn.__code__, names)
            types.FunctionType(kernel.fn.__code__, names)(**arguments)


def largest_error(case: Case) -> float:
    from minisgl.kernels.attention import stream_k_decode_gluon as module
    from minisgl.kernels.attention.stream_k_decode_gluon import Spans, _attend, cut_spans

    kv_heads = 2
    shape = attention_shape(
        query_heads=case.group * kv_heads,
        kv_heads=kv_heads,
        head_dim=case.head_dim,
        page_size=case.page_size,
        longest=1024,
        dtype=torch.float16,
        device="cpu",
        window=case.window,
        kv_dtype=FP8 if case.fp8 else None,
        sinks=case.sinks,
    )
    # A row without a token is not one that is dense; its result is 0.
    dense = DenseCase(shape, Sequences(decode=[max(length, 1) for length in case.decode]))
    dense.store()
    kv, batch, rows = dense.kv, dense.batch, len(case.decode)
    lengths = torch.tensor(case.decode, dtype=torch.int32)
    blocks = sum(max(-(-length // case.block), 1) for length in case.decode)
    spans = Spans(*(torch.full((size,), -9, dtype=torch.int32) for size in (rows, blocks, blocks)))
    tables = (batch.page_table, batch.decode_slots, lengths, spans)
    cut_spans(*tables, page_size=case.page_size, block=case.block, window=case.window)
    out = torch.full_like(dense.q, math.nan)
    arrivals = torch.zeros(rows, kv_heads, dtype=torch.int32)
    parts = torch.full((2 * case.spans, *dense.q.shape[1:]), math.nan)
    pools = []
    for pool in (kv.keys, kv.values):
        matrix = pool[0].flatten(0, 1).flatten(1)
        matrix = matrix.view(torch.int16) if case.fp8 else matrix
        pools.append(_Tiles(matrix, case.block, case.head_dim // (1 + case.fp8)))
    pointers = dict(q=dense.q, lengths=lengths, parts=parts, sums=parts[..., 0].clone(), arrivals=arrivals, result=out)
    pointers |= dict(sinks=parts if dense.sinks is None else dense.sinks)
    arguments: dict[str, Any] = dict(zip(("keys", "values"), pools, strict=True)) | {
        name: _Pointer(memory) for name, memory in (pointers | spans._asdict()).items()
    }
    scale = case.head_dim**-0.5 * math.log2(math.e) * dense.scales.key
    arguments |= dict(rows=rows, scale=scale * (module._QUERY_SHRINK.value if case.fp8 else 1), PDL=False)
    arguments |= dict(value_scale=dense.scales.value)
    arguments |= dict(KV_HEADS=kv_heads, GROUP=case.group, STAGES=case.stages)
    arguments |= dict(WINDOW=case.window or 0, SINKS=case.sinks)
    _run(_attend, (kv_heads, case.spans), arguments, late=case.late)
    if arrivals.any():
        return -1.0
    expected = dense.expected()
    expected[lengths == 0] = 0.0
    error = float((out.flatten(1).double() - expected).abs().max())
    return error if math.isfinite(error) else -1.0


def blocks_of_drafts() -> float:
    """1 where a block that holds a token of the step would be read before the step has stored it, or an older block
    only then; else 0."""
    from minisgl.kernels.attention.stream_k_decode_gluon import Spans, cut_spans

    block = 16
    runs = ((0, 60, 8), (3, 16, 2), (1, 1, 1), (2, 65, 3), (4, 40, 1))
    rows = [(slot, first + place, first) for slot, first, width in runs for place in range(width)]
    slots, lengths, first = torch.tensor(rows, dtype=torch.int32).T.contiguous()
    counts = -(-lengths // block)
    spans = Spans(*(torch.full((size,), -9, dtype=torch.int32) for size in (len(rows), *[int(counts.sum())] * 2)))
    table = torch.arange(5 * 8, dtype=torch.int32).view(5, 8)
    cut_spans(table, slots, lengths, spans, page_size=16, block=block)
    is_new = torch.cat(
        [torch.arange(count) >= (new - 1) // block for count, new in zip(counts.tolist(), first.tolist(), strict=True)]
    )
    return float(((spans.places < 0) != is_new).any())


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    allow_loops_to_a_loaded_end()
    errors = {name: largest_error(case) for name, case in CASES.items()}
    print(json.dumps(errors | {"blocks of drafts": blocks_of_drafts()}))
