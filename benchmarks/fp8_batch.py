"""Products of batches with FP8 weights: `python benchmarks/fp8_batch.py 14b [--per-channel] --rows 64 256`.

Times are µs of one call in a CUDA graph, with weights that do not stay in the L2 cache: `torch` (cuBLAS for blocks;
`torch fast` leaves sums to the tensor cores), the kernel for up to 64 rows (`few`), and for blocks the one for more
(`batch`, with its share: groups of 64 rows in a tile, whole tiles, parts, parts of a tile, blocks of a part). With
--splits all shares are timed. `chosen` is what the engine takes. --sums prints the errors of sums of positive numbers
instead.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial

import torch

from graph_timing import microseconds
from minisgl.kernels.linear.fp8_persistent_gluon import Share, fits, fp8_batch, multiprocessors, share, shares
from minisgl.kernels.linear.fp8_skinny_gluon import fp8_linear, fp8_tile
from minisgl.kernels.pointwise.fp8_rows import BLOCK, Fp8Rows, dequantize_rows
from minisgl.kernels.pointwise.quantize_rows import quantize_rows
from minisgl.layers.weights.fp8 import Fp8Weight, quantize_channels

SHAPES = {
    "8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
    "14b": {"qkv": (7168, 5120), "o": (5120, 5120), "gate_up": (34816, 5120), "down": (5120, 17408)},
    "32b": {"qkv": (10240, 5120), "o": (5120, 8192), "gate_up": (51200, 5120), "down": (5120, 25600)},
}
IN_PARTS = ("o", "down")
BANDWIDTH, PEAK, L2_BYTES, CALLS = 4.25e12, 1979e12, 130_000_000, 12


def random_weight(outputs: int, inputs: int, per_channel: bool) -> Fp8Weight:
    weight = torch.randn(outputs, inputs, device="cuda") * 0.02
    if per_channel:
        return quantize_channels(weight)
    blocks = weight.view(outputs // BLOCK, BLOCK, inputs // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448
    return Fp8Weight((blocks / scales[:, None, :, None]).view_as(weight).to(torch.float8_e4m3fn), scales)


def in_torch(x: Fp8Rows, fast: bool, weight: Fp8Weight) -> torch.Tensor:
    scales = (x.scales.T, weight.scales.T)
    out: torch.Tensor = torch._scaled_mm(
        x.values, weight.values.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return out[: x.rows]


def in_batch(x: Fp8Rows, work: Share, weight: Fp8Weight) -> torch.Tensor:
    return fp8_batch(x, weight.values, weight.scales, work)


def print_errors(rows: int, outputs: int, inputs: int) -> None:
    """Print the relative errors of a product of positive numbers, whose sums only grow."""
    weight = random_weight(outputs, inputs, True)
    weight = Fp8Weight(weight.values.float().abs().to(torch.float8_e4m3fn), weight.scales)
    x = quantize_rows(torch.rand(rows, inputs, device="cuda").bfloat16(), per_row=True)
    exact = dequantize_rows(x).double() @ weight.dequantized(torch.float32).double().T
    products = {"torch": in_torch(x, False, weight), "torch fast": in_torch(x, True, weight)}
    for label, product in products.items():
        error, mean = (product - exact).norm() / exact.norm(), (product / exact).mean()
        print(f"{rows} rows, {inputs} inputs, {label}: error {error:.4f}, mean ratio {mean:.4f}", flush=True)


def measure(name: str, rows: int, outputs: int, inputs: int, splits: bool, per_channel: bool) -> float:
    """Print the times of a product; returns the time of what the engine takes."""
    programs = multiprocessors(torch.device("cuda"))
    count = min(6, max(2, math.ceil(L2_BYTES / outputs / inputs)))
    weights = [random_weight(outputs, inputs, per_channel) for _ in range(count)]
    x = quantize_rows(torch.randn(rows, inputs, device="cuda").bfloat16(), per_row=per_channel)
    times: dict[str, float] = {}

    def add(label: str, product: Callable[[Fp8Weight], object]) -> None:
        times[label] = microseconds(lambda number: product(weights[number % len(weights)]), CALLS)

    add("torch", partial(in_torch, x, False))
    if per_channel:
        add("torch fast", partial(in_torch, x, True))
    tile = fp8_tile(rows, outputs, inputs, in_parts=name in IN_PARTS)
    if tile is not None:
        add("few", lambda weight: fp8_linear(x, weight.values, weight.scales, tile))
    taken = "few" if tile is not None else "torch fast" if per_channel else "torch"
    if not per_channel:
        chosen = share(rows, outputs, inputs, programs)
        for work in shares(rows, outputs, inputs, programs) if splits else (chosen,):
            add(f"batch {tuple(work)}", partial(in_batch, x, work))
        if fits(rows, outputs, inputs, programs):
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
    parser.add_argument("--per-channel", action="store_true", help="a scale per row and output instead of blocks")
    parser.add_argument("--sums", action="store_true", help="errors of sums of positive numbers")
    args = parser.parse_args()
    print(torch.cuda.get_device_name())
    shapes = SHAPES[args.model]
    for rows in args.rows:
        if args.sums:
            print_errors(rows, *shapes["down"])
            continue
        total = sum(measure(name, rows, *shape, args.splits, args.per_channel) for name, shape in shapes.items())
        print(f"{args.model}, {rows} rows: layer {total:.1f}", flush=True)


if __name__ == "__main__":
    main()
