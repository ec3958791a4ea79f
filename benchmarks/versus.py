"""Compare OpenAI servers under one client: latency and throughput of streamed chat completions by concurrency.

python benchmarks/versus.py --url minisgl=http://127.0.0.1:8000 --url other=http://127.0.0.1:8001

Each level keeps that many requests in flight: the next prompt arrives as soon as an answer ends, so prompts are
computed while answers run. All servers get the same prompts and lengths, in turn and never at the same time; no prompt
comes twice. Servers that do not fit on one GPU together are measured by a call each, with the same seed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import uvloop

from minisgl.bench.http_client import Endpoint, HttpError
from minisgl.bench.report import Metric, write_report
from minisgl.bench.samples import Sample, median_metrics, summarize
from minisgl.bench.sampling import Sampling
from minisgl.bench.serve import Load, Target, measure
from minisgl.flags.arguments import Parser, add_json_argument, integer

_COLUMNS: Final = {
    "TTFT p50 ms": "ttft_ms_p50",
    "TTFT p99 ms": "ttft_ms_p99",
    "ITL p50 ms": "itl_ms_p50",
    "ITL p99 ms": "itl_ms_p99",
    "TPOT p50 ms": "tpot_ms_p50",
    "tokens/s": "output_tokens_per_second",
    "requests/s": "requests_per_second",
    "failed": "failed",
}
"""Metrics of the table by heading."""


class Server(NamedTuple):
    name: str
    url: str


class Row(NamedTuple):
    """Result of one server at one level: medians over the repeats."""

    concurrency: int
    server: str
    metrics: Mapping[str, Metric]


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    rows: list[Row] = []
    failures: list[str] = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            for number, level in enumerate(args.concurrency):
                level_rows, errors = runner.run(_measure_level(args, number, level))
                rows += level_rows
                failures += errors
        except HttpError as error:
            print(f"versus.py: error: {error}", file=sys.stderr)
            return 1
    print(table(rows))
    if failures:
        print(f"versus.py: error: {len(failures)} requests failed; the first error: {failures[0]}", file=sys.stderr)
    if args.json is not None:
        write_report("versus", _figures(rows), {}, Path(args.json))
    return 1 if failures else 0


async def _measure_level(args: argparse.Namespace, number: int, level: int) -> tuple[list[Row], list[str]]:
    runs: dict[Server, list[Mapping[str, Metric]]] = {server: [] for server in args.url}
    errors: list[str] = []
    for repeat in range(args.repeat):
        # Prompts of their own for each level and repeat, so that no cache knows them.
        seed = args.seed + number * args.repeat + repeat
        # A machine that gets hot or slow disturbs both ends of the order.
        for server in args.url if repeat % 2 == 0 else reversed(args.url):
            samples, seconds = await _run(args, server, level, seed)
            runs[server].append(summarize(samples, seconds, {}))
            errors += [f"{server.name}: {each.error}" for each in samples if each.error]
    return [Row(level, server.name, median_metrics(found)) for server, found in runs.items()], errors


async def _run(args: argparse.Namespace, server: Server, level: int, seed: int) -> tuple[list[Sample], float]:
    endpoint = Endpoint(server.url, os.environ.get("OPENAI_API_KEY"))
    target = Target(url=server.url, model=args.model, api="chat", stop_at_eos=args.stop_at_eos)
    load = Load(
        num_requests=max(args.requests, 4 * level),
        input_len=tuple(args.input_len),
        output_len=tuple(args.output_len),
        max_concurrency=level,
        # Never a prompt of the run.
        warm_up=args.warm_up,
        repeat=len(args.concurrency) * args.repeat,
    )
    samples, client = await measure(endpoint, target, load, Sampling(), seed)
    return samples, client.seconds


def table(rows: Sequence[Row]) -> str:
    """Text with one line for each server and level."""
    lines = [["concurrency", "server", *_COLUMNS]]
    for row in rows:
        values = (row.metrics.get(key) for key in _COLUMNS.values())
        lines.append([str(row.concurrency), row.server, *map(_format, values)])
    width = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        "  ".join(
            cell.ljust(size) if at == 1 else cell.rjust(size)
            for at, (cell, size) in enumerate(zip(line, width, strict=True))
        )
        for line in lines
    ]
    return "\n".join([texts[0], "-" * len(texts[0]), *texts[1:]])


def _format(value: Metric) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def _figures(rows: Sequence[Row]) -> dict[str, Metric]:
    return {f"{row.server}_c{row.concurrency}_{name}": value for row in rows for name, value in row.metrics.items()}


def _server(text: str) -> Server:
    """Type for argparse: URL, or NAME=URL."""
    name, separator, url = text.partition("=")
    if not separator or "/" in name or ":" in name:
        name, url = text.partition("://")[2].rstrip("/") or text, text
    return Server(name, url)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        *("--url", "-u"), action="append", type=_server, required=True, metavar="[NAME=]URL", help="a server; repeat it"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="model to request (default: the first one that each server lists)"
    )
    parser.add_argument(
        *("--concurrency", "-c"),
        nargs="+",
        type=integer(1),
        default=[1, 8, 64],
        metavar="N",
        help="requests in flight, one run for each (default: 1 8 64 requests)",
    )
    parser.add_argument(
        "--requests",
        type=integer(1),
        default=32,
        metavar="N",
        help="requests of a run, at least four times those in flight (default: 32 requests)",
    )
    lengths = (("input", (128, 1024), "prompts", ", as counted roughly"), ("output", (64, 256), "answers", ""))
    for name, default, what, note in lengths:
        parser.add_argument(
            f"--{name}-len",
            nargs=2,
            type=integer(1),
            default=default,
            metavar=("MIN", "MAX"),
            help=f"range of the lengths of {what} (default: {default[0]} to {default[1]} tokens{note})",
        )
    parser.add_argument(
        "--stop-at-eos",
        action="store_true",
        help="let answers end early, for servers without ignore_eos (default: off)",
    )
    parser.add_argument(
        "--warm-up",
        type=integer(0),
        default=2,
        metavar="N",
        help="requests before each run that do not count (default: 2 requests)",
    )
    parser.add_argument(
        "--repeat",
        type=integer(1),
        default=1,
        metavar="N",
        help="runs of each level, of which medians are shown; every other one in the reverse order (default: 1 run)",
    )
    parser.add_argument(
        "--seed", type=integer(0), default=0, metavar="N", help="seed of lengths and prompts (default: 0)"
    )
    add_json_argument(parser)
    args = parser.parse_args(arguments)
    names = [server.name for server in args.url]
    if len(set(names)) < len(names):
        parser.error("two servers have one name; use --url NAME=URL")
    return args


if __name__ == "__main__":
    sys.exit(main())
