"""`minisgl kernels build [MODEL …]`"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.config import DEFAULT_PAGE_SIZE, EngineConfig
from minisgl.flags.arguments import add_options, integer

if TYPE_CHECKING:
    from minisgl.kernels.compile.flashinfer_kernels import FlashInferKernel
    from minisgl.models.config import ModelConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="*",
        help=f"directories with a config.json, or built-in configurations: {', '.join(BUILTIN_CONFIGS)} (default: all "
        "built-in configurations)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="directory for the compiled kernels (default: MINISGL_KERNELS_DIR)",
    )
    parser.add_argument(
        "--arch", type=_architecture, default="9.0a", metavar="X", help="GPU architecture (default: 9.0a, Hopper)"
    )
    parser.add_argument(
        "--tp",
        type=integer(1),
        nargs="+",
        default=(1, 2, 4, 8),
        metavar="N",
        help="numbers of ranks; skipped for models that cannot be split over them (default: 1 2 4 8 ranks)",
    )
    defaults = EngineConfig(model="", page_size=DEFAULT_PAGE_SIZE["cuda"])
    add_options(parser, defaults, only=("page_size", "max_running", "quantization", "kv_cache_dtype", "hf_overrides"))
    parser.add_argument(
        "--jobs", type=integer(1), metavar="N", help="compilers that run at the same time (default: one per core)"
    )
    parser.add_argument(
        "--own-only",
        action="store_true",
        help="compile only minisgl's own kernels, which need a C compiler; flashinfer's need nvcc and ninja, and are "
        "compiled only when they are missing (default: off)",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="print the names of the required kernels of flashinfer and compile nothing (default: off)",
    )


def _architecture(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d[af]?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an architecture such as 9.0a")
    return text


def run(args: argparse.Namespace) -> int:
    configs = [_config(model, args.hf_overrides, args.quantization) for model in args.models or BUILTIN_CONFIGS]
    split = [(config, ranks) for config in configs for ranks in args.tp if ranks in config.tensor_parallel_sizes()]
    flashinfer = [] if args.own_only else _flashinfer_kernels(split, args.page_size)
    if args.list:
        print("\n".join(kernel.name for kernel in flashinfer))
        return 0
    from minisgl.engine.start.rehearsal import rehearse
    from minisgl.errors import KernelBuildError
    from minisgl.kernels.build.flashinfer import build
    from minisgl.kernels.build.triton import Architecture, Launches, check_c_compiler
    from minisgl.kernels.compile.flashinfer_setup import KERNELS_DIR

    out = args.out or os.environ.get(KERNELS_DIR)
    if out is None:
        raise KernelBuildError("no_folder", f"no directory for the kernels; set --out or {KERNELS_DIR}")
    jobs = args.jobs or len(os.sched_getaffinity(0))
    # First, so that a missing compiler is reported before minutes of work.
    check_c_compiler()
    if flashinfer:
        built = build(flashinfer, Path(out), architecture=args.arch, jobs=jobs)
        print(f"compiled {len(built)} kernels of flashinfer, {len(flashinfer) - len(built)} existed already")
    began = time.monotonic()
    architecture = Architecture.parse(args.arch)
    engine = EngineConfig(
        model="",
        device="cuda",
        page_size=args.page_size,
        max_running=args.max_running,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    launches = Launches()
    for config, ranks in split:
        with launches.recorded(architecture):
            rehearse(config, msgspec.structs.replace(engine, tensor_parallel=ranks))
    launches.compile(Path(out), architecture, jobs)
    print(f"compiled {len(launches)} kernels of minisgl in {time.monotonic() - began:.0f} s")
    print(f"to use them, set {KERNELS_DIR}={out}")
    return 0


def _config(model: str, overrides: Mapping[str, Any] | None, quantization: str | None) -> ModelConfig:
    from minisgl.models.config import ModelConfig

    known = BUILTIN_CONFIGS.get(model)
    if known is not None and not Path(model).exists():
        return ModelConfig.parse(known, overrides=overrides, quantization=quantization)
    return ModelConfig.read(model, overrides, quantization)


def _flashinfer_kernels(split: Sequence[tuple[ModelConfig, int]], page_size: int) -> list[FlashInferKernel]:
    """Kernels of flashinfer for models, each with its number of ranks."""
    import torch

    from minisgl.kernels.compile.flashinfer_kernels import HeadShape, kernels_of

    shapes = [
        HeadShape(
            of.num_heads,
            of.num_kv_heads,
            of.head_dim,
            getattr(torch, config.dtype_on("cuda")),
            ranks,
            window=of.window is not None and of.window < config.max_model_len,
        )
        for config, ranks in split
        for of in dict.fromkeys(config.attentions)
    ]
    return kernels_of(shapes, page_size)
