"""Load for an OpenAI endpoint: send requests of a trace, measure latency and throughput of the streamed answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from minisgl.bench.http_client import Endpoint, HttpError
from minisgl.bench.report import Metric, report
from minisgl.bench.traces import TraceRequest, TraceShape, make_trace, prompt_tokens, read_trace, write_trace

LATENCY_LIMITS: Final = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "e2e": "time of the whole answer",
}
"""Latencies with a `--slo-…-ms` flag, and their names in help texts."""

_PERCENTILES: Final = (50, 90, 99)


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of `minisgl bench serve`, under the names of its flags."""

    url: str
    model: str | None
    api_key: str | None
    api: Literal["completions", "chat"]
    vocabulary: int
    stop_at_eos: bool
    trace: Path | None
    trace_speed: float
    num_requests: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    request_rate: float | None
    burstiness: float
    shared_prefixes: int
    block_size: int
    max_concurrency: int | None
    seed: int
    write_trace: Path | None
    slo_ttft_ms: float | None
    slo_tpot_ms: float | None
    slo_e2e_ms: float | None
    plot: Path | None
    json: str | None

    @property
    def limits_ms(self) -> dict[str, float]:
        """Latency limits that were given, in milliseconds."""
        limits = {name: getattr(self, f"slo_{name}_ms") for name in LATENCY_LIMITS}
        return {name: limit for name, limit in limits.items() if limit is not None}


class Sample(msgspec.Struct):
    """Measurements of one request, in seconds since it was sent."""

    ttft: float = 0.0
    gaps: list[float] = []
    """Seconds between successive events with text."""
    e2e: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None for answers of one token."""
        return sum(self.gaps) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def run(options: ServeOptions) -> int:
    """Run the benchmark, print and write its report. Returns the exit code: 1 if any request failed. Raises HttpError,
    BenchError `bad_trace`."""
    import uvloop

    requests = _requests(options)
    if options.write_trace is not None:
        write_trace(options.write_trace, requests)
        print(f"{len(requests)} requests written to {options.write_trace}")
        return 0
    endpoint = Endpoint(options.url, options.api_key or os.environ.get("OPENAI_API_KEY"))
    began = time.perf_counter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        samples = runner.run(_send_all(endpoint, options, requests))
    report("serve", summarize(samples, time.perf_counter() - began, options.limits_ms), {}, options.json)
    errors = [sample.error for sample in samples if sample.error]
    if errors:
        print(f"minisgl: error: {len(errors)} requests failed; the first error: {errors[0]}", file=sys.stderr)
    if options.plot is not None:
        plot(samples, options.plot)
    return 1 if errors else 0


def summarize(samples: Sequence[Sample], seconds: float, limits_ms: Mapping[str, float]) -> dict[str, Metric]:
    """Metrics of the report. Latencies cover the requests that completed; goodput counts those within all limits."""
    good = [sample for sample in samples if not sample.error]
    metrics: dict[str, Metric] = {
        "completed": len(good),
        "failed": len(samples) - len(good),
        "duration_s": seconds,
        "requests_per_second": len(good) / seconds,
        "prompt_tokens": sum(sample.prompt_tokens for sample in good),
        "output_tokens": sum(sample.output_tokens for sample in good),
        "output_tokens_per_second": sum(sample.output_tokens for sample in good) / seconds,
    }
    for name, values in _latencies(good).items():
        if values:
            metrics[f"{name}_ms_mean"] = float(np.mean(values)) * 1000
            for percent in _PERCENTILES:
                metrics[f"{name}_ms_p{percent}"] = float(np.percentile(values, percent)) * 1000
    if limits_ms:
        within = sum(all((getattr(s, name) or 0) * 1000 <= limit for name, limit in limits_ms.items()) for s in good)
        metrics["goodput_requests_per_second"] = within / seconds
        metrics["goodput_share"] = within / len(samples)
    return metrics


def _latencies(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Seconds of each latency, over all samples that have it."""
    return {
        "ttft": [sample.ttft for sample in samples],
        "tpot": [tpot for sample in samples if (tpot := sample.tpot) is not None],
        "itl": [gap for sample in samples for gap in sample.gaps],
        "e2e": [sample.e2e for sample in samples],
    }


