"""`minisgl bench comm`: what an all-reduce between the ranks of one machine costs, by size."""

from __future__ import annotations

import argparse
from typing import Final

from minisgl.bench.comm import measure_on_this_machine
from minisgl.bench.report import Figure, report
from minisgl.flags.arguments import add_json_argument, integer
from minisgl.launcher.devices import choose_device

_SIZES: Final = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tp",
        type=integer(2),
        default=2,
        metavar="N",
        help="ranks, one process (and on CUDA one GPU) each (default: 2 ranks)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where the messages are (default: auto, CUDA where there is one)",
    )
    parser.add_argument(
        "--sizes",
        type=integer(2),
        nargs="+",
        default=_SIZES,
        metavar="N",
        help="message sizes in bytes of bfloat16 (default: powers of four from 4 KiB to 64 MiB, in bytes)",
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    device = choose_device(args.device, args.tp)
    measured = measure_on_this_machine(device, args.tp, args.sizes)
    figures: dict[str, Figure] = {"transport": measured.transport, "device": device, "tensor_parallel": args.tp}
    for timing in measured.timings:
        size = _size(timing.num_bytes)
        figures[f"latency_us_{size}"] = timing.seconds * 1e6
        figures[f"bus_gb_per_s_{size}"] = timing.bus_bandwidth / 1e9
    report("comm", figures, {}, args.json)
    return 0


def _size(num_bytes: int) -> str:
    """`64KiB`: the largest unit that leaves a whole number."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes % unit == 0:
            return f"{num_bytes // unit}{name}"
    return f"{num_bytes}B"
