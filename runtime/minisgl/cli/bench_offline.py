"""`minisgl bench offline`: output tokens per second of scheduler and engine, beside the roofline of the hardware."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

import msgspec

from minisgl.bench import offline
from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.bench.workloads import WORKLOADS, Sizes
from minisgl.flags.arguments import add_engine_arguments, add_json_argument, engine_options, integer

_DEFAULTS: Final = Sizes()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="qwen3-0.6b",
        metavar="MODEL",
        help="directory, Hub id, or a built-in configuration, which always has dummy weights: "
        f"{', '.join(BUILTIN_CONFIGS)} (default: qwen3-0.6b)",
    )
    parser.add_argument(
        "--workload",
        choices=tuple(WORKLOADS),
        nargs="+",
        default=["A"],
        help="A: independent requests, C: a single request, C64: 64 of them, D: requests with a shared prefix; several "
        "run one after the other, and the names of their metrics begin with the workload's (default: A)",
    )
    parser.add_argument(
        "--num-requests",
        type=integer(1),
        default=_DEFAULTS.requests,
        metavar="N",
        help=f"number of requests of A and D (default: {_DEFAULTS.requests} requests)",
    )
    for flag, noun, default in (
        ("--input-len", "prompts", _DEFAULTS.input_length),
        ("--output-len", "answers", _DEFAULTS.output_length),
    ):
        parser.add_argument(
            flag,
            type=integer(1),
            nargs=2,
            default=default,
            metavar=("LO", "HI"),
            help=f"range of the lengths of {noun} of A (default: {default[0]} {default[1]} tokens)",
        )
    parser.add_argument(
        "--seed", type=integer(0), default=0, metavar="N", help="seed of lengths, tokens and sampling (default: 0)"
    )
    parser.add_argument(
        "--repeat",
        type=integer(1),
        default=1,
        metavar="N",
        help="timed runs, each with the next seed; the median is reported (default: 1 run)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a trace in Chrome's format of one more run with short answers, and print how long the device was "
        "idle; with several workloads, the name of each becomes part of FILE (default: none)",
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="update the results in FILE, which holds those of other models and workloads on the same kind of device "
        "(default: none)",
    )
    add_json_argument(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    offline.run(msgspec.convert(vars(args), offline.OfflineOptions), engine_options(args))
    return 0
