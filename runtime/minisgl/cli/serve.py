"""`minisgl serve MODEL`"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from minisgl.config import EngineConfig
from minisgl.flags.arguments import (
    add_engine_arguments,
    add_log_arguments,
    add_port_argument,
    add_tokenizers_argument,
    filled,
    integer,
    number,
)
from minisgl.flags.manifest import read
from minisgl.flags.request_limits import access_options, add_access_arguments, add_limit_arguments, request_limits
from minisgl.flags.settings import Settings
from minisgl.hub.resolve import resolve
from minisgl.launcher.devices import choose_device
from minisgl.launcher.serve import ServeOptions, serve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="directory of a Hugging Face checkpoint, or a Hub id owner/name"
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit on the Hub (default: main)")
    group = parser.add_argument_group("endpoint")
    group.add_argument("--host", default="127.0.0.1", metavar="ADDR", help="address to listen on (default: 127.0.0.1)")
    add_port_argument(group)
    group.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name in the API (default: MODEL, or its last part)"
    )
    add_tokenizers_argument(group)
    add_access_arguments(parser)
    add_limit_arguments(parser)
    add_engine_arguments(parser)
    group = parser.add_argument_group("start and stop")
    group.add_argument(
        "--startup-timeout",
        type=number(0),
        default=1800.0,
        metavar="S",
        help="longest start, weights and graphs included, before it counts as failed (default: 1800 seconds)",
    )
    group.add_argument(
        "--drain-timeout",
        type=number(0),
        default=25.0,
        metavar="S",
        help="how long running requests may go on after the first Ctrl-C or SIGTERM; a second one ends them "
        "(default: 25 seconds)",
    )
    group.add_argument(
        "--max-restarts",
        type=integer(0),
        default=3,
        metavar="N",
        help="how many times processes that died are started again within --restart-window before everything ends; "
        "0: the first death ends it (default: 3)",
    )
    group.add_argument(
        "--restart-window",
        type=number(0),
        default=600.0,
        metavar="S",
        help="how long a restart counts (default: 600 seconds)",
    )
    add_log_arguments(parser)
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
    options = ServeOptions(
        engine=filled(args, EngineConfig(model=str(directory), device=choose_device(args.device, args.tp))),
        model_name=args.served_model_name or (directory.name if Path(args.model).is_dir() else args.model),
        other_names=other_names,
        revision=args.revision or "",
        host=args.host,
        port=args.port,
        tokenizers=args.tokenizers,
        startup_timeout=args.startup_timeout,
        drain_timeout=args.drain_timeout,
        max_restarts=args.max_restarts,
        restart_window=args.restart_window,
        limits=request_limits(args),
        **access_options(args),
        log_level=args.log_level,
        log_format=args.log_format,
    )
    return serve(options)


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
