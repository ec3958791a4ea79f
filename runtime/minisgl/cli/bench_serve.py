"""`minisgl bench serve`: latency and throughput of any OpenAI endpoint under load."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from minisgl.bench.sampling import Sampling
from minisgl.bench.serve import LatencyLimits, Load, Recording, Target
from minisgl.bench.serve import run as run_benchmark
from minisgl.flags.arguments import add_json_argument, add_options, filled


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser.add_argument_group("endpoint"), Target())
    add_options(parser.add_argument_group("load"), Load())
    add_options(parser.add_argument_group("sampling"), Sampling())
    group = parser.add_argument_group("report")
    add_options(group, LatencyLimits())
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="PNG of the distributions; needs matplotlib (default: none)"
    )
    add_options(group, Recording())
    group.add_argument(
        "--figures",
        nargs="+",
        default=[],
        metavar="NAME=METRIC",
        help="metrics to record, each with its name in the file of --record (default: none)",
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    return run_benchmark(
        filled(args, Target()),
        filled(args, Load()),
        filled(args, Sampling()),
        filled(args, LatencyLimits()),
        msgspec.structs.replace(filled(args, Recording()), figures=tuple(args.figures)),
        plot=args.plot,
        json=args.json,
    )
