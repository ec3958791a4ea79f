"""`minisgl serve MODEL`"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Final

from minisgl.config import EngineConfig
from minisgl.flags.arguments import (
    add_engine_arguments,
    add_options,
    filled,
    number,
    set_up_log,
)
from minisgl.flags.manifest import read
from minisgl.flags.settings import Settings
from minisgl.frontend.config import Access, RequestLimits
from minisgl.hub.resolve import resolve
from minisgl.launcher.devices import choose_device
from minisgl.launcher.endpoint import Endpoint
from minisgl.launcher.restarts import Limits
from minisgl.launcher.serve import ServeOptions, serve
from minisgl.logging import LogOptions

_RESTARTS: Final = Limits(startup_timeout=1800.0, max_restarts=3, restart_window=600.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="directory of a Hugging Face checkpoint, or a Hub id owner/name"
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit on the Hub (default: main)")
    group = parser.add_argument_group("endpoint")
    add_options(group, Endpoint())
    group.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name in the API (default: MODEL, or its last part)"
    )
    add_options(parser.add_argument_group("access"), Access())
    add_options(parser.add_argument_group("limits"), RequestLimits())
    add_engine_arguments(parser)
    group = parser.add_argument_group("start and stop")
    add_options(group, _RESTARTS)
    group.add_argument(
        "--drain-timeout",
        type=number(0),
        default=25.0,
        metavar="S",
        help="how long running requests may go on after the first Ctrl-C or SIGTERM; a second one ends them "
        "(default: 25 seconds)",
    )
    add_options(parser.add_argument_group("log"), LogOptions())
    # Last, so that it takes over everything above.
    Settings(parser)
    parser.add_argument(
        "--file",
        "-f",
        type=Path,
        metavar="FILE",
        help="serve the InferenceModel in this file; flags, variables and --config win over it (default: none)",
    )


def run(args: argparse.Namespace) -> int:
    sources = args.settings.resolve(args)
    other_names = () if args.file is None else _take_manifest(args, sources)
    if args.print_config:
        print(args.settings.render(args, sources), end="")
        return 0
    if args.model is None:
        args.settings.refuse("the following arguments are required: MODEL")
    directory = resolve(args.model, args.revision, with_weights=not args.dummy_weights)
    engine = EngineConfig(model=str(directory), device=choose_device(args.device, args.tp))
    options = ServeOptions(
        engine=filled(args, engine),
        model_name=args.served_model_name or (directory.name if Path(args.model).is_dir() else args.model),
        other_names=other_names,
        revision=args.revision or "",
        endpoint=filled(args, Endpoint()),
        access=filled(args, Access()),
        limits=filled(args, RequestLimits()),
        restarts=filled(args, _RESTARTS),
        drain_timeout=args.drain_timeout,
        log=set_up_log(args),
    )
    serve(options)
    return 0


def _take_manifest(args: argparse.Namespace, sources: dict[str, str]) -> tuple[str, ...]:
    """Set what the file says; the names of the model besides the first."""
    manifest = read(args.file)
    named_elsewhere = sources["served-model-name"] != "default"
    args.settings.fill(args, sources, manifest.settings, args.file)
    for name, value in manifest.environment.items():
        os.environ.setdefault(name, value)
    for warning in manifest.warnings:
        print(f"minisgl: warning: {args.file}: {warning}", file=sys.stderr)
    if args.model is None:
        args.settings.refuse(f"{args.file}: its model is not on the Hub: give its directory, minisgl serve DIR -f FILE")
    return () if named_elsewhere else tuple(manifest.other_names)
