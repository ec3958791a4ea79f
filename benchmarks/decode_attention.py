"""Decode attention of batches of workload A, with XQA and with balanced spans: `python benchmarks/decode_attention.py`.

Lengths are those of workload A after some steps. Times are µs of one layer in a CUDA graph over layers whose keys and
values are not in the L2 cache, followed by the share of the memory bandwidth in the data sheet, 4.8 TB/s; a plain read
reaches 0.89 of it. Calls follow each other immediately: a kernel that starts early overlaps the end of its own previous
call here, and the preceding products in a model.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from random import Random

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from graph_timing import microseconds
from minisgl.attention import xqa_backend
from minisgl.attention.backend import AttentionShape, DecodeBackend
from minisgl.attention.balanced_backend import BalancedDecode
from minisgl.attention.batch import AttentionBatch, PagedKV
from minisgl.kernels.attention.stored_kv import FP8, UNSCALED
from minisgl.kernels.attention.stream_k_decode_gluon import Settings

PAGE = 64
SHAPES = {
    "qwen3-0.6b": (16, 8, 128),
    "qwen3-14b": (40, 8, 128),
    "llama-3.2-1b": (32, 8, 64),
    "qwen2.5-0.5b": (14, 2, 64),
    "qwen2.5-7b": (28, 4, 128),
}
"""Query heads, KV heads and head size."""
STEPS = (50, 300, 500, 800)
"""Steps of workload A after which batches are measured; 256, 188, 126 and 59 rows are left."""
SETTINGS = (
    Settings(32, 3, 4),
    Settings(32, 3, 8),
    Settings(32, 3, 16),
    Settings(32, 2, 6),
    Settings(32, 2, 18),
    Settings(32, 4, 3),
    Settings(16, 6, 4),
    Settings(16, 6, 12),
    Settings(16, 4, 6),
)
"""With more programs than run at the same time, faster multiprocessors run more of them."""
SMALL_SETTINGS = (
    Settings(32, 6, 4),
    Settings(64, 3, 4),
    Settings(32, 3, 8),
    Settings(64, 2, 6),
    Settings(32, 4, 6),
    Settings(16, 6, 8),
)
"""For heads of 64."""
FP8_SETTINGS = (
    Settings(32, 6, 4),
    Settings(32, 3, 8),
    Settings(32, 4, 6),
    Settings(32, 5, 5),
    Settings(32, 2, 12),
    Settings(64, 3, 4),
    Settings(64, 2, 6),
    Settings(16, 6, 8),
    Settings(16, 8, 6),
    Settings(16, 4, 12),
)
"""For a KV cache in FP8."""
SHORT_STEPS = (50, 500)
BANDWIDTH = 4.8e12
POOL_BYTES = 12 << 30
CALLS = 28


def lengths_after(steps: int) -> NDArray[np.int32]:
    """Lengths of the rows of workload A that still run after `steps` steps, ascending."""
    random = Random(0)
    prompts = []
    for _ in range(256):
        prompts.append(random.randint(100, 1024))
        for _ in range(prompts[-1]):
            random.randint(0, 10000)
    answers = [random.randint(100, 1024) for _ in range(256)]
    left = [prompt + steps for prompt, answer in zip(prompts, answers, strict=True) if answer > steps]
    return np.sort(np.array(left, np.int32))


class Batch:
    def __init__(self, model: str, lengths: NDArray[np.int32], *, fp8: bool = False, layers: int | None = None) -> None:
        heads, kv_heads, head_dim = SHAPES[model]
        rows, counts = len(lengths), -(-lengths // PAGE)
        pages = int(counts.sum())
        table = np.full((rows + 1, 2048 // PAGE + 1), pages, np.int32)
        order = np.random.default_rng(0).permutation(pages).astype(np.int32)
        for row, (count, end) in enumerate(zip(counts.tolist(), counts.cumsum().tolist(), strict=True)):
            table[row, :count] = order[end - count : end]
        stored = FP8 if fp8 else torch.bfloat16
        page_bytes = 2 * stored.itemsize * PAGE * kv_heads * head_dim
        self.layers = layers or max(2, min(CALLS, POOL_BYTES // ((pages + 1) * page_bytes)))
        self.bytes = int(lengths.sum()) * page_bytes // PAGE
        draw = torch.Generator("cuda").manual_seed(0)
        size = (self.layers, pages + 1, PAGE, kv_heads, head_dim)
        keys, values = (torch.randn(size, generator=draw, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        self.kv = PagedKV(keys.to(stored), values.to(stored), scales=(UNSCALED,) * self.layers)
        self.q = torch.randn(rows, heads, head_dim, generator=draw, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)
        self.shape = AttentionShape(
            heads, kv_heads, head_dim, PAGE, table.shape[1], torch.bfloat16, torch.device("cuda"), kv_dtype=stored
        )
        empty, none = torch.empty(0, dtype=torch.int32, device="cuda"), np.empty(0, np.int32)
        slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        tables = (torch.from_numpy(table).cuda(), slots, torch.from_numpy(lengths).cuda())
        self.batch = AttentionBatch(*tables, empty, empty, empty, lengths, none, none)

    def run(self, backend: DecodeBackend) -> Callable[[int], None]:
        backend.prepare(self.batch)
        backend.begin(self.batch)
        return lambda call: backend.decode(call % self.layers, self.kv, self.q, self.out)

    def balanced(self, settings: Settings) -> BalancedDecode:
        backend = BalancedDecode(self.shape, None)
        backend.settings = settings
        return backend

    def report(self, name: str, backend: DecodeBackend) -> None:
        time = microseconds(self.run(backend), CALLS)
        rate = self.bytes / time * 1e6
        print(f"  {time:7.1f} us  {rate / 1e9:5.0f} GB/s  {rate / BANDWIDTH:.3f}  {name}", flush=True)


def settings_of(model: str, *, fp8: bool) -> tuple[Settings, ...]:
    if fp8:
        return FP8_SETTINGS
    return SMALL_SETTINGS if SHAPES[model][2] == 64 else SETTINGS


def compile_settings(work: tuple[str, Settings, bool]) -> None:
    """Compile one kernel into Triton's cache. Runs in a process of its own, in parallel with others."""
    batch = Batch(work[0], np.full(16, 100, np.int32), fp8=work[2], layers=1)
    batch.run(batch.balanced(work[1]))(0)
    torch.cuda.synchronize()


