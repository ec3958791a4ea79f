"""`minisgl frontend --engines HOST`"""

from __future__ import annotations

import argparse
from typing import Final

from minisgl.flags.arguments import add_options, filled, number, port, set_up_log
from minisgl.frontend.config import Access, RequestLimits
from minisgl.launcher.endpoint import Endpoint
from minisgl.launcher.frontend import FrontendOptions, serve_frontend
from minisgl.logging import LogOptions
from minisgl.wire.status import CONTROL_PORT, SCHEDULER_PORT

_ENDPOINT: Final = Endpoint(host="0.0.0.0")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engines")
    group.add_argument(
        "--engines",
        required=True,
        metavar="HOST",
        help="name whose addresses are those of the engines, asked for every 2 seconds (default: none, it must be "
        "given)",
    )
    group.add_argument(
        "--scheduler-port",
        type=port,
        default=SCHEDULER_PORT,
        metavar="N",
        help=f"TCP port of the engines' schedulers (default: {SCHEDULER_PORT})",
    )
    group.add_argument(
        "--engine-control-port",
        type=port,
        default=CONTROL_PORT,
        metavar="N",
        help=f"TCP port from which engines give out their tokenizer files (default: {CONTROL_PORT})",
    )
    group = parser.add_argument_group("endpoint")
    add_options(group, _ENDPOINT)
    group.add_argument(
        "--control-port",
        type=port,
        default=CONTROL_PORT,
        metavar="N",
        help=f"TCP port of /live, /ready, /status and /drain, 0 for a free one (default: {CONTROL_PORT})",
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        default=(),
        metavar="NAME",
        help="names of the model in the API, the first of which answers have (default: the engines' name for it)",
    )
    add_options(parser.add_argument_group("access"), Access())
    add_options(parser.add_argument_group("limits"), RequestLimits())
    group = parser.add_argument_group("start and stop")
    group.add_argument(
        "--drain-timeout",
        type=number(0),
        default=300.0,
        metavar="S",
        help="how long running requests may go on once no new ones are taken, 5 seconds after SIGTERM; a second one "
        "ends them (default: 300 seconds)",
    )
    add_options(parser.add_argument_group("log"), LogOptions())


def run(args: argparse.Namespace) -> int:
    serve_frontend(
        FrontendOptions(
            engines=args.engines,
            scheduler_port=args.scheduler_port,
            engine_control_port=args.engine_control_port,
            names=tuple(args.served_model_name),
            endpoint=filled(args, _ENDPOINT),
            control_port=args.control_port,
            access=filled(args, Access()),
            limits=filled(args, RequestLimits()),
            drain_timeout=args.drain_timeout,
            log=set_up_log(args),
        )
    )
    return 0
