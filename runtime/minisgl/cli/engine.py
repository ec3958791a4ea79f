"""`minisgl engine MODELDIR`"""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from minisgl.config import EngineConfig
from minisgl.flags.arguments import add_options, filled, integer, set_up_log
from minisgl.launcher.devices import choose_device
from minisgl.launcher.restarts import Limits
from minisgl.replica.engine_pod import engine
from minisgl.replica.options import EngineOptions

_DEFAULTS: Final = EngineOptions(
    engine=EngineConfig(model=""),
    limits=Limits(startup_timeout=1800.0, max_restarts=5, restart_window=3600.0, retry_start=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODELDIR", help="directory of a Hugging Face checkpoint")
    parser.add_argument(
        "--ranks-per-pod",
        type=integer(1),
        metavar="N",
        help="ranks in each pod; must divide --tp (default: --tp, a single pod)",
    )
    parser.add_argument(
        "--peer-domain",
        metavar="NAME",
        help="DNS domain of the pods: pod 0 is REPLICA-0.NAME (default: --replica)",
    )
    parser.add_argument(
        "--pod-index",
        type=integer(0),
        metavar="N",
        help="index of this pod in the replica (default: MINISGL_POD_INDEX, or 0)",
    )
    add_options(parser, _DEFAULTS)
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    ranks_per_pod = args.ranks_per_pod or args.tp
    if args.tp % ranks_per_pod:
        args.usage_error(f"--ranks-per-pod {ranks_per_pod} does not divide --tp {args.tp}")
    pods = args.tp // ranks_per_pod
    pod_index = args.pod_index if args.pod_index is not None else _pod_index(args.usage_error)
    if pod_index >= pods:
        args.usage_error(
            f"pod index {pod_index}: --tp {args.tp} with --ranks-per-pod {ranks_per_pod} gives {pods} pods"
        )
    options = filled(args, _DEFAULTS)
    # Ranks of other pods use other devices: each rank checks its own when it starts.
    device = choose_device(args.device)
    options = replace(
        options,
        engine=replace(options.engine, model=str(args.model), device=device),
        identity=replace(options.identity, tensor_parallel=args.tp, ranks_per_pod=ranks_per_pod),
        model_name=options.model_name or args.model.name,
        pod_index=pod_index,
        pod=options.pod or os.environ.get("MINISGL_POD_NAME") or socket.gethostname(),
        node=options.node or os.environ.get("MINISGL_NODE_NAME", ""),
        leader=options.leader or f"{args.replica}-0.{args.peer_domain or args.replica}",
    )
    set_up_log(args, options.log)
    engine(options)
    return 0


def _pod_index(usage_error: Callable[[str], object]) -> int:
    """Index that Kubernetes has set in the environment."""
    text = os.environ.get("MINISGL_POD_INDEX", "0")
    if not re.fullmatch(r"\d{1,6}", text):
        usage_error(f"environment variable MINISGL_POD_INDEX: {text!r} is not a whole number")
    return int(text)
