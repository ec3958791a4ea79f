"""Cascade attention kernels with different settings, and the plain decode kernel: `python benchmarks/cascade.py`.

The batch is that of workload D: rows with a shared prefix of 2,048 tokens and 128 to 256 tokens of their own. Times are
µs of one layer in a CUDA graph over layers whose keys and values are not in the L2 cache.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from graph_timing import microseconds
from minisgl.attention import xqa_backend
from minisgl.attention.backend import AttentionShape
from minisgl.attention.batch import AttentionBatch, PagedKV
from minisgl.attention.cascade import CascadeLayout
from minisgl.attention.cascade_backend import CascadeDecode
from minisgl.kernels.attention import cascade_decode_triton
from minisgl.kernels.attention.stored_kv import UNSCALED
from minisgl.wire.shared_prefixes import SharedPrefix

PAGE = 64
LAYERS = 4
SHAPES = {"qwen3-0.6b": (16, 8), "qwen3-14b": (40, 8)}
HEAD_DIM = 128
SPLITS = {"qwen3-0.6b": (4, 8), "qwen3-14b": (3, 2)}
SMALLER_BATCHES = (
    (16, 512),
    (16, 1024),
    (16, 2048),
    (32, 512),
    (32, 1024),
    (64, 256),
    (64, 512),
    (256, 128),
    (256, 512),
)
"""Rows and shared tokens, to find the smallest batch that benefits from cascade attention."""


@dataclass(frozen=True)
class SharedSettings:
    block: int
    warps: int
    stages: int
    registers: int | None
    """Maximum per thread; None: no limit."""
    vectors: int
    splits: int

    @property
    def launch(self) -> dict[str, int]:
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages} | limit


@dataclass(frozen=True)
class OwnSettings:
    block: int
    warps: int
    stages: int
    dtype: torch.dtype


def shared_settings(splits: tuple[int, ...]) -> Iterator[SharedSettings]:
    for block, warps, stages, registers, vectors in (
        (32, 8, 5, 128, 128),
        (32, 8, 3, 128, 128),
        (32, 8, 7, 128, 128),
        (64, 8, 2, 128, 128),
        (64, 8, 5, 128, 128),
        (32, 4, 5, 128, 64),
        (64, 4, 3, 168, 64),
    ):
        for count in splits:
            yield SharedSettings(block, warps, stages, registers, vectors, count)


def own_settings() -> Iterator[OwnSettings]:
    for block, warps, stages in (
        (32, 1, 3),
        (32, 1, 2),
        (32, 1, 5),
        (32, 2, 3),
        (16, 1, 3),
        (16, 1, 5),
        (16, 2, 3),
        (64, 2, 3),
        (64, 4, 3),
    ):
        yield OwnSettings(block, warps, stages, torch.bfloat16)
    yield OwnSettings(32, 1, 3, torch.float32)


class Batch:
    def __init__(self, model: str, own_lengths: NDArray[np.int32], prefix: int, layers: int) -> None:
        rows = len(own_lengths)
        heads, self.kv_heads = SHAPES[model]
        self.group, self.rows, self.prefix = heads // self.kv_heads, rows, prefix
        draw = torch.Generator("cuda").manual_seed(0)
        lengths = prefix + own_lengths
        own = -(-(lengths - prefix) // PAGE)
        pages = prefix // PAGE + int(own.sum())
        order = np.random.default_rng(0).permutation(pages).astype(np.int32)
        table = np.full((rows + 1, int(lengths.max()) // PAGE + 1), pages, np.int32)
        table[:rows, : prefix // PAGE] = order[: prefix // PAGE]
        first = prefix // PAGE
        for row, count in enumerate(own.tolist()):
            table[row, prefix // PAGE : prefix // PAGE + count] = order[first : first + count]
            first += count
        size = (layers, pages + 1, PAGE, self.kv_heads, HEAD_DIM)
        keys, values = (torch.randn(size, generator=draw, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        self.kv = PagedKV(keys, values, scales=(UNSCALED,) * layers)
        self.q = torch.randn(rows, heads, HEAD_DIM, generator=draw, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)
        self.table, self.lengths = (torch.from_numpy(x.astype(np.int32)).cuda() for x in (table, lengths))
        self.slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.shape = AttentionShape(
            heads, self.kv_heads, HEAD_DIM, PAGE, table.shape[1], torch.bfloat16, torch.device("cuda")
        )
        self.host_slots, self.host_lengths = np.arange(rows, dtype=np.int32), lengths
        self.sums = torch.empty(8, rows, heads, device="cuda")
        self.scale = HEAD_DIM**-0.5 * math.log2(math.e)

    def batch(self, layout: CascadeLayout | None = None) -> AttentionBatch:
        empty, none = torch.empty(0, dtype=torch.int32, device="cuda"), np.empty(0, np.int32)
        cascade = None
        if layout is not None:
            packed = layout.pack([SharedPrefix(self.prefix // PAGE, self.host_slots)], self.rows)
            cascade = layout.view(torch.from_numpy(packed).cuda(), self.rows)
        return AttentionBatch(
            self.table, self.slots, self.lengths, empty, empty, empty, self.host_lengths, none, none, cascade
        )

    def shared(self, settings: SharedSettings) -> Callable[[int], None]:
        rows = settings.vectors // self.group
        tiles = -(-self.rows // rows)
        table = np.full((tiles, 1 + rows), -1, np.int32)
        table[:, 0] = self.prefix // PAGE
        members = np.full(tiles * rows, -1, np.int32)
        members[: self.rows] = self.host_slots
        table[:, 1:] = members.reshape(tiles, rows)
        device_table = torch.from_numpy(table).cuda()
        counts = torch.tensor([tiles, settings.splits], dtype=torch.int32, device="cuda")
        parts = torch.empty(8, *self.q.shape, dtype=self.q.dtype, device="cuda")

        def run(layer: int) -> None:
            cascade_decode_triton._shared[(tiles * self.kv_heads * settings.splits,)](
                self.q, self.kv.keys[layer], self.kv.values[layer], self.table, counts, device_table, parts, self.sums,
                self.rows, self.table.stride(0), self.scale, KV_HEADS=self.kv_heads, GROUP=self.group, TILE_ROWS=rows,
                HEAD_DIM=HEAD_DIM, PAGE=PAGE, BLOCK=settings.block, TILE=settings.vectors, PDL=False,
                **settings.launch,
            )  # fmt: skip

        return run

    def own(self, settings: OwnSettings, splits: int) -> Callable[[int], None]:
        counts = torch.tensor([1, splits], dtype=torch.int32, device="cuda")
        prefix_pages = torch.full((self.rows,), self.prefix // PAGE, dtype=torch.int32, device="cuda")
        parts = torch.randn(8, *self.q.shape, device="cuda").to(settings.dtype)
        self.sums.normal_()

        def run(layer: int) -> None:
            cascade_decode_triton._own[(self.kv_heads, self.rows)](
                self.q, self.kv.keys[layer], self.kv.values[layer], self.table, self.lengths, prefix_pages,
                counts, parts, self.sums, self.out, self.rows, self.table.stride(0), self.scale,
                KV_HEADS=self.kv_heads, GROUP=self.group, HEAD_DIM=HEAD_DIM, PAGE=PAGE, BLOCK=settings.block,
                VECTORS=16, SPLITS=8, num_warps=settings.warps, num_stages=settings.stages, PDL=False,
            )  # fmt: skip

        return run

    def cascade(self, programs: int) -> Callable[[int], None]:
        """Both kernels, the first one with `programs` programs per multiprocessor."""
        decode = CascadeDecode(self.shape, self.rows)
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        decode.layout = replace(decode.layout, programs=programs * multiprocessors)
        decode.begin(self.batch(decode.layout))
        return lambda layer: decode.decode(layer, self.kv, self.q, self.out)

    def plain(self) -> Callable[[int], None]:
        decode = xqa_backend.XqaDecode(self.shape)
        decode.begin(self.batch())
        return lambda layer: decode.decode(layer, self.kv, self.q, self.out)


def growing(rows: int) -> NDArray[np.int32]:
    """Own tokens of the rows of workload D, int32 [rows]."""
    return np.linspace(128, 256, rows).astype(np.int32)


def compile_settings(work: tuple[str, SharedSettings | OwnSettings]) -> None:
    """Compile one kernel into Triton's cache. Runs in a process of its own, in parallel with others."""
    model, settings = work
    batch = Batch(model, growing(64), 256, 1)
    run = batch.shared(settings) if isinstance(settings, SharedSettings) else batch.own(settings, 2)
    try:
        run(0)
    except triton.runtime.errors.OutOfResources:
        return
    torch.cuda.synchronize()


