"""Host time of the launches of a layer outside of graphs: `python benchmarks/launch_times.py [MODEL …]`.

Each line has µs of host time of one call, median of several rounds, for steps of a few tokens, so that the device keeps
up and the host never waits for it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from cached_launch import CachedLaunch
from decode_kernels import StoreOnly
from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.kernels.attention.rotary import rotate_and_store
from minisgl.kernels.attention.rotation import Rotation
from minisgl.kernels.launch.dependent_launch_triton import dependent_launch
from minisgl.kernels.pointwise.activation_triton import _silu_and_mul
from minisgl.layers.activation import silu_and_mul
from minisgl.models.blocks.feed_forward import FeedForward
from minisgl.models.blocks.self_attention import Angles
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder

TOKENS = (4, 16, 300)
CALLS, ROUNDS = 40, 15


def host_microseconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - began) * 1e6 / CALLS)
    return median(times[2:])


def calls_of(model: Decoder, tokens: int) -> dict[str, Callable[[], object]]:
    config, layer = model.config, model.layers[0]
    block, attention = layer.feed_forward, layer.attention
    sizes = config.layers[0].feed_forward
    assert isinstance(block, FeedForward) and sizes is not None
    of, inner_size = config.attention, sizes.intermediate_size

    def draw(width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(tokens, width, device="cuda").to(dtype)

    x, residual, cos_sin = draw(config.hidden_size), draw(config.hidden_size), draw(of.head_dim, torch.float32)
    heads = [of.num_heads, of.num_kv_heads, of.num_kv_heads]
    qkv, wide = draw(sum(heads) * of.head_dim), draw(2 * inner_size)
    attended, inner = draw(heads[0] * of.head_dim), draw(inner_size)
    store = StoreOnly(model, tokens)
    angles = Angles(model.rotary, torch.arange(tokens, device="cuda"))

    def rotate() -> object:
        q, k, v = qkv.view(tokens, -1, of.head_dim).split(heads, dim=1)
        rotation = Rotation(cos_sin, attention.q_norm, attention.k_norm, 1e-6)
        return rotate_and_store(q, k, v, rotation, store.keys[0], store.values[0], store.locations, 0)

    cached = CachedLaunch(_silu_and_mul)
    out = torch.empty_like(inner)
    early = dependent_launch(out.device)
    grid = (tokens, -(-inner_size // 1024), 1)

    def cached_silu() -> None:
        cached(grid, wide, out, inner_size, BLOCK=1024, GELU=False, num_warps=4, **early)

    def plain_silu() -> None:
        _silu_and_mul[grid](wide, out, inner_size, BLOCK=1024, GELU=False, num_warps=4, **early)

    cached_silu()
    cached_silu()
    torch.testing.assert_close(out, silu_and_mul(wide))
    return {
        "torch.empty": lambda: torch.empty((tokens, config.hidden_size), dtype=torch.bfloat16, device="cuda"),
        "norm": lambda: block.norm.forward(x, residual),
        "qkv": lambda: attention.qkv.weight.product(x, attention.qkv.bias),
        "rotate and store": rotate,
        "o": lambda: attention.out.forward(attended),
        "gate_up": lambda: block.gate_up.weight.product(x, block.gate_up.bias),
        "silu, launch alone": plain_silu,
        "silu, cached launch": cached_silu,
        "silu": lambda: silu_and_mul(wide),
        "down": lambda: block.down.forward(inner),
        "layer without attention": lambda: layer.forward(x, residual, angles, store),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["qwen2.5-0.5b", "qwen3-0.6b"])
    args = parser.parse_args()
    with torch.inference_mode():
        for name in args.models:
            config = ModelConfig.parse({**BUILTIN_CONFIGS[name], "num_hidden_layers": 1})
            model = Decoder(config, TensorParallel(), torch.bfloat16, "cuda", max_position=64)
            for source in model.parameters.sources:
                source.into.normal_(0.0, 0.02)
            rows = [calls_of(model, tokens) for tokens in TOKENS]
            print(f"{name}: host µs of a call for {', '.join(map(str, TOKENS))} tokens")
            for kernel in rows[0]:
                times = "  ".join(f"{host_microseconds(calls[kernel]):7.1f}" for calls in rows)
                print(f"  {kernel:24} {times}", flush=True)


if __name__ == "__main__":
    main()
