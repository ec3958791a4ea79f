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
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from minisgl.bench.http_client import Endpoint, HttpError
from minisgl.bench.report import Metric, report
from minisgl.bench.traces import TraceRequest, TraceShape, make_trace, prompt_tokens, read_trace, write_trace
from minisgl.options import Count, Index, option

_PERCENTILES: Final = (50, 90, 99)

_Milliseconds = Annotated[float, Meta(gt=0, extra={"metavar": "MS"})]
_Lengths = tuple[Count, Count]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Endpoint, and the form of the requests for it."""

    url: Annotated[str, option("URL of the endpoint", metavar="URL")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, option("model to request", default="the first one that is listed")] = None
    api_key: Annotated[
        str | None,
        option("API key for the endpoint", default="the variable OPENAI_API_KEY, or none", metavar="KEY"),
    ] = None
    api: Annotated[
        Literal["completions", "chat"],
        option("completions: prompts are token ids of exact length; chat: text of about that many tokens"),
    ] = "completions"
    vocabulary: Annotated[
        int, Meta(ge=2), option("prompts are made of token ids below N", default="{}, which every model has")
    ] = 256
    stop_at_eos: Annotated[bool, option("let answers end early, for endpoints without ignore_eos")] = False


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Requests, and the times at which they are sent."""

    trace: Annotated[Path | None, option("requests to send, one JSON object per line", default="synthetic")] = None
    trace_speed: Annotated[float, Meta(gt=0), option("replay the trace X times as fast", default="{:g}")] = 1.0
    num_requests: Annotated[Count, option("number of synthetic requests")] = 100
    input_len: Annotated[
        _Lengths,
        option("range of the lengths of synthetic prompts", default="{0[0]} to {0[1]} tokens", metavar="MIN MAX"),
    ] = (64, 512)
    output_len: Annotated[
        _Lengths,
        option("range of the lengths of synthetic answers", default="{0[0]} to {0[1]} tokens", metavar="MIN MAX"),
    ] = (16, 128)
    request_rate: Annotated[float | None, Meta(gt=0), option("arrivals per second", default="all at the same time")] = (
        None
    )
    burstiness: Annotated[
        float, Meta(gt=0), option("1: Poisson arrivals; more: in bursts; near 0: regular", default="{:g}")
    ] = 1.0
    shared_prefixes: Annotated[
        Index,
        option("synthetic prompts begin with one of N prefixes, half a prompt long", default="{}, no shared prefix"),
    ] = 0
    block_size: Annotated[Count, option("tokens per entry of a trace's hash_ids", default="{} tokens")] = 512
    max_concurrency: Annotated[Count | None, option("requests in flight at the same time", default="no limit")] = None
    seed: Annotated[Index, option("seed of synthetic requests and prompts")] = 0
    write_trace: Annotated[Path | None, option("write the requests to FILE and send none", default="send them")] = None


class LatencyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for the latencies of a request; goodput counts requests within all of them."""

    ttft: Annotated[_Milliseconds | None, option("goodput limit for the time to first token", default="no limit")] = (
        msgspec.field(default=None, name="slo_ttft_ms")
    )
    tpot: Annotated[
        _Milliseconds | None, option("goodput limit for the time per output token after the first", default="no limit")
    ] = msgspec.field(default=None, name="slo_tpot_ms")
    e2e: Annotated[
        _Milliseconds | None, option("goodput limit for the time of the whole answer", default="no limit")
    ] = msgspec.field(default=None, name="slo_e2e_ms")

    def given(self) -> dict[str, float]:
        """Limits in milliseconds by the name of the latency."""
        return {name: limit for name, limit in msgspec.structs.asdict(self).items() if limit is not None}


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


def run(target: Target, load: Load, limits: LatencyLimits, *, plot: Path | None, json: str | None) -> int:
    """Run the benchmark, print and write its report. Returns the exit code: 1 if any request failed. Raises HttpError,
    BenchError `bad_trace`."""
    import uvloop

    requests = _requests(load)
    if load.write_trace is not None:
        write_trace(load.write_trace, requests)
        print(f"{len(requests)} requests written to {load.write_trace}")
        return 0
    endpoint = Endpoint(target.url, target.api_key or os.environ.get("OPENAI_API_KEY"))
    began = time.perf_counter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        samples = runner.run(_send_all(endpoint, target, load, requests))
    report("serve", summarize(samples, time.perf_counter() - began, limits.given()), {}, json)
    errors = [sample.error for sample in samples if sample.error]
    if errors:
        print(f"minisgl: error: {len(errors)} requests failed; the first error: {errors[0]}", file=sys.stderr)
    if plot is not None:
        write_plot(samples, plot)
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


def write_plot(samples: Sequence[Sample], path: Path) -> None:
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


def _requests(load: Load) -> list[TraceRequest]:
    if load.trace is not None:
        return read_trace(load.trace)
    return make_trace(
        TraceShape(
            requests=load.num_requests,
            input_length=(load.input_len[0], max(load.input_len)),
            output_length=(load.output_len[0], max(load.output_len)),
            rate=load.request_rate,
            burstiness=load.burstiness,
            shared_prefixes=load.shared_prefixes,
            block=load.block_size,
        ),
        load.seed,
    )


async def _send_all(endpoint: Endpoint, target: Target, load: Load, requests: Sequence[TraceRequest]) -> list[Sample]:
    """Send each request at its time in the trace; returns their samples in the same order."""
    model = target.model or await endpoint.first_model()
    bodies = [_body(target, load, model, number, request) for number, request in enumerate(requests)]
    path = "/v1/completions" if target.api == "completions" else "/v1/chat/completions"
    limiter = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else contextlib.nullcontext()
    began = time.perf_counter()
    first = requests[0].timestamp
    async with asyncio.TaskGroup() as group:
        tasks = []
        for request, body in zip(requests, bodies, strict=True):
            due = began + (request.timestamp - first) / 1000 / load.trace_speed
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(_send(endpoint, path, body, limiter)))
    return [task.result() for task in tasks]


def _body(target: Target, load: Load, model: str, index: int, request: TraceRequest) -> dict[str, Any]:
    tokens = prompt_tokens(request, index, block=load.block_size, vocabulary=target.vocabulary, seed=load.seed)
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.output_length,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not target.stop_at_eos:
        body["ignore_eos"] = True
    if target.api == "completions":
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