def timed(make: Callable[[], Callable[[int], None]]) -> str:
    try:
        run = make()
        return f"{microseconds(lambda call: run(call % LAYERS), 16):8.1f}"
    except triton.runtime.errors.OutOfResources as error:
        return f"    out of resources: {error}"


def measure(model: str, rows: int, prefix: int) -> None:
    batch, splits = Batch(model, growing(rows), prefix, LAYERS), SPLITS[model]
    own_bytes = 2 * 2 * HEAD_DIM * batch.kv_heads * int((batch.host_lengths - prefix).sum())
    print(f"\n{model}: {rows} rows, {prefix} tokens shared, {own_bytes / 1e6:.0f} MB of own tokens")
    if reason := xqa_backend.why_not(batch.shape):
        print("plain: not measured,", reason)
    else:
        print("plain (xqa)", timed(batch.plain))
        batch.plain()(0)
        plain = batch.out.clone()
        batch.cascade(2)(0)
        print(f"cascade: relative difference from plain {float((batch.out - plain).norm() / plain.norm()):.1e}")
    for programs in (1, 2):
        print("cascade", timed(partial(batch.cascade, programs)), f"{programs} programs per multiprocessor")
    for shared in shared_settings(splits):
        print("shared", timed(partial(batch.shared, shared)), shared)
    for own in own_settings():
        print("own", timed(partial(batch.own, own, splits[0])), own)
    for count in (1, 2, 4, 8):
        print("own", timed(partial(batch.own, OwnSettings(32, 1, 3, torch.bfloat16), count)), f"{count} splits")


