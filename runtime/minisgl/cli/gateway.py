"""`minisgl gateway [--backend URL ...]`"""

from __future__ import annotations

import argparse
import logging
from typing import Final

import msgspec

from minisgl.flags.arguments import add_options, filled, set_up_log
from minisgl.gateway.config import GatewayOptions

logger = logging.getLogger(__name__)

_DEFAULTS: Final = GatewayOptions()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="URL",
        help="server whose models are served, such as http://127.0.0.1:8001; may be repeated (default: none, the "
        "InferenceModels of the cluster in which the gateway runs)",
    )
    parser.add_argument(
        "--namespace",
        nargs="+",
        default=[],
        metavar="NAME",
        help="namespaces of the InferenceModels that are served (default: all)",
    )
    add_options(parser, _DEFAULTS)


def run(args: argparse.Namespace) -> int:
    from minisgl.gateway.process import GatewayServer

    options = filled(args, _DEFAULTS)
    set_up_log(args, options.log, "gateway")
    # It logs start and stop, as we do.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    # It logs each stream that broke off, which our own line explains better.
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: "without completing response" not in record.getMessage()
    )
    server = GatewayServer(
        msgspec.structs.replace(options, backends=tuple(args.backend), namespaces=tuple(args.namespace))
    )
    server.run(lambda port: logger.info("gateway at http://%s:%d/v1", options.host, port))
    logger.info("stopped")
    return 0
