"""`minisgl models agent OUT`"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from minisgl.flags.arguments import integer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "out", metavar="OUT", type=Path, help="directory for one checkpoint per format; created if it is missing"
    )
    parser.add_argument("--seed", type=integer(0), default=3, metavar="N", help="seed of the training (default: 3)")


def run(args: argparse.Namespace) -> int:
    from minisgl.toy.agent import write_agent_checkpoints

    def progress(step: int, right: int, cases: int) -> None:
        print(f"step {step}, {right} of {cases} held-out answers right", file=sys.stderr, flush=True)

    folders = write_agent_checkpoints(args.out, seed=args.seed, progress=progress)
    print(f"agent checkpoints written to {', '.join(map(str, folders.values()))}")
    return 0
