"""Products of batches with FP8 weights in blocks: `python benchmarks/fp8_batch.py 14b --rows 64 256`.

Times are µs of one call in a CUDA graph, with weights that do not stay in the L2 cache: cuBLAS, the kernel for up to 64
rows (`few`), and the one for more (`batch`, with its share: groups of 64 rows in a tile, whole tiles, parts, parts of a
tile, blocks of a part). With --splits all shares are timed. `chosen` is what the engine takes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial

import torch

from graph_timing import microseconds
from minisgl.kernels.fp8_batch_gluon import Share, fp8_batch, multiprocessors, share, shares, takes_batch
from minisgl.kernels.fp8_linear_gluon import fp8_linear, fp8_tile
from minisgl.kernels.fp8_rows import BLOCK, Fp8Rows
from minisgl.kernels.quantize_rows import quantize_rows
from minisgl.layers.fp8_weight import Fp8Weight

SHAPES = {
    "8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
    "14b": {"qkv": (7168, 5120), "o": (5120, 5120), "gate_up": (34816, 5120), "down": (5120, 17408)},
    "32b": {"qkv": (10240, 5120), "o": (5120, 8192), "gate_up": (51200, 5120), "down": (5120, 25600)},
}
IN_PARTS = ("o", "down")
BANDWIDTH, PEAK, L2_BYTES, CALLS = 4.25e12, 1979e12, 130_000_000, 12


def random_weight(outputs: int, inputs: int) -> Fp8Weight:
    weight = torch.randn(outputs, inputs, device="cuda") * 0.02
    blocks = weight.view(outputs // BLOCK, BLOCK, inputs // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448
    return Fp8Weight((blocks / scales[:, None, :, None]).view_as(weight).to(torch.float8_e4m3fn), scales)


def cublas(x: Fp8Rows, weight: Fp8Weight) -> torch.Tensor:
    out: torch.Tensor = torch._scaled_mm(
        x.values, weight.values.T, scale_a=x.scales.T, scale_b=weight.scales.T, out_dtype=torch.bfloat16
    )
    return out


def in_batch(x: Fp8Rows, work: Share, weight: Fp8Weight) -> torch.Tensor:
    return fp8_batch(x, weight.values, weight.scales, work)


def measure(name: str, rows: int, outputs: int, inputs: int, splits: bool) -> float:
    """Print the times of a product; returns the time of what the engine takes."""
    programs = multiprocessors(torch.device("cuda"))
    weights = [random_weight(outputs, inputs) for _ in range(min(6, max(2, math.ceil(L2_BYTES / outputs / inputs))))]
    x = quantize_rows(torch.randn(rows, inputs, device="cuda").bfloat16())
    times: dict[str, float] = {}

    def add(label: str, product: Callable[[Fp8Weight], object]) -> None:
        times[label] = microseconds(lambda number: product(weights[number % len(weights)]), CALLS)

    add("cublas", lambda weight: cublas(x, weight))
    tile = fp8_tile(rows, outputs, inputs, in_parts=name in IN_PARTS)
    if tile is not None:
        add("few", lambda weight: fp8_linear(x, weight.values, weight.scales, tile))
    chosen = share(rows, outputs, inputs, programs)
    for work in shares(rows, outputs, inputs, programs) if splits else (chosen,):
        add(f"batch {tuple(work)}", partial(in_batch, x, work))
    taken = "few" if tile is not None else "cublas"
    if takes_batch(rows, outputs, inputs, programs):
        taken = f"batch {tuple(chosen)}"
    moved = outputs * inputs + rows * inputs + 2 * rows * outputs
    floor = max(2 * rows * outputs * inputs / PEAK, moved / BANDWIDTH) * 1e6
    listed = "; ".join(f"{time:.1f} {label}" for label, time in sorted(times.items(), key=lambda entry: entry[1]))
    print(f"{name} {rows} rows, floor {floor:.1f}, chosen {times[taken]:.1f}: {listed}", flush=True)
    return times[taken]


def main() -> None:
    parser = argparse.ArgumentParser(description="Products of batches with FP8 weights.")
    parser.add_argument("model", choices=SHAPES, nargs="?", default="14b")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[16, 64, 65, 96, 128, 160, 192, 256, 512, 1024, 2048, 8192]
    )
    parser.add_argument("--splits", action="store_true", help="time all shares")
    args = parser.parse_args()
    print(torch.cuda.get_device_name())
    for rows in args.rows:
        total = sum(measure(name, rows, *shape, args.splits) for name, shape in SHAPES[args.model].items())
        print(f"{args.model}, {rows} rows: layer {total:.1f}", flush=True)


if __name__ == "__main__":
    main()
