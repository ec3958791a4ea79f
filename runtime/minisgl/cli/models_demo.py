"""`minisgl models demo OUT`"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from minisgl.flags.arguments import integer

_REPORT_EVERY: Final = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write; created if it is missing")
    parser.add_argument("--seed", type=integer(0), default=0, metavar="N", help="seed of the training (default: 0)")


def run(args: argparse.Namespace) -> int:
    from minisgl.toy.demo import write_demo_checkpoint

    def progress(step: int, loss: float) -> None:
        if step % _REPORT_EVERY == 0:
            print(f"step {step}, loss {loss:.4f}", file=sys.stderr, flush=True)

    write_demo_checkpoint(args.out, seed=args.seed, progress=progress)
    print(f"demo checkpoint written to {args.out}")
    return 0
