"""Embeddings and scores: texts per second, share of the device's peak, and latencies.

python benchmarks/embed.py --url http://127.0.0.1:8000 --config bge-m3             # through HTTP, one client process
python benchmarks/embed.py --offline bge-m3                                        # LLM.embed, random weights
python benchmarks/embed.py --url http://127.0.0.1:8000 --config qwen3-0.6b --rerank

Texts are random token ids, so that no tokenizer is measured and no text comes twice. The share is that of the
operations of linear layers and attention, as if every one ran at --peak. With --rerank one query has --documents texts
of --tokens words at a time, each of them one token of the tokenizer that `minisgl models dummy` writes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop

from minisgl.bench import record
from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.bench.http_client import Endpoint
from minisgl.bench.record import Result
from minisgl.models.config import ModelConfig
from minisgl.models.decoder_config import AttentionConfig
from minisgl.toy.tiny import dummy_word

_PEAK: Final = 790e12
"""FLOP/s of a bf16 GEMM of 8192³ on an H200, measured."""


def flops(config: ModelConfig, lengths: Sequence[int]) -> float:
    """Operations of the linear layers and of attention for texts of these lengths."""
    tokens = sum(lengths)
    pairs = sum(n * (n + 1) // 2 if config.is_causal else n * n for n in lengths)
    total, hidden = 0.0, config.hidden_size
    for layer in config.body.layers:
        of, block = layer.attention, layer.feed_forward
        assert isinstance(of, AttentionConfig) and block is not None
        heads = of.num_heads * of.head_dim
        gated = getattr(block, "is_gated", True)
        weights = hidden * (2 * heads + 2 * of.num_kv_heads * of.head_dim)
        weights += (3 if gated else 2) * hidden * block.intermediate_size
        total += 2.0 * tokens * weights + 4.0 * pairs * heads
    return total


async def _post(endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> float:
    """Send a request and read its answer. Returns seconds."""
    began = time.perf_counter()
    async with endpoint.request("POST", path, body) as response:
        answer = json.loads(await response.read())
    assert "error" not in answer, answer
    return time.perf_counter() - began


async def _all(endpoint: Endpoint, path: str, bodies: Sequence[Mapping[str, Any]], at_once: int) -> list[float]:
    """Keep `at_once` requests in flight. Returns the seconds of each."""
    slots = asyncio.Semaphore(at_once)

    async def one(body: Mapping[str, Any]) -> float:
        async with slots:
            return await _post(endpoint, path, body)

    return await asyncio.gather(*map(one, bodies))


def _token_texts(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    texts: list[list[int]] = np.random.default_rng(seed).integers(1000, vocabulary, (count, length)).tolist()
    return texts


async def _embed(args: argparse.Namespace, config: ModelConfig) -> dict[str, float]:
    endpoint = Endpoint(args.url)
    texts = _token_texts(args.texts + args.at_once, args.tokens, config.vocab_size, args.seed)
    bodies = [{"input": text, "encoding_format": "base64"} for text in texts]
    await _all(endpoint, "/v1/embeddings", bodies[args.texts :], args.at_once)
    began = time.perf_counter()
    seconds = await _all(endpoint, "/v1/embeddings", bodies[: args.texts], args.at_once)
    took = time.perf_counter() - began
    short = _token_texts(200, 16, config.vocab_size, args.seed + 1)
    idle = await _all(endpoint, "/v1/embeddings", [{"input": text, "encoding_format": "base64"} for text in short], 1)
    return _speed(args, config, took) | {
        "latency_ms_p50": 1000 * statistics.median(seconds),
        "idle_16_tokens_ms_p50": 1000 * statistics.median(idle),
    }


async def _rerank(args: argparse.Namespace) -> dict[str, float]:
    """Seconds of requests with one query and many documents, one at a time."""
    endpoint = Endpoint(args.url)
    generator = np.random.default_rng(args.seed)

    def text() -> str:
        return "".join(f" {dummy_word(index)}" for index in generator.integers(1000, 9000, args.tokens))

    bodies = [{"query": text()[:40], "documents": [text() for _ in range(args.documents)]} for _ in range(22)]
    seconds = await _all(endpoint, "/v1/rerank", bodies, 1)
    return {f"rerank_{args.documents}x{args.tokens}_ms_p50": 1000 * statistics.median(seconds[2:])}


def _offline(args: argparse.Namespace) -> dict[str, float]:
    from minisgl.bench.offline import _model_directory
    from minisgl.offline import LLM

    with _model_directory(args.offline) as (directory, is_builtin):
        config = ModelConfig.read(directory)
        options: dict[str, Any] = {"task": "embed", "dummy_weights": is_builtin, "max_running": args.at_once}
        with LLM(directory, detokenize=False, **options) as llm:
            llm.embed(_token_texts(args.at_once, args.tokens, config.vocab_size, args.seed + 1), progress=False)
            texts = _token_texts(args.texts, args.tokens, config.vocab_size, args.seed)
            began = time.perf_counter()
            llm.embed(texts, progress=False)
            took = time.perf_counter() - began
            compiled = llm.stats.compiled_after_ready
    return _speed(args, config, took) | {"compiled_after_ready": compiled}


def _speed(args: argparse.Namespace, config: ModelConfig, seconds: float) -> dict[str, float]:
    done = flops(config, [args.tokens] * args.texts)
    return {
        "texts_per_second": args.texts / seconds,
        "tokens_per_second": args.texts * args.tokens / seconds,
        "share_of_peak": done / seconds / args.peak,
    }


def _results(args: argparse.Namespace, metrics: Mapping[str, float]) -> dict[str, Result]:
    """Figures by the names of the record."""
    key = record.model_key(args.offline or args.config)
    if args.rerank:
        [milliseconds] = metrics.values()
        return {f"rerank_{key}_{args.documents}x{args.tokens}_p50_ms": Result(milliseconds)}
    if args.offline:
        return {f"embed_{key}_offline_share": Result(metrics["share_of_peak"])}
    return {
        f"embed_{key}_share": Result(metrics["share_of_peak"]),
        f"embed_{key}_texts_s": Result(metrics["texts_per_second"]),
        f"embed_idle_{key}_p50_ms": Result(metrics["idle_16_tokens_ms_p50"]),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="URL of a server")
    parser.add_argument("--offline", metavar="MODEL", help="directory or built-in configuration for LLM.embed")
    parser.add_argument("--config", default="qwen3-0.6b", help="built-in configuration, or directory, of its model")
    parser.add_argument("--rerank", action="store_true", help="score documents in place of embedding texts")
    parser.add_argument("--texts", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument("--peak", type=float, default=_PEAK, help="FLOP/s of the device")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, metavar="FILE", help="update the results in FILE")
    args = parser.parse_args(arguments)
    known = None if args.record is None else record.read(args.record)
    if args.offline:
        metrics = _offline(args)
    elif args.url is None:
        parser.error("give --url or --offline")
    else:
        builtin = BUILTIN_CONFIGS.get(args.config)
        config = ModelConfig.read(Path(args.config)) if builtin is None else ModelConfig.parse(builtin)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            metrics = runner.run(_rerank(args) if args.rerank else _embed(args, config))
    print(json.dumps({name: round(value, 4) for name, value in metrics.items()}, indent=1))
    if known is not None:
        record.update(args.record, known, _results(args, metrics))
    return 0


if __name__ == "__main__":
    sys.exit(main())
