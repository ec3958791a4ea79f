"""`minisgl bench offline`: output tokens per second of scheduler and engine, beside the roofline of the hardware."""

from __future__ import annotations

import argparse

import msgspec

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.bench.offline import OfflineOptions
from minisgl.bench.offline import run as run_benchmark
from minisgl.bench.sampling import VARIANTS, Sampling, variants
from minisgl.bench.workloads import WORKLOADS, Sizes
from minisgl.flags.arguments import add_engine_arguments, add_json_argument, add_options, engine_options, filled


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
        help="A: independent requests, C: a single request, C64: 64 of them, D: requests with a shared prefix, L: one "
        "long prompt; several run one after the other, and the names of their metrics begin with the workload's "
        "(default: A)",
    )
    parser.add_argument(
        "--variants",
        choices=tuple(VARIANTS),
        nargs="+",
        default=[],
        help="ways to sample each workload, one after the other. plain: temperature alone, topk: top-k 20 and top-p "
        "0.95, penalty: presence 1.0 and frequency 0.2, logprobs: 5 of them, mixed: a quarter of the requests each "
        "(default: the parameters below)",
    )
    add_options(parser.add_argument_group("sampling"), Sampling())
    add_options(parser, Sizes())
    add_options(parser, OfflineOptions())
    add_json_argument(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    options = msgspec.structs.replace(
        filled(args, OfflineOptions()),
        workloads=tuple(args.workload),
        variants=variants(args.variants, filled(args, Sampling())),
    )
    run_benchmark(args.model, filled(args, Sizes()), options, engine_options(args), json_path=args.json)
    return 0
