"""Load for an OpenAI endpoint: send requests, measure latency and throughput of the streamed answers."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from minisgl.bench import record as bench_record
from minisgl.bench.http_client import Endpoint, HttpError, encoded
from minisgl.bench.record import Result
from minisgl.bench.report import Metric, report
from minisgl.bench.samples import Sample, median_metrics, sample, summarize, write_plot
from minisgl.bench.sampling import Sampling
from minisgl.bench.sending import Client, TimedRequest, send_all
from minisgl.bench.traces import TraceRequest, TraceShape, make_trace, prompt_tokens, read_trace, write_trace
from minisgl.bench.workloads import WORKLOADS, Sizes, WorkloadName
from minisgl.errors import BenchError
from minisgl.options import Count, Index, option

_LAG_LIMIT_MS: Final = 2.0
_SYNTHETIC_REQUESTS: Final = 100

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
    workload: Annotated[
        WorkloadName | None,
        option("send the requests of this workload of bench offline, all at the same time", default="a trace"),
    ] = None
    num_requests: Annotated[
        Count | None, option("number of requests", default="100 synthetic ones, or 256 of workloads A and D")
    ] = None
    input_len: Annotated[
        _Lengths,
        option(
            "range of the lengths of synthetic prompts, or one length",
            default="{0[0]} to {0[1]} tokens",
            metavar="MIN MAX",
        ),
    ] = (64, 512)
    output_len: Annotated[
        _Lengths,
        option(
            "range of the lengths of synthetic answers, or one length",
            default="{0[0]} to {0[1]} tokens",
            metavar="MIN MAX",
        ),
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
    warm_up: Annotated[
        Index, option("requests before the measured ones, one at a time, that do not count", default="{} requests")
    ] = 0
    seed: Annotated[Index, option("seed of requests and prompts")] = 0
    repeat: Annotated[Count, option("runs, each with the next seed; medians are reported", default="{} run")] = 1
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


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """File that keeps the newest results, and the metrics to add to it."""

    file: Annotated[
        Path | None,
        option("update the results in FILE, which holds others on the same kind of device", default="none"),
    ] = msgspec.field(default=None, name="record")
    figures: tuple[str, ...] = ()
    """Each is NAME=METRIC: the metric of the report, and its name in the file."""

    def results(self, runs: Sequence[Mapping[str, Metric]]) -> dict[str, Result]:
        """Results by name, with medians over `runs`. Raises BenchError `bad_figure` for an unknown metric."""
        found = {}
        medians = median_metrics(runs)
        for figure in self.figures:
            name, _, key = figure.partition("=")
            values = [value for run in runs if isinstance(value := run.get(key), int | float)]
            value = medians.get(key)
            if not isinstance(value, int | float):
                raise BenchError("bad_figure", f"{figure}: the report has no metric {key!r}; use NAME=METRIC")
            found[name] = Result(value, (min(values), max(values)))
        return found


class _Prepared(msgspec.Struct, frozen=True):
    """Request of a run."""

    due: float
    """Seconds since the beginning."""
    prompt: list[int]
    output_length: int
    sampling: dict[str, Any]


def run(
    target: Target,
    load: Load,
    sampling: Sampling,
    limits: LatencyLimits,
    recording: Recording,
    *,
    plot: Path | None,
    json: str | None,
) -> int:
    """Run the benchmark, print and write its report. Returns the exit code: 1 if any request failed. Raises HttpError,
    BenchError `bad_trace`."""
    import uvloop

    if load.write_trace is not None:
        requests = _trace(load, load.seed)
        write_trace(load.write_trace, requests)
        print(f"{len(requests)} requests written to {load.write_trace}")
        return 0
    known = None if recording.file is None else bench_record.read(recording.file)
    endpoint = Endpoint(target.url, target.api_key or os.environ.get("OPENAI_API_KEY"))
    runs: list[dict[str, Metric]] = []
    samples: list[Sample] = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for seed in range(load.seed, load.seed + load.repeat):
            found, client = runner.run(measure(endpoint, target, load, sampling, seed))
            samples += found
            runs.append(summarize(found, client.seconds, limits.given()) | _client_metrics(client))
        compiled = runner.run(_compiled_after_ready(endpoint))
    metrics = median_metrics(runs)
    if compiled is not None:
        metrics["compiled_after_ready"] = compiled
    report("serve", metrics, {}, json)
    errors = [sample.error for sample in samples if sample.error]
    if errors:
        print(f"minisgl: error: {len(errors)} requests failed; the first error: {errors[0]}", file=sys.stderr)
    elif recording.file is not None and known is not None:
        results = recording.results(runs)
        run_name = f"serve {next(iter(results), target.url)}"
        bench_record.update(recording.file, known, results, None if compiled is None else (run_name, compiled))
    if plot is not None:
        write_plot(samples, plot)
    return 1 if errors else 0


async def measure(
    endpoint: Endpoint, target: Target, load: Load, sampling: Sampling, seed: int
) -> tuple[list[Sample], Client]:
    """Send the requests of the run with `seed` once. Returns the measurement of each. Raises HttpError, BenchError
    `bad_trace`."""
    prepared = _prepare(target, load, seed)
    model = target.model or await endpoint.first_model()
    path = "/v1/completions" if target.api == "completions" else "/v1/chat/completions"
    if load.warm_up:
        others = _prepare(target, load, seed + load.repeat)[: load.warm_up]
        what = "warm-up requests"
        await send_all(endpoint, path, [_encoded(target, sampling, model, other) for other in others], 1, what)
    requests = [_encoded(target, sampling, model, request) for request in prepared]
    answers, client = await send_all(endpoint, path, requests, load.max_concurrency)
    return list(map(sample, answers)), client


def _trace(load: Load, seed: int) -> list[TraceRequest]:
    if load.trace is not None:
        return read_trace(load.trace)
    return make_trace(
        TraceShape(
            requests=load.num_requests or _SYNTHETIC_REQUESTS,
            input_length=(load.input_len[0], max(load.input_len)),
            output_length=(load.output_len[0], max(load.output_len)),
            rate=load.request_rate,
            burstiness=load.burstiness,
            shared_prefixes=load.shared_prefixes,
            block=load.block_size,
        ),
        seed,
    )


def _prepare(target: Target, load: Load, seed: int) -> list[_Prepared]:
    """Requests of the run with `seed`."""
    if load.workload is not None:
        sizes = Sizes() if load.num_requests is None else Sizes(requests=load.num_requests)
        workload = WORKLOADS[load.workload](sizes, target.vocabulary, seed)
        return [
            _Prepared(0.0, prompt, length, {"temperature": workload.temperature, "seed": number})
            for number, (prompt, length) in enumerate(zip(workload.prompts, workload.output_lengths, strict=True))
        ]
    requests = _trace(load, seed)
    first = requests[0].timestamp
    return [
        _Prepared(
            (request.timestamp - first) / 1000 / load.trace_speed,
            prompt_tokens(request, number, block=load.block_size, vocabulary=target.vocabulary, seed=seed),
            request.output_length,
            {"temperature": 0},
        )
        for number, request in enumerate(requests)
    ]


def _encoded(target: Target, sampling: Sampling, model: str, request: _Prepared) -> TimedRequest:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.output_length,
        "stream": True,
        "stream_options": {"include_usage": True},
        **request.sampling,
        **sampling.given(),
    }
    if not target.stop_at_eos:
        body["ignore_eos"] = True
    if target.api == "completions":
        body["prompt"] = request.prompt
    else:
        # A short word is about two tokens.
        content = " ".join(f"w{token}" for token in request.prompt[::2])
        body["messages"] = [{"role": "user", "content": content}]
        if sampling.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": sampling.logprobs}
    return TimedRequest(request.due, encoded(body))


def _client_metrics(client: Client) -> dict[str, Metric]:
    if client.lag_ms_p99 > _LAG_LIMIT_MS:
        print(
            f"minisgl: warning: the event loop of this client lags by {client.lag_ms_p99:.1f} ms (p99), so latencies "
            "include the client's own; run it on a core of its own, or send less",
            file=sys.stderr,
        )
    return {"client_cpu_share": client.cpu_share, "client_lag_ms_p99": client.lag_ms_p99}


async def _compiled_after_ready(endpoint: Endpoint) -> int | None:
    """Kernels that the server has compiled while it served; None if it does not report them."""
    try:
        async with endpoint.request("GET", "/metrics") as response:
            text = (await response.read()).decode(errors="replace")
    except HttpError:
        return None
    values = re.findall(r"^minisgl:kernels_compiled_after_ready_total\S* (\S+)$", text, re.MULTILINE)
    return int(sum(map(float, values))) if values else None
