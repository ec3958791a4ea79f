"""`minisgl models dummy NAME OUT`"""

from __future__ import annotations

import argparse
from pathlib import Path

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=tuple(BUILTIN_CONFIGS), metavar="NAME", help=", ".join(BUILTIN_CONFIGS))
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write; created if it is missing")


def run(args: argparse.Namespace) -> int:
    from minisgl.toy.tiny import write_dummy_checkpoint

    write_dummy_checkpoint(args.out, BUILTIN_CONFIGS[args.name])
    print(f"{args.name} without weights written to {args.out}; serve it with --dummy-weights")
    return 0
