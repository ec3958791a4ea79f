"""Kernels of a decode step, with the roofline:
`python benchmarks/decode_kernels.py [--tune] [--models …] [--rows …] [--variants …]`.

Each line has µs of one call in a CUDA graph of many calls with different weights, so that none stays in the L2 cache.
`roofline`: bytes read and written divided by the bandwidth; `early`: with programmatic dependent launch; `plain`:
without it; `parts`: with it, but separate kernels for norm, product and activation. `layer` is a whole decoder layer
except for the attention; `layer + xqa`, `layer + split` and `layer + balanced` include it, with 512 tokens per row.
`--tune` times the tiles of the vector kernel with one row instead.
"""

from __future__ import annotations

import argparse
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from unittest import mock

import numpy as np
import torch

from minisgl.attention import split_backend, xqa_backend
from minisgl.attention.backend import AttentionShape, DecodeBackend
from minisgl.attention.balanced_backend import BalancedDecode
from minisgl.attention.batch import AttentionBatch, PagedKV
from minisgl.attention.paged import PagedAttention
from minisgl.attention.split_backend import SplitDecode
from minisgl.attention.torch_backend import TorchDecode, TorchPrefill
from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.bench.roofline import hardware_of
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.kernels.attention.rotary import rotate_and_store
from minisgl.kernels.attention.rotation import Rotation
from minisgl.kernels.attention.stored_kv import UNSCALED
from minisgl.kernels.launch import dependent_launch_triton
from minisgl.kernels.linear import dense_skinny_triton
from minisgl.kernels.pointwise.norm import add_rms_norm
from minisgl.layers.activation import silu_and_mul
from minisgl.layers.weights.dense import DenseWeight
from minisgl.layers.weights.inputs import PreNorm
from minisgl.models.blocks.feed_forward import FeedForward
from minisgl.models.blocks.self_attention import Angles
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder

MODELS = {"qwen3-0.6b": 28, "qwen3-14b": 4, "llama-3.2-1b": 16, "qwen2.5-0.5b": 24, "qwen2.5-7b": 4}
"""Number of layers by model: their weights exceed the L2 cache and leave enough device memory."""
ROWS = (1, 2, 4, 8, 64, 256)
HAVE_PARTS = ("norm + qkv", "norm + gate_up + silu", "layer")
MIN_CALLS = 24
REPLAYS = 20
PAGE = 64
CONTEXT = 512

Call = Callable[[int], object]
"""Call of a kernel with the weights of the layer of this number."""
TILES = (
    *((block_n, 1024, 4) for block_n in (1, 2, 4, 8, 16)),
    *((block_n, 512, 2) for block_n in (2, 4, 8)),
    *((block_n, 256, 1) for block_n in (1, 2, 4)),
    *((block_n, 2048, 8) for block_n in (2, 4, 8)),
    *((block_n, 256, 4) for block_n in (4, 8, 16)),
    *((block_n, 256, 8) for block_n in (8, 16)),
    *((block_n, 512, 4) for block_n in (2, 4, 8)),
)
"""Outputs, inputs and warps: with all warps along the inputs, and with some outputs per warp."""
MAX_REGISTERS = 128
"""Registers of one thread for its weights; more would spill."""


