"""`minisgl models tiny OUT`"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from minisgl.flags.arguments import integer

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3-moe")
QUANTIZATIONS = ("fp8-block", "fp8-channel", "fp8-tensor", "int4", "int4-zeros", "awq", "gptq")

_SIZES: Final = {
    "layers": (2, "decoder layers"),
    "hidden": (128, "width of the model"),
    "heads": (4, "query heads"),
    "kv_heads": (2, "key and value heads"),
    "head_dim": (32, "width of a head; the CUDA kernels need 128"),
    "vocab": (576, "tokens of the vocabulary"),
    "max_position": (2048, "maximum length of prompt and answer, in tokens"),
    "seed": (0, "seed of the weights"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write; created if it is missing")
    parser.add_argument("--arch", choices=ARCHITECTURES, default="qwen3", help="architecture (default: qwen3)")
    parser.add_argument(
        "--quantization", choices=QUANTIZATIONS, help="format in which to quantize the weights (default: none)"
    )
    for name, (default, what) in _SIZES.items():
        flag = "--" + name.replace("_", "-")
        low = 0 if name == "seed" else 1
        parser.add_argument(flag, type=integer(low), default=default, metavar="N", help=f"{what} (default: {default})")


def run(args: argparse.Namespace) -> int:
    from minisgl.toy.tiny import write_tiny_checkpoint

    sizes = {name: getattr(args, name) for name in _SIZES}
    write_tiny_checkpoint(args.out, args.arch, quantization=args.quantization, **sizes)
    print(f"{args.arch} checkpoint written to {args.out}")
    return 0
