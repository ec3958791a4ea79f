"""`minisgl frontend --engines HOST`"""

from __future__ import annotations

import argparse

from minisgl.flags.arguments import add_log_arguments, add_port_argument, add_tokenizers_argument, number, port
from minisgl.flags.request_limits import access_options, add_access_arguments, add_limit_arguments, request_limits
from minisgl.launcher.frontend import FrontendOptions, serve_frontend
from minisgl.wire.status import CONTROL_PORT, SCHEDULER_PORT


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
    group.add_argument("--host", default="0.0.0.0", metavar="ADDR", help="address to listen on (default: 0.0.0.0, all)")
    add_port_argument(group)
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
    add_tokenizers_argument(group)
    add_access_arguments(parser)
    add_limit_arguments(parser)
    group = parser.add_argument_group("start and stop")
    group.add_argument(
        "--drain-timeout",
        type=number(0),
        default=300.0,
        metavar="S",
        help="how long running requests may go on once no new ones are taken, 5 seconds after SIGTERM; a second one "
        "ends them (default: 300 seconds)",
    )
    add_log_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return serve_frontend(
        FrontendOptions(
            engines=args.engines,
            scheduler_port=args.scheduler_port,
            engine_control_port=args.engine_control_port,
            names=tuple(args.served_model_name),
            host=args.host,
            port=args.port,
            control_port=args.control_port,
            tokenizers=args.tokenizers,
            limits=request_limits(args),
            **access_options(args),
            drain_timeout=args.drain_timeout,
            log_level=args.log_level,
            log_format=args.log_format,
        )
    )
