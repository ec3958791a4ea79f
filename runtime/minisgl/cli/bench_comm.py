"""`minisgl bench comm`: latency and bandwidth of all-reduce between the ranks of one machine, by size."""

from __future__ import annotations

import argparse
from typing import Final

from minisgl.bench import comm
from minisgl.flags.arguments import add_json_argument, integer

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
        help="device of the messages (default: auto, CUDA if available)",
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
    comm.run(tp=args.tp, device=args.device, sizes=args.sizes, json=args.json)
    return 0
