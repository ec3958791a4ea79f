"""One row times the FP8 weights of a layer of Qwen3-14B: `python benchmarks/fp8_row.py [--candidates]`.

Times are µs in a CUDA graph with weights that do not stay in the L2 cache: of each product with the operations around
it, and of a chain of layers without attention, with FP8 weights in registers, with those on tensor cores, and in bf16.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from graph_timing import microseconds
from minisgl.kernels.linear.dense_skinny_triton import normed_linear, skinny_linear
from minisgl.kernels.linear.fp8_gemv_gluon import RowTile, fp8_row, normed_fp8_row, row_tile
from minisgl.kernels.linear.fp8_skinny_gluon import fp8_linear, fp8_tile
from minisgl.kernels.pointwise.fp8_rows import BLOCK
from minisgl.kernels.pointwise.quantize_rows import quantize_rows
from minisgl.kernels.pointwise.quantize_rows_triton import rms_norm_fp8, silu_and_mul_fp8
from minisgl.layers.activation import silu_and_mul

HIDDEN, QKV, HEADS, INNER, EPS = 5120, 7168, 5120, 17408, 1e-6
COPIES, BANDWIDTH = 6, {"h200": 4.3e12, "h100": 3.0e12}


class Product(NamedTuple):
    outputs: int
    """Rows of W."""
    inputs: int
    normed: bool
    gated: bool


PRODUCTS = {
    "qkv": Product(QKV, HIDDEN, normed=True, gated=False),
    "o": Product(HIDDEN, HEADS, normed=False, gated=False),
    "gate_up": Product(2 * INNER, HIDDEN, normed=True, gated=True),
    "down": Product(HIDDEN, INNER, normed=False, gated=False),
}


def candidates(product: Product) -> list[RowTile]:
    """Tiles to compare."""
    if product.inputs == INNER:
        shapes = [(4, 8, 8), (2, 8, 8), (1, 8, 8)]
        limits = [(132, None), (264, 128), (396, 128), (10000, 128), (264, 168), (396, 168)]
    else:
        shapes = [(8, 8, 4), (4, 8, 4), (2, 8, 4), (8, 4, 8)]
        if product.gated:
            shapes = [(outputs // 2, vector, warps) for outputs, vector, warps in shapes]
        limits = [(264, None), (396, 168), (528, 128), (660, 96), (792, 128), (528, 168)]
    found = []
    for (outputs, vector, warps), (programs, registers) in itertools.product(shapes, limits):
        # Registers of 256 threads or more would not fit.
        if registers is None or registers * warps * 32 <= 65536:
            found.append(RowTile(outputs, vector, warps, programs, registers))
    return found


class Weights(NamedTuple):
    values: torch.Tensor
    scales: torch.Tensor
    dense: torch.Tensor


def draw(product: Product) -> Weights:
    values = torch.randn(product.outputs, product.inputs, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    scales = torch.rand(product.outputs // BLOCK, product.inputs // BLOCK, device="cuda") + 0.5
    scales *= product.inputs**-0.5
    blocks = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return Weights(values, scales, (values.float() * blocks).bfloat16())


X = {size: torch.randn(1, size, device="cuda", dtype=torch.bfloat16) for size in (HIDDEN, INNER)}
STREAM = torch.randn(1, HIDDEN, device="cuda", dtype=torch.bfloat16)
SCRATCH = STREAM.clone()
GAIN = torch.rand(HIDDEN, device="cuda", dtype=torch.bfloat16) + 0.5
EXACT: dict[Product, torch.Tensor] = {}
Step = Callable[[torch.Tensor, torch.Tensor, Weights], tuple[torch.Tensor, torch.Tensor]]
"""Input, residual stream and weights to output and residual stream."""


def in_registers(product: Product, tile: RowTile | None = None) -> Step:
    def run(x: torch.Tensor, stream: torch.Tensor, w: Weights) -> tuple[torch.Tensor, torch.Tensor]:
        if not product.normed:
            return fp8_row(x, w.values, w.scales, tile=tile), stream
        return normed_fp8_row(x, stream, GAIN, EPS, w.values, w.scales, gated=product.gated, tile=tile)

    return run


def on_tensor_cores(product: Product) -> Step:
    tile = fp8_tile(1, product.outputs, product.inputs, in_parts=not product.normed)
    assert tile is not None

    def run(x: torch.Tensor, stream: torch.Tensor, w: Weights) -> tuple[torch.Tensor, torch.Tensor]:
        if product.inputs == INNER:
            rows = quantize_rows(x) if x.shape[1] == INNER else silu_and_mul_fp8(x)
        else:
            # The norm adds to the stream in place.
            rows = rms_norm_fp8(x, SCRATCH, GAIN, EPS) if product.normed else quantize_rows(x)
        return fp8_linear(rows, w.values, w.scales, tile), stream

    return run


def dense(product: Product) -> Step:
    def run(x: torch.Tensor, stream: torch.Tensor, w: Weights) -> tuple[torch.Tensor, torch.Tensor]:
        if not product.normed:
            return skinny_linear(x, w.dense), stream
        return normed_linear(x, stream, GAIN, EPS, w.dense, gated=product.gated)

    return run


def exact(product: Product, w: Weights) -> torch.Tensor:
    x = X[product.inputs].double()
    if product.normed:
        x = (X[HIDDEN] + STREAM).double()
        x = torch.nn.functional.rms_norm(x, (HIDDEN,), GAIN.double(), EPS).bfloat16().double()
    blocks = w.scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1).double()
    out = x @ (w.values.double() * blocks).T
    return silu_and_mul(out) if product.gated else out


def measure(name: str, product: Product, layers: list[Weights], what: str, step: Step, floor: float) -> float:
    error = 0.0
    if not what.startswith("tensor"):
        if product not in EXACT:
            EXACT[product] = exact(product, layers[0]).float()
        expected = EXACT[product]
        ours = step(X[product.inputs], STREAM, layers[0])[0].float()
        error = float((ours - expected).norm() / expected.norm())
    took = microseconds(lambda i: step(X[product.inputs], STREAM, layers[i % COPIES]), 3 * COPIES)
    wrong = "" if error < 6e-3 else f"WRONG {error:.1e}"
    print(f"{name:8} {what:56} {took:7.1f}  {floor / took:.2f} of the floor {wrong}", flush=True)
    return took


def chain(layers: dict[str, list[Weights]], steps: dict[str, Step]) -> float:
    def layer(i: int) -> torch.Tensor:
        x, stream = X[HIDDEN], STREAM
        for j in range(2):
            qkv, stream = steps["qkv"](x, stream, layers["qkv"][(i + j) % COPIES])
            heads = qkv[..., :HEADS] if qkv.dim() == 2 else qkv[0, :, :HEADS].bfloat16()
            x, stream = steps["o"](heads, stream, layers["o"][(i + j) % COPIES])
            x, stream = steps["gate_up"](x, stream, layers["gate_up"][(i + j) % COPIES])
            x, stream = steps["down"](x, stream, layers["down"][(i + j) % COPIES])
        return x

    return microseconds(lambda i: layer(2 * i), COPIES) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--candidates", action="store_true", help="compare tiles")
    parser.add_argument("--compile", metavar="I/N", help="only launch each I-th of N kernels, to compile them")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no measurement later than this")
    args = parser.parse_args()
    began = time.monotonic()
    if args.compile:
        part, of = map(int, args.compile.split("/"))
        every = [(product, tile) for product in PRODUCTS.values() for tile in candidates(product)]
        for product, tile in every[part::of]:
            try:
                in_registers(product, tile)(X[product.inputs], STREAM, draw(product))
            except Exception as error:
                print(tile, type(error).__name__, str(error)[:80], flush=True)
        return
    gpu = torch.cuda.get_device_name()
    bandwidth = next((value for name, value in BANDWIDTH.items() if name in gpu.lower()), 3.0e12)
    print(f"{gpu}, floors at {bandwidth / 1e12} TB/s")
    layers = {name: [draw(product) for _ in range(COPIES)] for name, product in PRODUCTS.items()}
    chosen: dict[str, dict[str, Step]] = {"registers": {}, "tensor cores": {}, "bf16": {}, "best": {}}
    sizes = 0
    for name, product in PRODUCTS.items():
        size = product.outputs * product.inputs
        sizes += size
        floor = size / bandwidth * 1e6
        tile = row_tile(product.outputs // (2 if product.gated else 1), product.inputs, gated=product.gated)
        for what, step in (
            (f"registers {tuple(tile)}", in_registers(product)),
            ("tensor cores", on_tensor_cores(product)),
            ("bf16", dense(product)),
        ):
            measure(name, product, layers[name], what, step, 2 * floor if what == "bf16" else floor)
            chosen[what.partition(" (")[0]][name] = step
        best = float("inf")
        for tile in candidates(product) if args.candidates else ():
            if time.monotonic() - began > args.seconds:
                break
            try:
                step = in_registers(product, tile)
                took = measure(name, product, layers[name], f"candidate {tuple(tile)}", step, floor)
            except Exception as error:
                print(name, tuple(tile), type(error).__name__, str(error)[:80], flush=True)
                continue
            if took < best:
                best, chosen["best"][name] = took, step
    for what, steps in chosen.items():
        if len(steps) == len(PRODUCTS):
            took = chain(layers, steps)
            floor = sizes * (2 if what == "bf16" else 1) / bandwidth * 1e6
            print(f"layer without attention, {what:14} {took:7.1f}  {floor / took:.2f} of the floor", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
