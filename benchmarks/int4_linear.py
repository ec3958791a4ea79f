"""Products of Qwen3-14B with weights of 4 bits, beside bf16 and the roofline: `python benchmarks/int4_linear.py`.

Times are µs of one call in a CUDA graph of many calls, with weights that do not stay in the L2 cache. `parts`: partial
sums that the next norm adds up. `gated`: with SiLU × up. With --tiles other tiles than the chosen one are timed, too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from graph_timing import microseconds
from minisgl.kernels.linear.int4_choose import Int4Tile, int4_gated, int4_linear, int4_tile, spans_tile
from minisgl.kernels.linear.int4_gemv_gluon import RowTile
from minisgl.kernels.linear.int4_packed import INPUTS, OUTPUTS, PIECE, pack_scales
from minisgl.kernels.linear.int4_split_k_gluon import BatchTile
from minisgl.kernels.linear.int4_stream_k_gluon import SpansTile
from minisgl.layers.weights.dense import DenseWeight
from minisgl.layers.weights.int4 import Int4Weight

ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
SHAPES = {"qkv": (7168, 5120), "o": (5120, 5120), "gate_up": (34816, 5120), "down": (5120, 17408)}
IN_PARTS = ("o", "down")
BANDWIDTH = {"NVIDIA H200": 4.25e12, "NVIDIA H100 80GB HBM3": 3.1e12}
PEAK = 790e12
GROUP = 128


def random_weight(outputs: int, inputs: int) -> Int4Weight:
    words = torch.empty((outputs // OUTPUTS, inputs // INPUTS * PIECE), device="cuda", dtype=torch.int32)
    scales = torch.rand(outputs, inputs // GROUP, device="cuda") * inputs**-0.5 / 4.6
    zeros = torch.randint(0, 16, scales.shape, device="cuda", dtype=torch.int32)
    return Int4Weight(words.random_(-(1 << 31), (1 << 31) - 1), pack_scales(scales.to(torch.float16), zeros))


def other_tiles(name: str, rows: int) -> Iterator[Int4Tile]:
    if rows == 1:
        splits = (2, 3, 4, 5, 6, 8, 10) if name in IN_PARTS else (1,)
        yield from (RowTile(count, warps, ahead) for count in splits for warps in (2, 4) for ahead in (2, 3, 5))
    if rows <= 128:
        size = max(8, 1 << (rows - 1).bit_length())
        yield from (
            spans_tile(size, *SHAPES[name], ahead=ahead, slots=slots, warps=warps, registers=registers)
            for warps, registers in ((4, 128), (4, 168), (4, 255), (8, 128), (8, 255))
            for ahead, slots in ((1, 3), (2, 2), (4, 2))
            if slots * size * ahead * 256 <= (200 << 10) // ((1 << 16) // (32 * warps * registers))
        )
    if rows > 64:
        yield from (BatchTile(128, 64, count, 4, 4, copied) for count in (1, 3, 6) for copied in (64, 128))
    if rows > 128:
        yield from (BatchTile(256, 64, count, 3, 2, 64) for count in (1, 3, 6))


def in_bf16(x: torch.Tensor, weights: list[DenseWeight], i: int) -> object:
    return weights[i % len(weights)].product(x)


def in_int4(x: torch.Tensor, weights: list[Int4Weight], tile: Int4Tile | None, in_parts: bool, i: int) -> object:
    weight = weights[i % len(weights)]
    if tile is None:
        return F.linear(x, weight.dequantized(x.dtype))
    return int4_linear(x, weight.values, weight.scales, tile, in_parts=in_parts)


def gated(x: torch.Tensor, weights: list[Int4Weight], i: int) -> object:
    return int4_gated(x, *weights[i % len(weights)].tensors)


def measure(name: str, many_rows: Sequence[int], *, tiles: bool) -> None:
    outputs, inputs = SHAPES[name]
    in_parts = name in IN_PARTS
    bandwidth = BANDWIDTH.get(torch.cuda.get_device_name(), 4.25e12)
    weights = [random_weight(outputs, inputs) for _ in range(max(2, math.ceil(2e8 / (outputs * inputs / 2))))]
    dense = [
        DenseWeight(weights[0].dequantized(torch.bfloat16))
        for _ in range(max(2, math.ceil(2e8 / (outputs * inputs * 2))))
    ]
    for rows in many_rows:
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        num_bytes = outputs * inputs * (0.5 + 4 / GROUP) + 2 * rows * (inputs + outputs)
        floor = 1e6 * max(num_bytes / bandwidth, 2 * rows * outputs * inputs / PEAK)

        chosen = int4_tile(rows, outputs, inputs, in_parts=in_parts, groups=INPUTS // GROUP)
        line = f"{name} M={rows} floor {floor:.1f} bf16 {microseconds(partial(in_bf16, x, dense), 24):.1f}"
        line += f" | INT4 {microseconds(partial(in_int4, x, weights, chosen, in_parts), 24):.1f}"
        if name == "gate_up" and isinstance(chosen, RowTile | SpansTile):
            line += f" | gated {microseconds(partial(gated, x, weights), 24):.1f}"
        for tile in other_tiles(name, rows) if tiles else ():
            other = microseconds(partial(in_int4, x, weights, tile, in_parts), 24)
            line += f" | {'x'.join(map(str, tile))} {other:.1f}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(SHAPES), help="default: all products of a layer")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--tiles", action="store_true", help="time other tiles as well")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "µs")
    with torch.inference_mode():
        for name in args.names:
            measure(name, args.rows, tiles=args.tiles)


if __name__ == "__main__":
    main()
