"""`minisgl bench serve`: latency and throughput of any OpenAI endpoint under load."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from minisgl.bench.http_client import Endpoint, HttpError
from minisgl.bench.report import Figure, report
from minisgl.bench.traces import Shape, TraceRequest, make_trace, prompt_tokens, read_trace, write_trace
from minisgl.flags.arguments import add_json_argument, integer, number

PERCENTILES: Final = (50, 90, 99)
_LIMITS: Final = {"ttft": "time to first token", "tpot": "time per output token after it", "e2e": "whole answer"}


class Sample(msgspec.Struct):
    """One request: seconds from when it was sent."""

    ttft: float = 0.0
    gaps: list[float] = []
    e2e: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """None for answers of one token."""
        return sum(self.gaps) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("endpoint")
    group.add_argument(
        "--url", default="http://127.0.0.1:8000", help="of the endpoint (default: http://127.0.0.1:8000)"
    )
    group.add_argument("--model", metavar="NAME", help="which of its models (default: the first it lists)")
    group.add_argument(
        "--api-key", metavar="KEY", help="sent to the endpoint (default: the variable OPENAI_API_KEY, or none)"
    )
    group.add_argument(
        "--api",
        choices=("completions", "chat"),
        default="completions",
        help="completions: prompts are token ids of exact length; chat: text of about that many tokens "
        "(default: completions)",
    )
    group.add_argument(
        "--vocabulary",
        type=integer(2),
        default=256,
        metavar="N",
        help="prompts are made of token ids below this (default: 256, which every model has)",
    )
    group.add_argument(
        "--stop-at-eos",
        action="store_true",
        help="let answers end early, for endpoints that know no ignore_eos (default: off)",
    )
    group = parser.add_argument_group("load")
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="requests to send, one JSON object a line (default: made up)"
    )
    group.add_argument(
        "--trace-speed", type=number(0), default=1.0, metavar="X", help="times as fast as the trace says (default: 1)"
    )
    group.add_argument("--num-requests", type=integer(1), default=100, metavar="N", help="made up (default: 100)")
    for flag, low, high, what in (("--input-len", 64, 512, "prompts"), ("--output-len", 16, 128, "answers")):
        group.add_argument(
            flag,
            type=integer(1),
            nargs=2,
            default=(low, high),
            metavar=("MIN", "MAX"),
            help=f"lengths of made-up {what} (default: {low} to {high} tokens)",
        )
    group.add_argument("--request-rate", type=number(0), metavar="X", help="arrivals per second (default: all at once)")
    group.add_argument(
        "--burstiness",
        type=number(0),
        default=1.0,
        metavar="X",
        help="1: Poisson arrivals; more: in bursts; near 0: regular (default: 1)",
    )
    group.add_argument(
        "--shared-prefixes",
        type=integer(0),
        default=0,
        metavar="N",
        help="made-up prompts have one of N beginnings, half a prompt long (default: 0, none is shared)",
    )
    group.add_argument(
        "--block-size",
        type=integer(1),
        default=512,
        metavar="N",
        help="tokens that one entry of a trace's hash_ids stands for (default: 512 tokens)",
    )
    group.add_argument("--max-concurrency", type=integer(1), metavar="N", help="at a time (default: no limit)")
    group.add_argument("--seed", type=integer(0), default=0, metavar="N", help="of what is made up (default: 0)")
    group.add_argument(
        "--write-trace", type=Path, metavar="FILE", help="write the requests there and send none (default: send them)"
    )
    group = parser.add_argument_group("report")
    for name, what in _LIMITS.items():
        group.add_argument(
            f"--slo-{name}-ms",
            type=number(0),
            metavar="MS",
            help=f"limit for the {what}; requests within all limits are the goodput (default: no limit)",
        )
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="PNG of the distributions; needs matplotlib (default: none)"
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    import uvloop

    requests = _requests(args)
    if args.write_trace is not None:
        write_trace(args.write_trace, requests)
        print(f"{len(requests)} requests written to {args.write_trace}")
        return 0
    endpoint = Endpoint(args.url, args.api_key or os.environ.get("OPENAI_API_KEY"))
    began = time.perf_counter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        samples = runner.run(_send_all(endpoint, args, requests))
    limits = {name: getattr(args, f"slo_{name}_ms") for name in _LIMITS}
    figures = summarize(samples, time.perf_counter() - began, {k: v for k, v in limits.items() if v is not None})
    report("serve", figures, {}, args.json)
    errors = [sample.error for sample in samples if sample.error]
    if errors:
        print(f"minisgl: error: {len(errors)} requests failed, the first one: {errors[0]}", file=sys.stderr)
    if args.plot is not None:
        plot(samples, args.plot)
    return 1 if errors else 0


def summarize(samples: Sequence[Sample], seconds: float, limits_ms: dict[str, float]) -> dict[str, Figure]:
    """The figures of the report; latencies are over the requests that were answered."""
    good = [sample for sample in samples if not sample.error]
    figures: dict[str, Figure] = {
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
            figures[f"{name}_ms_mean"] = float(np.mean(values)) * 1000
            for percent in PERCENTILES:
                figures[f"{name}_ms_p{percent}"] = float(np.percentile(values, percent)) * 1000
    if limits_ms:
        within = sum(all((getattr(s, name) or 0) * 1000 <= limit for name, limit in limits_ms.items()) for s in good)
        figures["goodput_requests_per_second"] = within / seconds
        figures["goodput_share"] = within / len(samples)
    return figures


def _latencies(samples: Sequence[Sample]) -> dict[str, list[float]]:
    return {
        "ttft": [sample.ttft for sample in samples],
        "tpot": [tpot for sample in samples if (tpot := sample.tpot) is not None],
        "itl": [gap for sample in samples for gap in sample.gaps],
        "e2e": [sample.e2e for sample in samples],
    }


def plot(samples: Sequence[Sample], path: Path) -> None:
    """Cumulative distributions of the latencies."""
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        print("minisgl: no plot: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return
    canvas = Canvas(figsize=(10, 6), layout="constrained")
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


def _requests(args: argparse.Namespace) -> list[TraceRequest]:
    if args.trace is not None:
        return read_trace(args.trace)
    return make_trace(
        Shape(
            requests=args.num_requests,
            input_length=(args.input_len[0], max(args.input_len)),
            output_length=(args.output_len[0], max(args.output_len)),
            rate=args.request_rate,
            burstiness=args.burstiness,
            shared_prefixes=args.shared_prefixes,
            block=args.block_size,
        ),
        args.seed,
    )


async def _send_all(endpoint: Endpoint, args: argparse.Namespace, requests: Sequence[TraceRequest]) -> list[Sample]:
    model = args.model or await endpoint.first_model()
    bodies = [_body(args, model, number, request) for number, request in enumerate(requests)]
    path = "/v1/completions" if args.api == "completions" else "/v1/chat/completions"
    room = asyncio.Semaphore(args.max_concurrency) if args.max_concurrency else contextlib.nullcontext()
    began = time.perf_counter()
    first = requests[0].timestamp
    async with asyncio.TaskGroup() as group:
        tasks = []
        for request, body in zip(requests, bodies, strict=True):
            due = began + (request.timestamp - first) / 1000 / args.trace_speed
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(_send(endpoint, path, body, room)))
    return [task.result() for task in tasks]


def _body(args: argparse.Namespace, model: str, index: int, request: TraceRequest) -> dict[str, Any]:
    tokens = prompt_tokens(request, index, block=args.block_size, vocabulary=args.vocabulary, seed=args.seed)
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.output_length,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not args.stop_at_eos:
        body["ignore_eos"] = True
    if args.api == "completions":
        return body | {"prompt": tokens}
    # A short word is about a token.
    return body | {"messages": [{"role": "user", "content": " ".join(f"w{token}" for token in tokens[::2])}]}


async def _send(endpoint: Endpoint, path: str, body: dict[str, Any], room: Any) -> Sample:
    sample = Sample(gaps=[])
    async with room:
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
    # An answer may have had no text at all; then its first sign of life was its end.
    sample.ttft = sample.ttft or sample.e2e
    return sample
