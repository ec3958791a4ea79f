"""Matrix products of a decode batch, with cuBLAS and the roofline: `python benchmarks/batch_linear.py [MODEL …]`.

Times are µs of one call in a CUDA graph of many calls, with weights that do not stay in the L2 cache. Each product is
timed alone and in context: with the add + RMSNorm before the first or after the last product of a block, and with
SiLU × up.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from graph_timing import microseconds
from minisgl.kernels.linear.dense_split_k_gluon import Tile, batch_linear
from minisgl.kernels.pointwise.activation_triton import silu_and_mul_cuda
from minisgl.kernels.pointwise.norm_triton import rms_norm_cuda

ROWS = (16, 24, 32, 48, 64, 96, 128, 160, 192, 256)
SHAPES = {
    "0.6b": {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
    "14b": {"qkv": (7168, 5120), "o": (5120, 5120), "gate_up": (34816, 5120), "down": (5120, 17408)},
}
BANDWIDTH, PEAK = 4.25e12, 790e12
PROCESSES = 12

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SMALL_QKV = {
    16: [Tile(16, 64, 128, 1, 8, 4, 8)],
    32: [Tile(32, 64, 128, 1, 8, 4, 8)],
    64: [Tile(64, 64, 128, 1, 6, 4, 6), Tile(32, 64, 128, 1, 8, 4, 8)],
    128: [Tile(64, 64, 128, 1, 6, 4, 6), Tile(64, 64, 128, 1, 6, 4, 2)],
    192: [Tile(64, 128, 64, 1, 8, 4, 8), Tile(64, 128, 128, 1, 4, 4, 2)],
    256: [Tile(64, 128, 128, 1, 4, 4, 4), Tile(64, 128, 128, 1, 4, 4, 2), Tile(64, 128, 64, 1, 8, 4, 4)],
}
SMALL_LAST = {
    16: [Tile(16, 64, 128, 4, 6, 4, 6), Tile(16, 64, 128, 8, 3, 4, 3)],
    32: [Tile(32, 64, 128, 4, 6, 4, 6), Tile(32, 64, 128, 8, 3, 4, 3)],
    64: [Tile(64, 64, 128, 4, 6, 4, 6), Tile(64, 64, 128, 8, 3, 4, 3), Tile(32, 64, 128, 4, 6, 4, 6)],
    128: [Tile(64, 64, 128, 4, 6, 4, 6), Tile(64, 32, 128, 2, 6, 4, 6), Tile(64, 64, 128, 4, 6, 4, 2)],
    256: [Tile(64, 64, 128, 2, 6, 4, 6), Tile(64, 64, 128, 2, 6, 4, 2), Tile(64, 64, 128, 4, 3, 4, 3)],
}
SMALL_GATE_UP = {
    16: [Tile(16, 64, 128, 1, 8, 4, 8)],
    32: [Tile(32, 64, 128, 1, 8, 4, 8)],
    64: [Tile(64, 64, 128, 1, 6, 4, 6), Tile(32, 128, 128, 1, 4, 4, 4)],
    128: [Tile(64, 128, 128, 1, 4, 4, 4), Tile(128, 64, 128, 1, 4, 8, 4), Tile(64, 128, 128, 1, 4, 4, 1)],
    256: [Tile(128, 128, 64, 1, 6, 8, 6), Tile(64, 128, 64, 1, 4, 4, 4), Tile(128, 128, 64, 1, 6, 8, 2)],
}
LARGE_QKV = {
    32: [Tile(32, 64, 128, 1, 8, 4, 8), Tile(32, 64, 128, 1, 8, 4, 2)],
    64: [Tile(64, 64, 128, 1, 6, 4, 6), Tile(64, 64, 128, 1, 6, 4, 1)],
    128: [Tile(64, 128, 128, 1, 4, 4, 1), Tile(128, 64, 128, 1, 4, 8, 1)],
}
LARGE_LAST = {
    32: [Tile(32, 128, 128, 3, 5, 8, 1), Tile(32, 128, 128, 3, 5, 8, 5), Tile(32, 64, 128, 1, 8, 4, 8)],
    64: [Tile(64, 128, 128, 3, 4, 4, 1), Tile(64, 128, 128, 3, 4, 4, 4)],
    128: [Tile(128, 128, 64, 3, 6, 8, 1), Tile(128, 128, 64, 3, 6, 8, 6), Tile(128, 256, 64, 6, 4, 8, 1)],
}
CANDIDATES = {
    "0.6b": {"qkv": SMALL_QKV, "o": SMALL_LAST, "gate_up": SMALL_GATE_UP, "down": SMALL_LAST},
    "14b": {"qkv": LARGE_QKV, "o": LARGE_LAST, "gate_up": {}, "down": LARGE_LAST},
}


def candidates(model: str, name: str, rows: int) -> list[Tile]:
    by_rows = CANDIDATES[model][name]
    return by_rows[min(size for size in by_rows if size >= rows)] if rows <= max(by_rows, default=0) else []


def measure(model: str, name: str) -> None:
    outputs, inputs = SHAPES[model][name]
    copies = max(2, math.ceil(2e8 / (outputs * inputs * 2)))
    weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5 for _ in range(copies)]
    for rows in ROWS:
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        roofline = max(
            2 * rows * outputs * inputs / PEAK, 2 * (outputs * inputs + rows * (inputs + outputs)) / BANDWIDTH
        )
        exact = x.double() @ weights[0].double().T
        alone, in_context = times(name, x, weights, F.linear)
        line = [f"{model} {name} M={rows} roofline {roofline * 1e6:.1f} cuBLAS {alone:.1f} {in_context:.1f} |"]
        for tile in candidates(model, name, rows):
            linear = partial(batch_linear, tile=tile)
            label = "x".join(map(str, tile))
            try:
                result = linear(x, weights[0]).double()
                result = result.sum(0) if result.dim() == 3 else result
                error = float((result - exact).norm() / exact.norm())
                alone, in_context = times(name, x, weights, linear)
                wrong = "" if error < 6e-3 else f" WRONG {error:.1e}"
                line.append(f"{label} {alone:.1f} {in_context:.1f}{wrong} |")
            except Exception as error:
                line.append(f"{label} FAILED {type(error).__name__} {str(error)[:80]} |")
                torch.cuda.synchronize()
        print(*line, flush=True)


def times(name: str, x: torch.Tensor, weights: list[torch.Tensor], linear: Linear) -> tuple[float, float]:
    """Microseconds of one product, alone and in context."""
    first = name in ("qkv", "gate_up")
    hidden = x.shape[1] if first else len(weights[0])
    gain = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn(len(x), hidden, device="cuda", dtype=torch.bfloat16)

    def in_context(i: int) -> object:
        if not first:
            return rms_norm_cuda(linear(x, weights[i]), residual, gain, 1e-6)
        result = linear(rms_norm_cuda(x, residual, gain, 1e-6), weights[i])
        return silu_and_mul_cuda(result) if name == "gate_up" else result

    copies = len(weights)
    calls = max(copies, 24 // copies * copies)
    alone = microseconds(lambda i: linear(x, weights[i % copies]), calls)
    return alone, microseconds(lambda i: in_context(i % copies), calls)


def compile_share(models: list[str], share: int, shares: int) -> None:
    """Compile every `shares`-th kernel, beginning with `share`, into Triton's cache."""
    jobs = {
        (tile._replace(splits=0), tile.splits > 1): (model, name, tile, rows)
        for model in models
        for name in SHAPES[model]
        for rows in ROWS
        for tile in candidates(model, name, rows)
    }
    for model, name, tile, rows in list(jobs.values())[share::shares]:
        outputs, inputs = SHAPES[model][name]
        x, weight = (torch.zeros(size, inputs, device="cuda", dtype=torch.bfloat16) for size in (rows, outputs))
        try:
            batch_linear(x, weight, tile)
        except Exception as error:
            print("FAILED", tile, name, type(error).__name__, str(error)[:300], flush=True)
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + 5
        while not done.query():
            if time.monotonic() > deadline:
                print("HANGS", tile, name, flush=True)
                os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(SHAPES), help="default: all")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.share is not None:
        compile_share(args.models, args.share, PROCESSES)
        return
    started = time.monotonic()
    command = [sys.executable, os.path.abspath(__file__), *args.models]
    running = [subprocess.Popen([*command, "--share", str(i)]) for i in range(PROCESSES)]
    if any([process.wait() for process in running]):
        sys.exit("some kernels hang")
    print(f"{torch.cuda.get_device_name()}; compiled in {time.monotonic() - started:.0f} s; µs alone and in context")
    with torch.inference_mode():
        for model in args.models:
            for name in SHAPES[model]:
                measure(model, name)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