def measure_alone(model: str, rows: int, shortest: int, longest: int) -> None:
    """Time the second kernel as a plain decode kernel, on rows without a shared prefix as in workload A."""
    draw = np.random.default_rng(1)
    lengths = draw.integers(shortest, longest, rows).astype(np.int32)
    total = 2 * 2 * HEAD_DIM * SHAPES[model][1] * int(lengths.sum())
    for name, ordered in (("random", lengths), ("descending", np.sort(lengths)[::-1].copy())):
        batch = Batch(model, ordered, 0, LAYERS)
        print(f"\n{model}: {rows} rows of {shortest} to {longest} tokens, {total / 1e6:.0f} MB, {name} order")
        if not xqa_backend.why_not(batch.shape):
            print("plain (xqa)", timed(batch.plain))
        for own in own_settings():
            print("own", timed(partial(batch.own, own, 1)), own)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--processes", type=int, default=12, help="processes that compile kernels")
    args = parser.parse_args()
    work: list[tuple[str, SharedSettings | OwnSettings]] = []
    for model in SHAPES:
        work += [(model, settings) for settings in shared_settings(SPLITS[model][:1])]
        work += [(model, settings) for settings in own_settings()]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(compile_settings, work, chunksize=1)
    print(torch.cuda.get_device_name(), torch.__version__, "triton", triton.__version__)
    for model in SHAPES:
        measure(model, args.rows, args.prefix)
    for rows, shortest, longest in ((256, 150, 1074), (143, 600, 1524)):
        measure_alone("qwen3-0.6b", rows, shortest, longest)
    print()
    for model, (rows, prefix) in itertools.product(SHAPES, SMALLER_BATCHES):
        batch = Batch(model, growing(rows), prefix, LAYERS)
        plain = "        " if xqa_backend.why_not(batch.shape) else timed(batch.plain)
        print(f"{model}: {rows} rows, {prefix} shared: plain {plain}, cascade", timed(partial(batch.cascade, 2)))


if __name__ == "__main__":
    main()