def plot(samples: Sequence[Sample], path: Path) -> None:
    """Write the cumulative distributions of the latencies to `path` as PNG. Prints why on stderr if it cannot."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("minisgl: no plot: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return
    canvas = Figure(figsize=(10, 6), layout="constrained")
    for index, (name, values) in enumerate(_latencies([s for s in samples if not s.error]).items()):
        axes = canvas.add_subplot(2, 2, index + 1)
        if values:
            axes.ecdf(np.array(values) * 1000)
        axes.set(title=name.upper(), xlabel="ms", ylabel="share of samples")
        axes.grid(alpha=0.3)
    try:
        canvas.savefig(path, dpi=120, format="png")
    except OSError as error:
        print(f"minisgl: no plot: {path} cannot be written: {error.strerror}", file=sys.stderr)
        return
    print(f"plot written to {path}")


def _requests(options: ServeOptions) -> list[TraceRequest]:
    if options.trace is not None:
        return read_trace(options.trace)
    return make_trace(
        TraceShape(
            requests=options.num_requests,
            input_length=(options.input_len[0], max(options.input_len)),
            output_length=(options.output_len[0], max(options.output_len)),
            rate=options.request_rate,
            burstiness=options.burstiness,
            shared_prefixes=options.shared_prefixes,
            block=options.block_size,
        ),
        options.seed,
    )


async def _send_all(endpoint: Endpoint, options: ServeOptions, requests: Sequence[TraceRequest]) -> list[Sample]:
    """Send each request at its time in the trace; returns their samples in the same order."""
    model = options.model or await endpoint.first_model()
    bodies = [_body(options, model, number, request) for number, request in enumerate(requests)]
    path = "/v1/completions" if options.api == "completions" else "/v1/chat/completions"
    limiter = asyncio.Semaphore(options.max_concurrency) if options.max_concurrency else contextlib.nullcontext()
    began = time.perf_counter()
    first = requests[0].timestamp
    async with asyncio.TaskGroup() as group:
        tasks = []
        for request, body in zip(requests, bodies, strict=True):
            due = began + (request.timestamp - first) / 1000 / options.trace_speed
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(_send(endpoint, path, body, limiter)))
    return [task.result() for task in tasks]


def _body(options: ServeOptions, model: str, index: int, request: TraceRequest) -> dict[str, Any]:
    tokens = prompt_tokens(request, index, block=options.block_size, vocabulary=options.vocabulary, seed=options.seed)
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.output_length,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not options.stop_at_eos:
        body["ignore_eos"] = True
    if options.api == "completions":
        return body | {"prompt": tokens}
    # A short word is about two tokens.
    return body | {"messages": [{"role": "user", "content": " ".join(f"w{token}" for token in tokens[::2])}]}


async def _send(
    endpoint: Endpoint, path: str, body: dict[str, Any], limiter: contextlib.AbstractAsyncContextManager[None]
) -> Sample:
    """Send one request and read its stream to the end. Errors are part of the sample."""
    sample = Sample(gaps=[])
    async with limiter:
        began = last = time.perf_counter()
        try:
            async with endpoint.stream(path, body) as events:
                async for event in events:
                    chunk = json.loads(event.data)
                    if "error" in chunk:
                        raise HttpError("stream_failed", str(chunk["error"]))
                    if usage := chunk.get("usage"):
                        sample.prompt_tokens, sample.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                    for choice in chunk["choices"]:
                        if not (choice.get("text") or choice.get("delta", {}).get("content")):
                            continue
                        if sample.ttft:
                            sample.gaps.append(event.at - last)
                        else:
                            sample.ttft = event.at - began
                        last = event.at
                    sample.e2e = event.at - began
        except HttpError as error:
            sample.error = str(error)
        except (ValueError, KeyError, TypeError) as error:
            sample.error = f"not a chunk of an OpenAI stream: {error!r}"
    # An answer may have no text at all; its first event is then its end.
    sample.ttft = sample.ttft or sample.e2e
    return sample
