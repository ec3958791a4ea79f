"""Types and groups of flags that several commands share. Every help text ends with default and unit."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from minisgl.config import MAX_RUNNING, Device, EngineConfig
from minisgl.launcher.devices import choose_device, default_page_size
from minisgl.logging import LogFormat, LogLevel
from minisgl.wire.status import HTTP_PORT

_BACKENDS: Final = ("torch", "flashinfer", "xqa", "balanced", "fa3")
_MAX_PAGE_SIZE: Final = 256
_MAX_PORT: Final = 65535
"""Of the OpenAI endpoint."""


class Parser(argparse.ArgumentParser):
    """Errors are one line and name the command whose help explains more; abbreviated flags are not guessed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Formatter, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """A command's parser is asked here by the one above it, which would not know whose help explains the rest."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown and self.exit_on_error:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=110)


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """A type for argparse: a whole number in low..high."""
    span = f"{low} or more" if high is None else f"{low} to {high}"

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d+", text) or int(text) < low or (high is not None and int(text) > high):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, {span}")
        return int(text)

    return parse


def number(low: float, high: float | None = None) -> Callable[[str], float]:
    """A type for argparse: a number above `low`, up to `high`."""
    span = f"above {low:g}" if high is None else f"above {low:g}, up to {high:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not value > low or value == float("inf") or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {span}")
        return value

    return parse


def backend(text: str) -> str:
    """A type for argparse: `auto`, one backend, or `PREFILL,DECODE`."""
    parts = text.split(",")
    if text != "auto" and (len(parts) > 2 or not all(part in _BACKENDS for part in parts)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not auto, one of {', '.join(_BACKENDS)}, or two of them as PREFILL,DECODE"
        )
    return text


port = integer(0, _MAX_PORT)


def default_of(field: str) -> Any:
    """The default of a field of EngineConfig, so that it is said in one place."""
    return next(f.default for f in msgspec.structs.fields(EngineConfig) if f.name == field)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--tp",
        type=integer(1),
        default=1,
        metavar="N",
        help="tensor-parallel ranks, one process (and on CUDA one GPU) each (default: 1 rank)",
    )
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where the model runs (default: auto, CUDA where there is one)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default=default_of("dtype"),
        help="type of weights and KV (default: auto, what config.json says, but float32 on a CPU)",
    )
    group.add_argument(
        "--max-running",
        type=integer(1, MAX_RUNNING),
        default=default_of("max_running"),
        metavar="N",
        help=f"most requests in the batch at a time (default: {default_of('max_running')} requests)",
    )
    group.add_argument(
        "--max-model-len",
        type=integer(2),
        metavar="N",
        help="longest prompt plus answer (default: what the model supports and the KV pool holds, in tokens)",
    )
    group.add_argument(
        "--max-step-tokens",
        type=integer(1),
        default=default_of("max_step_tokens"),
        metavar="N",
        help="token budget of one step: each decoding request takes one, prompts are cut into chunks of what is left "
        f"(default: {default_of('max_step_tokens')} tokens)",
    )
    group.add_argument(
        "--page-size",
        type=integer(1, _MAX_PAGE_SIZE),
        metavar="N",
        help="tokens a page of the KV pool holds, 1 to 256 (default: 64 tokens on CUDA, 16 on a CPU)",
    )
    group.add_argument(
        "--num-pages",
        type=integer(1),
        metavar="N",
        help="pages of the KV pool (default: as many as --memory-fraction leaves room for)",
    )
    group.add_argument(
        "--memory-fraction",
        type=number(0, 1),
        default=default_of("memory_fraction"),
        metavar="X",
        help="share of the device's free memory for weights, KV pool and graphs together "
        f"(default: {default_of('memory_fraction')})",
    )
    group.add_argument(
        "--cache",
        choices=("radix", "naive"),
        default="radix",
        help="prefix cache: radix shares the KV of equal prompt beginnings, naive shares nothing (default: radix)",
    )
    group.add_argument(
        "--no-overlap",
        action="store_true",
        help="wait for each step's result before the next step is launched (default: off, steps overlap)",
    )
    group.add_argument(
        "--attention-backend",
        type=backend,
        default=default_of("attention_backend"),
        metavar="NAME",
        help=f"{', '.join(_BACKENDS)}, or PREFILL,DECODE (default: auto, the fastest that is installed and fits)",
    )
    group.add_argument(
        "--cuda-graph-max-batch",
        type=integer(0),
        metavar="N",
        help="largest decode batch with a CUDA graph, 0 for none (default: --max-running, in requests)",
    )
    group.add_argument(
        "--dummy-weights",
        action="store_true",
        help="random weights in place of the checkpoint's, for benchmarks (default: off)",
    )
    group.add_argument(
        "--audit",
        action="store_true",
        help="check invariants at a cost: freed pages are filled with NaN and handed out in random order "
        "(default: off)",
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `add_engine_arguments` was given, under the names that `LLM` has for it."""
    names = (
        *("tp", "device", "dtype", "max_running", "max_model_len", "max_step_tokens", "page_size", "num_pages"),
        *("memory_fraction", "cache", "attention_backend", "cuda_graph_max_batch", "dummy_weights", "audit"),
    )
    return {name: getattr(args, name) for name in names} | {"overlap": not args.no_overlap}


def engine_config(args: argparse.Namespace, model: Path, device: Device | None = None) -> EngineConfig:
    """The configuration of rank 0, on `device` if that is known. Raises LauncherError where the device is not there."""
    device = device or choose_device(args.device, args.tp)
    return EngineConfig(
        model=str(model),
        device=device,
        dtype=args.dtype,
        tensor_parallel=args.tp,
        page_size=args.page_size or default_page_size(device),
        num_pages=args.num_pages,
        memory_fraction=args.memory_fraction,
        max_running=args.max_running,
        max_model_len=args.max_model_len,
        max_step_tokens=args.max_step_tokens,
        attention_backend=args.attention_backend,
        cuda_graph_max_batch=args.cuda_graph_max_batch,
        dummy_weights=args.dummy_weights,
        audit=args.audit,
    )


def add_port_argument(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--port",
        type=port,
        default=HTTP_PORT,
        metavar="N",
        help=f"TCP port, 0 for a free one (default: {HTTP_PORT})",
    )


def add_tokenizers_argument(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tokenizers",
        type=integer(0, 64),
        default=1,
        metavar="N",
        help="tokenizer processes; 0: in the API process (default: 1 process)",
    )


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("log")
    group.add_argument(
        "--log-level",
        choices=LogLevel.__args__,  # type: ignore[attr-defined]
        default="info",
        help="least severe lines that are written to stderr (default: info)",
    )
    group.add_argument(
        "--log-format",
        choices=LogFormat.__args__,  # type: ignore[attr-defined]
        default="auto",
        help="text for people, json for machines: one object a line (default: auto, text on a terminal)",
    )


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE as JSON (default: not written)")
