"""`minisgl frontend --engines HOST`"""

from __future__ import annotations

import argparse
from typing import Final

import msgspec

from minisgl.flags.arguments import add_options, filled, set_up_log
from minisgl.launcher.endpoint import Endpoint
from minisgl.launcher.frontend import FrontendOptions, serve_frontend
from minisgl.wire.listener import ALL_ADDRESSES

_DEFAULTS: Final = FrontendOptions(engines="", names=(), endpoint=Endpoint(host=ALL_ADDRESSES), drain_timeout=300.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engines",
        required=True,
        metavar="HOST",
        help="host name that resolves to the addresses of all engines, looked up every 2 seconds (default: none, "
        "required)",
    )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        default=(),
        metavar="NAME",
        help="names of the model in the API; responses contain the first one (default: the engines' name for it)",
    )
    add_options(parser, _DEFAULTS)


def run(args: argparse.Namespace) -> int:
    options = filled(args, _DEFAULTS)
    set_up_log(args, options.log)
    serve_frontend(msgspec.structs.replace(options, engines=args.engines, names=tuple(args.served_model_name)))
    return 0
