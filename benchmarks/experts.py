"""Experts of Qwen3-30B-A3B, with the roofline: `python benchmarks/experts.py [TOKENS …]`.

Times are µs of one layer's router, experts and weighted sum in a CUDA graph of many layers, with weights that do not
stay in the L2 cache, for each implementation. The roofline is one read of the weights of the selected experts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from graph_timing import microseconds
from minisgl.kernels.experts_triton import Tiles, run_chosen, weighted_sum
from minisgl.kernels.experts_vector_gluon import run_experts_vector
from minisgl.layers.activation import silu_and_mul
from minisgl.layers.linear import linear
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
Implementation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def by_vectors(x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return run_experts_vector(x, logits, gate_up, down, TOP_K, renormalize=True)


def by_tiles(
    x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, tiles: Tiles
) -> torch.Tensor:
    weights, experts = route(logits, TOP_K, renormalize=True)
    return weighted_sum(run_chosen(x, experts, gate_up, down, tiles), weights)


def grouped(x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    weights, experts = route(logits, TOP_K, renormalize=True)
    rows, places = experts_grouped(x, experts, gate_up, down, silu_and_mul)
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


def choose_experts(x: torch.Tensor, routers: list[torch.Tensor], call: int) -> object:
    return route(linear(x, routers[call % COPIES]), TOP_K, renormalize=True)


def selected(x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return mixture_of_experts(x, logits, gate_up, down, silu_and_mul, TOP_K, renormalize=True)


def draw(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", nargs="*", type=int, default=TOKENS, help="default: %(default)s")
    tokens_of = parser.parse_args().tokens
    started = time.monotonic()
    routers = [draw(EXPERTS, HIDDEN) * HIDDEN**-0.5 for _ in range(COPIES)]
    gate_ups = [draw(EXPERTS, 2 * WIDTH, HIDDEN) * HIDDEN**-0.5 for _ in range(COPIES)]
    downs = [draw(EXPERTS, HIDDEN, WIDTH) * WIDTH**-0.5 for _ in range(COPIES)]
    print(f"{torch.cuda.get_device_name()}; µs of a layer")
    for tokens in tokens_of:
        x = draw(tokens, HIDDEN)
        logits = linear(x, routers[0])
        used = len(route(logits, TOP_K, renormalize=True)[1].unique())
        size = 3 * WIDTH * HIDDEN
        roofline = max(2 * used * size / BANDWIDTH, 2 * tokens * TOP_K * size / PEAK)
        routing = microseconds(partial(choose_experts, x, routers), CALLS)
        exact = grouped(x, logits, gate_ups[0], downs[0]).float()
        print(f"T={tokens} {used} experts, roofline {roofline * 1e6:.1f}, routing {routing:.1f}", flush=True)
        for name, run in implementations(tokens).items():

            def layer(i: int, x: torch.Tensor = x, run: Implementation = run) -> torch.Tensor:
                return run(x, linear(x, routers[i % COPIES]), gate_ups[i % COPIES], downs[i % COPIES])

            try:
                error = float((layer(0).float() - exact).norm() / exact.norm())
                took = microseconds(layer, CALLS)
                print(f"    {name:32} {took:8.1f}  {'' if error < 1e-2 else f'WRONG {error:.1e}'}", flush=True)
            except Exception as error:
                print(f"    {name:32} FAILED {type(error).__name__} {str(error)[:100]}", flush=True)
                torch.cuda.synchronize()
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
