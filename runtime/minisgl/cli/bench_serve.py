"""`minisgl bench serve`: latency and throughput of any OpenAI endpoint under load."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from minisgl.bench import serve
from minisgl.flags.arguments import add_json_argument, integer, number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("endpoint")
    group.add_argument(
        "--url", default="http://127.0.0.1:8000", help="URL of the endpoint (default: http://127.0.0.1:8000)"
    )
    group.add_argument("--model", metavar="NAME", help="model to request (default: the first one that is listed)")
    group.add_argument(
        "--api-key", metavar="KEY", help="API key for the endpoint (default: the variable OPENAI_API_KEY, or none)"
    )
    group.add_argument(
        "--api",
        choices=("completions", "chat"),
        default="completions",
        help="completions: prompts are token ids of exact length; chat: text of about that many tokens "
        "(default: completions)",
    )
    group.add_argument(
        "--vocabulary",
        type=integer(2),
        default=256,
        metavar="N",
        help="prompts are made of token ids below N (default: 256, which every model has)",
    )
    group.add_argument(
        "--stop-at-eos",
        action="store_true",
        help="let answers end early, for endpoints without ignore_eos (default: off)",
    )
    group = parser.add_argument_group("load")
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="requests to send, one JSON object per line (default: synthetic)"
    )
    group.add_argument(
        "--trace-speed", type=number(0), default=1.0, metavar="X", help="replay the trace X times as fast (default: 1)"
    )
    group.add_argument(
        "--num-requests", type=integer(1), default=100, metavar="N", help="number of synthetic requests (default: 100)"
    )
    for flag, low, high, what in (("--input-len", 64, 512, "prompts"), ("--output-len", 16, 128, "answers")):
        group.add_argument(
            flag,
            type=integer(1),
            nargs=2,
            default=(low, high),
            metavar=("MIN", "MAX"),
            help=f"range of the lengths of synthetic {what} (default: {low} to {high} tokens)",
        )
    group.add_argument(
        "--request-rate", type=number(0), metavar="X", help="arrivals per second (default: all at the same time)"
    )
    group.add_argument(
        "--burstiness",
        type=number(0),
        default=1.0,
        metavar="X",
        help="1: Poisson arrivals; more: in bursts; near 0: regular (default: 1)",
    )
    group.add_argument(
        "--shared-prefixes",
        type=integer(0),
        default=0,
        metavar="N",
        help="synthetic prompts begin with one of N prefixes, half a prompt long (default: 0, no shared prefix)",
    )
    group.add_argument(
        "--block-size",
        type=integer(1),
        default=512,
        metavar="N",
        help="tokens per entry of a trace's hash_ids (default: 512 tokens)",
    )
    group.add_argument(
        "--max-concurrency",
        type=integer(1),
        metavar="N",
        help="requests in flight at the same time (default: no limit)",
    )
    group.add_argument(
        "--seed", type=integer(0), default=0, metavar="N", help="seed of synthetic requests and prompts (default: 0)"
    )
    group.add_argument(
        "--write-trace", type=Path, metavar="FILE", help="write the requests to FILE and send none (default: send them)"
    )
    group = parser.add_argument_group("report")
    for name, what in serve.LATENCY_LIMITS.items():
        group.add_argument(
            f"--slo-{name}-ms",
            type=number(0),
            metavar="MS",
            help=f"limit for the {what}; goodput counts requests within all limits (default: no limit)",
        )
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="PNG of the distributions; needs matplotlib (default: none)"
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    return serve.run(msgspec.convert(vars(args), serve.ServeOptions))
