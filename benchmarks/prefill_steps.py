"""Steps with a prompt, and attention behind a long prefix: `python benchmarks/prefill_steps.py [--models MODEL...]`.

A line of a step: decode rows, prompt tokens and tokens before them; then ms of host time to launch it, of device time
without waiting for the host, and from launch to result on an idle device, each eagerly and as a CUDA graph where there
is one. Attention: ms of one layer for a chunk of 8,192 tokens behind 92,000, and for 64 segments of 128 behind 2,048.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from graph_timing import microseconds
from minisgl.attention import fa3_backend, flashinfer_backend
from minisgl.attention.backend import AttentionShape, PrefillBackend
from minisgl.attention.batch import AttentionBatch, PagedKV
from minisgl.attention.torch_backend import TorchPrefill
from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.config import EngineConfig
from minisgl.engine.cuda_engine import CudaEngine
from minisgl.engine.engine import create_engine
from minisgl.kernels.attention.stored_kv import UNSCALED
from minisgl.kernels.compile.compile_log import CompileLog
from minisgl.kernels.compile.preload import Preload
from minisgl.wire.plan import StepPlan

MODELS = ("qwen3-0.6b", "qwen3-14b")
STEPS = (
    (0, 4, 0),
    (0, 300, 0),
    (0, 300, 1001),
    (0, 1500, 0),
    (22, 300, 0),
    (22, 1500, 0),
    (64, 512, 0),
    (255, 512, 0),
    (255, 512, 512),
)
"""Decode rows, prompt tokens, tokens before them."""
CONTEXT = 512
PAGE = 64
REPEAT = 7
HEAD_START = 100_000_000
"""Clock cycles that the device waits, so that all launches of a step are queued before the first one runs."""


class Steps:
    def __init__(self, model: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(BUILTIN_CONFIGS[model]))
            began = time.perf_counter()
            engine = create_engine(
                EngineConfig(
                    model=folder,
                    dummy_weights=True,
                    device="cuda",
                    num_pages=2800,
                    page_size=PAGE,
                    cuda_graph_max_tokens=8192,
                )
            )
        assert isinstance(engine, CudaEngine)
        while engine.use_idle_time():
            pass
        self.engine = engine
        phases = " ".join(f"{name} {seconds:.1f}" for name, seconds in engine.stats.start_seconds.items())
        print(f"{model}: started in {time.perf_counter() - began:.1f} s ({phases})", flush=True)
        self._step = 0

    def plan(self, decode: int, tokens: int, before: int) -> StepPlan:
        rows = decode + 1
        per_row = -(-(CONTEXT + 1) // PAGE)
        pages = [(slot, index, slot * per_row + index) for slot in range(decode) for index in range(per_row)]
        pages += [(decode, index, decode * per_row + index) for index in range(-(-(before + tokens) // PAGE))]
        greedy = np.zeros((7, rows), np.int32)
        greedy[0], greedy[3] = np.arange(rows), np.float32(1).view(np.int32)
        step, self._step = self._step, self._step + 1
        return StepPlan.build(
            epoch=0,
            step=step,
            decode_slots=np.arange(decode, dtype=np.int32),
            decode_positions=np.full(decode, CONTEXT, np.int32),
            prefill_slots=np.array([decode], np.int32),
            prefill_starts=np.array([before], np.int32),
            prefill_lengths=np.array([tokens], np.int32),
            prefill_sample=np.ones(1, np.int32),
            prefill_tokens=np.random.default_rng(step).integers(0, 150_000, tokens).astype(np.int32),
            page_updates=np.array(pages, np.int32).T,
            new_rows=greedy,
        )

    def measure(self, size: tuple[int, int, int]) -> tuple[float, float, float]:
        host, device, whole = [], [], []
        stream = self.engine._stream
        for _ in range(REPEAT):
            plan, again = self.plan(*size), self.plan(*size)
            torch.cuda.synchronize()
            began = time.perf_counter()
            handle = self.engine.launch(plan)
            launched = time.perf_counter()
            result = self.engine.collect(handle)
            whole.append(time.perf_counter() - began)
            host.append(launched - began)
            assert (result.tokens >= 0).all()
            with torch.cuda.stream(stream):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(HEAD_START)
                begin.record(stream)
                handle = self.engine.launch(again)
                end.record(stream)
                self.engine.collect(handle)
                end.synchronize()
                device.append(float(begin.elapsed_time(end)) / 1e3)
        return statistics.median(host) * 1e3, statistics.median(device) * 1e3, statistics.median(whole) * 1e3

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        graphs = self.engine._graphs
        find = graphs.find
        graphs.find = lambda plan: None  # type: ignore[method-assign]
        try:
            yield
        finally:
            graphs.find = find  # type: ignore[method-assign]

    def report(self) -> None:
        print(f"{'decode':>6} {'prompt':>6} {'before':>6} | {'eager: host, device, whole':>26} | graph")
        for size in STEPS:
            with self.eagerly():
                eager = self.measure(size)
            line = "{:6} {:6} {:6} | {:8.2f} {:8.2f} {:8.2f} |".format(*size, *eager)
            if self.engine._graphs.find(self.plan(*size)) is not None:
                line += " {:8.2f} {:8.2f} {:8.2f}".format(*self.measure(size))
            print(line, flush=True)
        self.engine.close()


def attention(backend: str, shape: AttentionShape, segments: int, before: int, tokens: int) -> float:
    """Milliseconds of one layer."""
    pages = -(-(before + tokens) // PAGE)
    size = (1, segments * pages + 1, PAGE, shape.kv_heads, shape.head_dim)
    keys, values = (torch.randn(size, dtype=shape.dtype, device="cuda") for _ in "kv")
    kv = PagedKV(keys, values, (UNSCALED,))
    table = torch.randperm(segments * pages, device="cuda").int().view(segments, pages)
    none = np.empty(0, np.int32)
    starts, lengths = np.full(segments, before, np.int32), np.full(segments, tokens, np.int32)
    empty = torch.empty(0, dtype=torch.int32, device="cuda")
    batch = AttentionBatch(
        page_table=table,
        decode_slots=empty,
        decode_lengths=empty,
        prefill_slots=torch.arange(segments, dtype=torch.int32, device="cuda"),
        query_offsets=torch.arange(segments + 1, dtype=torch.int32, device="cuda") * tokens,
        prefill_kv_lengths=torch.from_numpy(starts + lengths).cuda(),
        host_decode_lengths=none,
        host_prefill_starts=starts,
        host_prefill_lengths=lengths,
    )
    q = torch.randn(segments * tokens, shape.query_heads, shape.head_dim, dtype=shape.dtype, device="cuda")
    k = torch.randn(segments * tokens, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device="cuda")
    out = torch.empty_like(q)
    prefill: PrefillBackend = (
        fa3_backend.Fa3Prefill(shape, TorchPrefill(shape))
        if backend == "fa3"
        else flashinfer_backend.FlashInferPrefill(shape)
    )
    prefill.prepare(batch)
    prefill.begin(batch)
    return microseconds(lambda call: prefill.prefill(0, kv, q, k, k, out), 3) / 1e3


def report_attention() -> None:
    Preload(CompileLog()).finish()
    for name, heads, head_dim, segments, before, tokens in (
        ("llama-3.1-8b, 8192 behind 92000", (32, 8), 128, 1, 92_000, 8192),
        ("llama-3.1-8b, 20 behind 92000", (32, 8), 128, 1, 92_000, 20),
        ("qwen3-0.6b, 64 of 128 behind 2048", (16, 8), 128, 64, 2048, 128),
        ("llama-3.2-1b, 4 of 512 behind 4096", (32, 8), 64, 4, 4096, 512),
    ):
        longest = -(-(before + tokens) // PAGE)
        shape = AttentionShape(*heads, head_dim, PAGE, longest, torch.bfloat16, torch.device("cuda"))
        line = f"{name:36}"
        for backend, why in (("flashinfer", flashinfer_backend.why_not), ("fa3", fa3_backend.why_not)):
            reason = why(shape)
            line += f"  {backend} " + (reason or f"{attention(backend, shape, segments, before, tokens):.3f} ms")
        print(line, flush=True)
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", choices=BUILTIN_CONFIGS, default=MODELS)
    args = parser.parse_args()
    with torch.inference_mode():
        report_attention()
    for model in args.models:
        Steps(model).report()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
