"""`minisgl serve MODEL`"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Final

import msgspec

from minisgl.config import EngineConfig
from minisgl.errors import CodedError
from minisgl.flags.arguments import add_options, filled, set_up_log
from minisgl.flags.manifest import read
from minisgl.flags.settings import Settings
from minisgl.hub.places import is_in_bucket
from minisgl.hub.resolve import resolve
from minisgl.launcher.devices import choose_device
from minisgl.launcher.restarts import Limits
from minisgl.launcher.serve import ServeOptions, serve
from minisgl.logging import write_stderr

_DEFAULTS: Final = ServeOptions(
    engine=EngineConfig(model=""),
    model_name="",
    restarts=Limits(startup_timeout=1800.0, max_restarts=3, restart_window=600.0),
    drain_timeout=25.0,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="directory of a Hugging Face checkpoint, a Hub id owner/name, or s3://BUCKET/PREFIX",
    )
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name in the API (default: MODEL, or its last part)"
    )
    add_options(parser, _DEFAULTS)
    # Last, so that it takes over everything above.
    Settings(parser)
    parser.add_argument(
        "--file",
        "-f",
        type=Path,
        metavar="FILE",
        help="serve the InferenceModel in this file; flags, variables and --config have priority (default: none)",
    )


def run(args: argparse.Namespace) -> int:
    sources = args.settings.resolve(args)
    for warning in args.settings.warnings:
        write_stderr(f"minisgl: warning: {warning}")
    other_names = () if args.file is None else _take_manifest(args, sources)
    if args.print_config:
        print(args.settings.render(args, sources) + _attention_comment(args), end="")
        return 0
    if args.model is None:
        args.settings.usage_error("the following arguments are required: MODEL")
    if is_in_bucket(args.model):
        # Its download is reported in the log.
        set_up_log(args, filled(args, _DEFAULTS).log)
    directory = resolve(args.model, args.revision, with_weights=not args.dummy_weights)
    options = msgspec.structs.replace(
        filled(args, _DEFAULTS),
        model_name=args.served_model_name or _name(args.model, directory),
        other_names=other_names,
    )
    device = choose_device(args.device, args.tp)
    engine = msgspec.structs.replace(options.engine, model=str(directory), device=device)
    set_up_log(args, options.log)
    serve(msgspec.structs.replace(options, engine=engine))
    return 0


def _name(model: str, directory: Path) -> str:
    """Name of the model in the API, unless another one is set."""
    if is_in_bucket(model):
        return model.rstrip("/").rpartition("/")[2]
    return directory.name if Path(model).is_dir() else model


def _attention_comment(args: argparse.Namespace) -> str:
    """Comment with the attention backends that a start on this machine would use, as far as that is known."""
    if args.model is None or not (Path(args.model) / "config.json").is_file():
        return "# attention backends: chosen at the start, from the model's config.json\n"
    try:
        device = choose_device(args.device)
        if device == "cpu" and args.attention_backend == "auto":
            return "# attention backends on cpu: torch\n"
        from minisgl.engine.engine import planned_attention

        engine = msgspec.structs.replace(filled(args, _DEFAULTS).engine, model=args.model, device=device)
        found = planned_attention(engine)
    except (CodedError, ImportError, RuntimeError) as error:
        return f"# attention backends: unknown, because the start would fail here: {' '.join(str(error).split())}\n"
    lines = [f"#   {kind}: {backend}\n" for kind, backend in found.items()]
    return f"# attention backends on {device}:\n{''.join(lines)}"


def _take_manifest(args: argparse.Namespace, sources: dict[str, str]) -> tuple[str, ...]:
    """Apply the file of --file; returns the names of the model besides the first."""
    manifest = read(args.file)
    named_elsewhere = sources["served-model-name"] != "default"
    args.settings.fill(args, sources, manifest.settings, args.file)
    for name, value in manifest.environment.items():
        os.environ.setdefault(name, value)
    for warning in manifest.warnings:
        write_stderr(f"minisgl: warning: {args.file}: {warning}")
    if args.model is None:
        args.settings.usage_error(
            f"{args.file}: its model is neither on the Hub nor in a bucket; give its directory: minisgl serve DIR "
            "-f FILE"
        )
    return () if named_elsewhere else tuple(manifest.other_names)
