"""Experts of Qwen3-30B-A3B, with the roofline: `python benchmarks/experts.py [TOKENS …] [--fp8] [--int4]`.

Times are µs of one layer's router, experts and weighted sum in a CUDA graph of many layers, with weights that do not
stay in the L2 cache, for each implementation; with `--fp8` also with weights in FP8 blocks, with `--int4` in groups of
128. The roofline is one read of the weights of the selected experts in bf16, or in INT4. With `--alike 0.7` tokens
have this share of their variance in common, so that many of them select the same experts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from graph_timing import microseconds
from minisgl.kernels.experts.gemv_gluon import run_experts_gemv
from minisgl.kernels.experts.grouped_gemm_triton import Scales, Tiles, choose_tiles, run_chosen, weighted_sum
from minisgl.kernels.experts.skinny_gluon import run_experts_rows
from minisgl.kernels.linear.int4_packed import INPUTS, OUTPUTS, PIECE, pack_scales
from minisgl.kernels.pointwise.fp8_rows import BLOCK, E4M3_MAX
from minisgl.layers.activation import silu_and_mul
from minisgl.layers.weights.dense import DenseWeight
from minisgl.layers.weights.fp8 import Fp8Weight
from minisgl.layers.weights.int4 import Int4Weight
from minisgl.layers.weights.weight import Weight
from minisgl.moe.experts import experts_grouped
from minisgl.moe.mixture import mixture_of_experts
from minisgl.moe.routing import route

HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 768, 128, 8
COPIES, CALLS = 4, 12
BANDWIDTH, PEAK = 4.25e12, 790e12
TOKENS = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
CANDIDATES = {
    16: [Tiles(16, 64, 128, 128, 128, 3, 4), Tiles(16, 64, 64, 128, 64, 6, 4)],
    32: [Tiles(32, 64, 64, 128, 64, 4, 4), Tiles(32, 64, 128, 128, 128, 3, 4)],
    64: [Tiles(64, 64, 64, 128, 64, 4, 4), Tiles(64, 128, 64, 128, 64, 4, 8), Tiles(64, 128, 64, 256, 64, 4, 8)],
    128: [
        Tiles(128, 64, 64, 128, 64, 3, 4),
        Tiles(128, 64, 64, 128, 64, 4, 4),
        Tiles(128, 64, 64, 128, 64, 4, 8),
        Tiles(128, 128, 64, 128, 64, 4, 8),
        Tiles(128, 128, 64, 256, 64, 3, 8),
        Tiles(128, 128, 64, 256, 64, 4, 8),
    ],
    256: [Tiles(256, 64, 64, 128, 64, 3, 8), Tiles(256, 64, 64, 128, 64, 4, 8)],
}
FP8_CANDIDATES = [
    Tiles(rows, outputs, 128, down, 128, stages, warps)
    for rows in (16, 32, 64, 128)
    for outputs, down, stages, warps in ((64, 128, 3, 4), (64, 64, 3, 4), (64, 64, 4, 4), (128, 128, 3, 8))
]
Implementation = Callable[[torch.Tensor, torch.Tensor, DenseWeight, DenseWeight], torch.Tensor]


def by_vectors(x: torch.Tensor, logits: torch.Tensor, gate_up: DenseWeight, down: DenseWeight) -> torch.Tensor:
    return run_experts_gemv(x, logits, None, gate_up.values, down.values, TOP_K, renormalize=True)


def by_tiles(
    x: torch.Tensor, logits: torch.Tensor, gate_up: DenseWeight, down: DenseWeight, tiles: Tiles
) -> torch.Tensor:
    weights, experts = route(logits, TOP_K, renormalize=True)
    return weighted_sum(run_chosen(x, experts, gate_up.values, down.values, tiles), weights)


def grouped(x: torch.Tensor, logits: torch.Tensor, gate_up: Weight, down: Weight) -> torch.Tensor:
    weights, experts = route(logits, TOP_K, renormalize=True)
    rows, places = experts_grouped(x, experts, gate_up.dequantized(x.dtype), down.dequantized(x.dtype), silu_and_mul)
    return weighted_sum(rows, weights, places)


def implementations(tokens: int) -> dict[str, Implementation]:
    found: dict[str, Implementation] = {"selected": selected}
    if tokens <= 8:
        found["vectors"] = by_vectors
    for rows, candidates in CANDIDATES.items():
        # On average, an expert has tokens / 16 rows.
        if tokens // 64 <= rows <= max(tokens // 4, 16):
            found |= {"x".join(map(str, tiles)): partial(by_tiles, tiles=tiles) for tiles in candidates}
    return found | {"grouped": grouped}


def quantized(weight: torch.Tensor) -> Fp8Weight:
    """[experts, out, in] in blocks."""
    experts, outputs, inputs = weight.shape
    blocks = weight.view(experts, outputs // BLOCK, BLOCK, inputs // BLOCK, BLOCK)
    scales = blocks.abs().amax((2, 4)).float() / E4M3_MAX
    values = (blocks / scales[:, :, None, :, None].bfloat16()).clamp(-E4M3_MAX, E4M3_MAX)
    return Fp8Weight(values.to(torch.float8_e4m3fn).view(weight.shape), scales)


Fp8Implementation = Callable[[torch.Tensor, torch.Tensor, Fp8Weight, Fp8Weight], torch.Tensor]


def fp8_selected(x: torch.Tensor, logits: torch.Tensor, gate_up: Fp8Weight, down: Fp8Weight) -> torch.Tensor:
    return mixture_of_experts(x, logits, gate_up, down, silu_and_mul, TOP_K, renormalize=True)


def fp8_by_rows(x: torch.Tensor, logits: torch.Tensor, gate_up: Fp8Weight, down: Fp8Weight) -> torch.Tensor:
    scales = Scales(gate_up.scales, down.scales)
    return run_experts_rows(x, *route(logits, TOP_K, renormalize=True), gate_up.values, down.values, scales)


def fp8_implementations(tokens: int) -> dict[str, Fp8Implementation]:
    found: dict[str, Fp8Implementation] = {"fp8 selected": fp8_selected, "fp8 rows": fp8_by_rows}
    for tiles in FP8_CANDIDATES:
        if not tokens // 64 <= tiles.rows <= max(tokens // 4, 16) or tokens == 1:
            continue

        def by_tiles(
            x: torch.Tensor, logits: torch.Tensor, gate_up: Fp8Weight, down: Fp8Weight, tiles: Tiles = tiles
        ) -> torch.Tensor:
            weights, experts = route(logits, TOP_K, renormalize=True)
            scales = Scales(gate_up.scales, down.scales)
            return weighted_sum(run_chosen(x, experts, gate_up.values, down.values, tiles, scales), weights)

        found["fp8 " + "x".join(map(str, tiles))] = by_tiles
    return found


GROUP = 128


def random_int4(outputs: int, inputs: int) -> Int4Weight:
    """[experts, out, in], of the size of `draw(…) * inputs**-0.5`."""
    words = torch.empty((EXPERTS, outputs // OUTPUTS, inputs // INPUTS * PIECE), device="cuda", dtype=torch.int32)
    scales = torch.rand(EXPERTS * outputs, inputs // GROUP, device="cuda") * inputs**-0.5 / 4.6
    zeros = torch.randint(0, 16, scales.shape, device="cuda", dtype=torch.int32)
    packed = pack_scales(scales.to(torch.bfloat16), zeros).unflatten(0, (EXPERTS, -1))
    return Int4Weight(words.random_(-(1 << 31), (1 << 31) - 1), packed)


Int4Implementation = Callable[[torch.Tensor, torch.Tensor, Int4Weight, Int4Weight], torch.Tensor]


def int4_selected(x: torch.Tensor, logits: torch.Tensor, gate_up: Int4Weight, down: Int4Weight) -> torch.Tensor:
    return mixture_of_experts(x, logits, gate_up, down, silu_and_mul, TOP_K, renormalize=True)


def int4_by_vectors(x: torch.Tensor, logits: torch.Tensor, gate_up: Int4Weight, down: Int4Weight) -> torch.Tensor:
    scales = Scales(gate_up.scales, down.scales)
    return run_experts_gemv(x, logits, None, gate_up.values, down.values, TOP_K, scales, renormalize=True)


def int4_by_rows(x: torch.Tensor, logits: torch.Tensor, gate_up: Int4Weight, down: Int4Weight) -> torch.Tensor:
    scales = Scales(gate_up.scales, down.scales)
    return run_experts_rows(x, *route(logits, TOP_K, renormalize=True), gate_up.values, down.values, scales)


def int4_by_tiles(x: torch.Tensor, logits: torch.Tensor, gate_up: Int4Weight, down: Int4Weight) -> torch.Tensor:
    weights, experts = route(logits, TOP_K, renormalize=True)
    tiles = choose_tiles(len(x) * TOP_K / EXPERTS, WIDTH, quantized=True)
    scales = Scales(gate_up.scales, down.scales)
    return weighted_sum(run_chosen(x, experts, gate_up.values, down.values, tiles, scales), weights)


def int4_implementations(tokens: int) -> dict[str, Int4Implementation]:
    found: dict[str, Int4Implementation] = {"int4 selected": int4_selected}
    if tokens <= 12:
        found["int4 vectors"] = int4_by_vectors
    return found | {"int4 rows": int4_by_rows, "int4 tiles": int4_by_tiles}


def choose_experts(x: torch.Tensor, routers: list[DenseWeight], call: int) -> object:
    return route(routers[call % COPIES].product(x), TOP_K, renormalize=True)


def selected(x: torch.Tensor, logits: torch.Tensor, gate_up: Weight, down: Weight) -> torch.Tensor:
    return mixture_of_experts(x, logits, gate_up, down, silu_and_mul, TOP_K, renormalize=True)


def draw(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", nargs="*", type=int, default=TOKENS, help="default: %(default)s")
    parser.add_argument("--fp8", action="store_true", help="also experts in FP8 blocks")
    parser.add_argument("--int4", action="store_true", help="also experts in INT4")
    parser.add_argument("--alike", type=float, default=0.0, metavar="SHARE", help="of the variance of tokens")
    parser.add_argument("--selected", action="store_true", help="only the implementations that are in use")
    args = parser.parse_args()
    started = time.monotonic()
    routers = [DenseWeight(draw(EXPERTS, HIDDEN) * HIDDEN**-0.5) for _ in range(COPIES)]
    gate_ups = [DenseWeight(draw(EXPERTS, 2 * WIDTH, HIDDEN) * HIDDEN**-0.5) for _ in range(COPIES)]
    downs = [DenseWeight(draw(EXPERTS, HIDDEN, WIDTH) * WIDTH**-0.5) for _ in range(COPIES)]
    fp8_gate_ups = [quantized(each.values) for each in gate_ups] if args.fp8 else []
    fp8_downs = [quantized(each.values) for each in downs] if args.fp8 else []
    int4_gate_ups = [random_int4(2 * WIDTH, HIDDEN) for _ in range(COPIES)] if args.int4 else []
    int4_downs = [random_int4(HIDDEN, WIDTH) for _ in range(COPIES)] if args.int4 else []
    shared = draw(1, HIDDEN)
    print(f"{torch.cuda.get_device_name()}; µs of a layer")
    for tokens in args.tokens:
        x = (1 - args.alike) ** 0.5 * draw(tokens, HIDDEN) + args.alike**0.5 * shared
        logits = routers[0].product(x)
        used = len(route(logits, TOP_K, renormalize=True)[1].unique())
        size = 3 * WIDTH * HIDDEN
        roofline = max(2 * used * size / BANDWIDTH, 2 * tokens * TOP_K * size / PEAK)
        int4_roofline = max(used * size * (0.5 + 4 / GROUP) / BANDWIDTH, 2 * tokens * TOP_K * size / PEAK)
        routing = microseconds(partial(choose_experts, x, routers), CALLS)
        rooflines = f"roofline {roofline * 1e6:.1f}, in INT4 {int4_roofline * 1e6:.1f}"
        print(f"T={tokens} {used} experts, {rooflines}, routing {routing:.1f}", flush=True)
        measure(tokens, x, routers, gate_ups, downs, implementations(tokens), args.selected)
        if args.fp8:
            measure(tokens, x, routers, fp8_gate_ups, fp8_downs, fp8_implementations(tokens), args.selected)
        if args.int4:
            measure(tokens, x, routers, int4_gate_ups, int4_downs, int4_implementations(tokens), args.selected)
    print(f"{time.monotonic() - started:.0f} s")


def measure(
    tokens: int,
    x: torch.Tensor,
    routers: list[DenseWeight],
    gate_ups: list[Any],
    downs: list[Any],
    candidates: Mapping[str, Callable[..., torch.Tensor]],
    only_selected: bool,
) -> None:
    exact = grouped(x, routers[0].product(x), gate_ups[0], downs[0]).float()
    for name, run in candidates.items():
        if only_selected and not name.endswith("selected"):
            continue

        def layer(i: int, run: Callable[..., torch.Tensor] = run) -> torch.Tensor:
            return run(x, routers[i % COPIES].product(x), gate_ups[i % COPIES], downs[i % COPIES])

        try:
            error = float((layer(0).float() - exact).norm() / exact.norm())
            took = microseconds(layer, CALLS)
            print(f"    {name:44} {took:8.1f}  {'' if error < 1e-2 else f'WRONG {error:.1e}'}", flush=True)
        except Exception as error:
            print(f"    {name:44} FAILED {type(error).__name__} {str(error)[:100]}", flush=True)
            torch.cuda.synchronize()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