def measure(model: str, lengths: NDArray[np.int32], settings: tuple[Settings, ...], *, fp8: bool) -> None:
    batch = Batch(model, lengths, fp8=fp8)
    print(f"{model}: {len(lengths)} rows, {int(lengths.sum())} tokens, {batch.bytes / 1e6:.0f} MB")
    plain = None
    if reason := xqa_backend.why_not(batch.shape):
        print("  xqa: not measured:", reason)
    else:
        xqa = xqa_backend.XqaDecode(batch.shape)
        batch.report("xqa", xqa)
        batch.run(xqa)(0)
        plain = batch.out.clone()
    for each in settings:
        backend = batch.balanced(each)
        batch.report(str(each), backend)
        if plain is not None:
            batch.run(backend)(0)
            difference = float((batch.out - plain).norm() / plain.norm())
            # Negated, so that NaN counts as a difference.
            if not difference < 1e-2:
                print(f"  DIFFERS from xqa: relative error {difference:.1e}")
    # Time to compute the spans, once per step.
    print(f"  {microseconds(lambda call: backend.begin(batch.batch), CALLS):7.1f} us  begin, once per step")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=12, help="processes that compile kernels")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--fp8", action="store_true", help="keep keys and values in FP8 (default: off)")
    parser.add_argument("--short", action="store_true", help="measure two batches of each model (default: off)")
    parser.add_argument(
        "--steps-of-all-settings",
        type=int,
        default=300,
        help="measure all settings up to this step, three settings later",
    )
    args = parser.parse_args()
    work = [
        (model, settings, args.fp8)
        for model in args.models
        for settings in {(each.block, each.stages): each for each in settings_of(model, fp8=args.fp8)}.values()
    ]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(compile_settings, work, chunksize=1)
    print(torch.cuda.get_device_name(), torch.__version__, "triton", triton.__version__)
    for model in args.models:
        settings = settings_of(model, fp8=args.fp8)
        for steps in SHORT_STEPS if args.short else STEPS:
            every = args.short or steps <= args.steps_of_all_settings
            measure(model, lengths_after(steps), settings if every else settings[:3], fp8=args.fp8)
        if args.short:
            continue
        for rows in (8, 16):
            measure(model, np.linspace(300, 1700, rows).astype(np.int32), settings[:3], fp8=args.fp8)
        measure(model, np.full(256, 1024, np.int32), settings[:1], fp8=args.fp8)


if __name__ == "__main__":
    main()