class StoreOnly:
    """RoPE and KV store without attention."""

    def __init__(self, model: Decoder, rows: int) -> None:
        config = model.config
        shape = (len(model.layers), -(-rows // PAGE) + 1, PAGE, model.num_kv_heads_local, config.attention.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in "kv")
        self.locations = torch.arange(rows, device="cuda")

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert k is not None and v is not None and sinks is None
        q, *_ = rotate_and_store(q, k, v, rotation, self.keys[layer], self.values[layer], self.locations, len(q))
        return q.flatten(1)


def with_attention(model: Decoder, rows: int, name: str) -> Callable[..., object] | None:
    """Call of a whole layer on rows with CONTEXT tokens each, which share no pages; None where its kernels are not
    here."""
    config, pages = model.config, CONTEXT // PAGE
    heads, kv_heads = config.attention.num_heads, model.num_kv_heads_local
    shape = AttentionShape(
        heads, kv_heads, config.attention.head_dim, PAGE, pages, torch.bfloat16, torch.device("cuda")
    )
    pool = (len(model.layers), rows * pages + 1, PAGE, kv_heads, config.attention.head_dim)
    keys, values = (torch.randn(pool, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    kv = PagedKV(keys, values, scales=(UNSCALED,) * len(model.layers))
    table = torch.arange(rows * pages, dtype=torch.int32, device="cuda").view(rows, pages)
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    lengths = np.full(rows, CONTEXT, np.int32)
    batch = AttentionBatch(
        page_table=table,
        decode_slots=torch.arange(rows, dtype=torch.int32, device="cuda"),
        decode_lengths=torch.from_numpy(lengths).cuda(),
        prefill_slots=none,
        query_offsets=none,
        prefill_kv_lengths=none,
        host_decode_lengths=lengths,
        host_prefill_starts=lengths[:0],
        host_prefill_lengths=lengths[:0],
    )
    backend: DecodeBackend = TorchDecode(shape)
    if name == "xqa":
        if xqa_backend.why_not(shape):
            return None
        backend = xqa_backend.XqaDecode(shape)
    elif name == "balanced":
        backend = BalancedDecode(shape, None)
    else:
        backend = SplitDecode(shape, backend)
    attention = PagedAttention(kv, TorchPrefill(shape), backend)
    attention.prepare(batch)
    attention.begin(batch, torch.arange(1, rows + 1, device="cuda") * CONTEXT - 1)

    def call(x: torch.Tensor, residual: torch.Tensor, angles: Angles, layer: int) -> object:
        return model.layers[layer].forward(x, residual, angles, attention)

    return call


@contextmanager
def plain_launches() -> Iterator[None]:
    with mock.patch.object(dependent_launch_triton, "_has_dependent_launch", lambda device: False):
        yield


@contextmanager
def in_parts() -> Iterator[None]:
    with mock.patch.object(DenseWeight, "_fits_normed", lambda weight, x: False):
        yield


VARIANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "early": nullcontext,
    "plain": plain_launches,
    "parts": in_parts,
}


CHOSEN = threading.local()


def chosen_tile(*sizes: int, normed: bool) -> tuple[int, int, int]:
    tile: tuple[int, int, int] = CHOSEN.tile
    return tile


def with_tile(tile: tuple[int, int, int], call: Call) -> Call:
    def run(layer: int) -> object:
        CHOSEN.tile = tile
        return call(layer)

    return run


def microseconds(call: Call, layers: int) -> float:
    """Microseconds per call, in a graph of successive calls over all layers."""
    calls = max(layers, MIN_CALLS // layers * layers)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for layer in range(layers):
            call(layer)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for i in range(calls):
            call(i % layers)
        graph.capture_end()
        for _ in range(3):
            graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        stream.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / REPLAYS / calls


def inner_size_of(config: ModelConfig) -> int:
    block = config.layers[0].feed_forward
    assert block is not None
    return block.intermediate_size


def calls_of(model: Decoder, rows: int) -> dict[str, tuple[Call, float]]:
    """Calls by name, with the bytes that each reads and writes."""
    config, layers = model.config, model.layers
    of, inner_size = config.attention, inner_size_of(config)

    def draw(width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(rows, width, device="cuda").to(dtype)

    x, residual, cos_sin = draw(config.hidden_size), draw(config.hidden_size), draw(of.head_dim, torch.float32)
    dense = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, FeedForward)]
    heads = [of.num_heads, of.num_kv_heads, of.num_kv_heads]
    qkv = draw(sum(heads) * of.head_dim)
    attended, inner = draw(heads[0] * of.head_dim), draw(inner_size)
    wide = draw(2 * inner_size)
    store = StoreOnly(model, rows)
    angles = Angles(model.rotary, torch.arange(rows, device="cuda"))
    attention = layers[0].attention

    def rotate(layer: int) -> object:
        block = layers[layer].attention
        q, k, v = qkv.view(rows, -1, of.head_dim).split(heads, dim=1)
        return store.attend(layer, q, k, v, Rotation(cos_sin, block.q_norm, block.k_norm, 1e-6))

    def whole(layer: int) -> object:
        return layers[layer].forward(x, residual, angles, store)

    def attend(layer: int) -> object:
        block = layers[layer].attention
        return block.qkv.weight.normed_product(PreNorm(block.norm, x, residual))

    def feed(layer: int) -> object:
        block = dense[layer]
        norm = PreNorm(block.norm, x, residual)
        return block.gate_up.weight.gated_product(norm, None, silu_and_mul, block.down.weight)

    weights = [attention.qkv.weight, attention.out.weight, dense[0].gate_up.weight, dense[0].down.weight]
    read = [weight.values.nbytes for weight in weights if isinstance(weight, DenseWeight)]
    calls: dict[str, tuple[Call, float]] = {
        "norm + qkv": (attend, read[0] + 4 * x.nbytes + qkv.nbytes),
        "rotate + store": (rotate, 2 * qkv.nbytes),
        "o": (lambda layer: layers[layer].attention.out.weight.product(attended), read[1] + attended.nbytes + x.nbytes),
        "norm + gate_up + silu": (feed, read[2] + 4 * x.nbytes + inner.nbytes),
        "down": (lambda layer: dense[layer].down.weight.product(inner), read[3] + inner.nbytes + x.nbytes),
        "layer": (whole, sum(read) + 8 * x.nbytes + 3 * qkv.nbytes + 2 * inner.nbytes),
    }
    few = rows <= split_backend.MOST_ROWS
    for name in ("xqa", "split" if few else "balanced"):
        attended_layer = with_attention(model, rows, name)
        if attended_layer is not None:
            call = partial(attended_layer, x, residual, angles)
            calls[f"layer + {name}"] = (call, math.nan)
    if rows > 1:
        gain = draw(config.hidden_size)[0]
        calls["norm alone"] = (lambda layer: add_rms_norm(x, residual, gain, 1e-6), 4 * x.nbytes)
        calls["silu alone"] = (lambda layer: silu_and_mul(wide), wide.nbytes + inner.nbytes)
    return calls


def build(name: str) -> Decoder:
    config = ModelConfig.parse({**BUILTIN_CONFIGS[name], "num_hidden_layers": MODELS[name]})
    model = Decoder(config, TensorParallel(), torch.bfloat16, "cuda", max_position=64)
    for source in model.parameters.sources:
        source.into.normal_(0.0, 0.02)
    return model


def compile_all(jobs: list[Callable[[], object]]) -> None:
    """Compile in several threads: most of the work releases the interpreter's lock."""
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda job: job(), jobs):
            pass
    torch.cuda.synchronize()


def compare(models: dict[str, Decoder], bandwidth: float, numbers: list[int], variants: list[str]) -> None:
    every = [call for model in models.values() for rows in numbers for call, _ in calls_of(model, rows).values()]
    chosen = {name: VARIANTS[name] for name in variants}
    for variant in chosen.values():
        with variant():
            compile_all([partial(call, 0) for call in every])
    for name, model in models.items():
        for rows in numbers:
            for kernel, (call, read) in calls_of(model, rows).items():
                line = f"{name} M={rows:<3} {kernel:27} roofline {read / bandwidth * 1e6:7.2f}"
                for how, variant in chosen.items():
                    if how != "parts" or (rows == 1 and kernel in HAVE_PARTS):
                        with variant():
                            line += f" {how} {microseconds(call, len(model.layers)):7.2f}"
                print(line, flush=True)


def tune(models: dict[str, Decoder], bandwidth: float) -> None:
    for name, model in models.items():
        config = model.config
        widths = {
            "norm + qkv": (config.hidden_size, 1),
            "o": (config.attention.num_heads * config.attention.head_dim, 1),
            "norm + gate_up + silu": (config.hidden_size, 2),
            "down": (inner_size_of(config), 1),
        }
        calls = calls_of(model, 1)
        for kernel, (inputs, weight_rows) in widths.items():
            call, read = calls[kernel]
            now = microseconds(call, len(model.layers))
            tiled = {
                f"{block_n}x{block_k}w{warps}": with_tile((block_n, block_k, warps), call)
                for block_n, block_k, warps in dict.fromkeys(TILES)
                if block_n * weight_rows * inputs // (64 * warps) <= MAX_REGISTERS
            }
            with mock.patch.object(dense_skinny_triton, "_vector_tile", chosen_tile):
                compile_all([partial(each, 0) for each in tiled.values()])
                times = {name: microseconds(each, len(model.layers)) for name, each in tiled.items()}
            best = sorted(times, key=times.__getitem__)[:7]
            roofline = read / bandwidth * 1e6
            found = "  ".join(f"{key} {times[key]:.2f}" for key in best)
            print(f"{name} {kernel:22} roofline {roofline:6.2f} now {now:.2f} | {found}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="time the tiles of the vector kernel (default: off)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="default: all")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    args = parser.parse_args()
    gpu = torch.cuda.get_device_name()
    hardware = hardware_of(gpu)
    bandwidth = hardware.bandwidth if hardware else math.nan
    print(f"{gpu}, torch {torch.__version__}, rooflines at {bandwidth / 1e12:.2f} TB/s")
    with torch.inference_mode():
        models = {name: build(name) for name in args.models}
        if args.tune:
            tune(models, bandwidth)
        else:
            compare(models, bandwidth, args.rows, args.variants)


if __name__ == "__main__":
    main()
