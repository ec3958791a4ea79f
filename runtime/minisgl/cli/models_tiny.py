"""`minisgl models tiny OUT`"""

from __future__ import annotations

import argparse
from pathlib import Path

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3-moe")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write; it is made when missing")
    parser.add_argument("--arch", choices=ARCHITECTURES, default="qwen3", help="architecture (default: qwen3)")


def run(args: argparse.Namespace) -> int:
    from minisgl.models.tiny import write_tiny_checkpoint

    write_tiny_checkpoint(args.out, args.arch)
    print(f"{args.arch} checkpoint written to {args.out}")
    return 0
