"""Flags of `serve` that say who may use the endpoint, and how much at a time."""

from __future__ import annotations

import argparse
from typing import Any, Final

from minisgl.flags.arguments import integer, number, port
from minisgl.frontend.config import RequestLimits

_DEFAULTS: Final = RequestLimits()


def add_access_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("access")
    group.add_argument(
        "--api-keys",
        metavar="FILE",
        help="keys of those who may use the API: one a line, then a name if you like (default: everybody may)",
    )
    group.add_argument(
        "--cors-origins",
        metavar="LIST",
        help="web pages of these origins may use the API from a browser, as https://a.example,https://b.example, "
        "or *: all (default: none)",
    )
    group.add_argument(
        "--admin-port",
        type=port,
        metavar="N",
        help="TCP port of the administration: /abort, /flush_cache, /state (default: there is none)",
    )
    group.add_argument(
        "--admin-keys",
        metavar="FILE",
        help="keys of administrators, as --api-keys; --admin-port needs them (default: none)",
    )


def add_limit_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--max-waiting",
        type=integer(1),
        default=_DEFAULTS.waiting,
        metavar="N",
        help=f"requests without a token yet; one more is rejected with 429 (default: {_DEFAULTS.waiting})",
    )
    group.add_argument(
        "--max-waiting-tokens",
        type=integer(1),
        default=_DEFAULTS.waiting_tokens,
        metavar="N",
        help=f"tokens of their prompts together (default: {_DEFAULTS.waiting_tokens})",
    )
    group.add_argument(
        "--max-in-flight-per-key",
        type=integer(1),
        metavar="N",
        help="requests under way of one API key (default: as many as of all)",
    )
    for flag, default, text in (
        ("--queue-timeout", _DEFAULTS.queue_seconds, "how long a request may wait for a place in the batch"),
        ("--request-timeout", _DEFAULTS.request_seconds, "how long a request may take from its first byte to its end"),
        ("--stall-timeout", _DEFAULTS.stall_seconds, "how long the engine may do nothing for a request in the batch"),
    ):
        group.add_argument(
            flag, type=number(0), default=default, metavar="S", help=f"{text} (default: {default:g} seconds)"
        )


def request_limits(args: argparse.Namespace) -> RequestLimits:
    return RequestLimits(
        waiting=args.max_waiting,
        waiting_tokens=args.max_waiting_tokens,
        in_flight_per_key=args.max_in_flight_per_key,
        queue_seconds=args.queue_timeout,
        request_seconds=args.request_timeout,
        stall_seconds=args.stall_timeout,
    )


def access_options(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of ServeOptions."""
    return {
        "api_keys": args.api_keys,
        "cors_origins": tuple(filter(None, (args.cors_origins or "").replace(" ", "").split(","))),
        "admin_port": args.admin_port,
        "admin_keys": args.admin_keys,
    }
