"""`minisgl engine MODELDIR`"""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from minisgl.config import EngineConfig
from minisgl.flags.arguments import add_engine_arguments, add_options, filled, integer, number, set_up_log
from minisgl.launcher.devices import choose_device
from minisgl.launcher.restarts import Limits
from minisgl.logging import LogOptions
from minisgl.replica.engine_pod import engine
from minisgl.replica.options import EngineOptions, Ports, ReplicaIdentity

_RESTARTS: Final = Limits(startup_timeout=1800.0, max_restarts=5, restart_window=3600.0, retry_start=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODELDIR", help="directory of a Hugging Face checkpoint")
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name in the API (default: the directory's name)"
    )
    group = parser.add_argument_group("replica")
    group.add_argument(
        "--replica", default="engine", metavar="NAME", help="name of the replica (default: engine)"
    )
    group.add_argument(
        "--revision-label",
        default="",
        metavar="TEXT",
        help="revision of this pod; pods of another revision cannot join (default: empty)",
    )
    group.add_argument(
        "--ranks-per-pod",
        type=integer(1),
        metavar="N",
        help="ranks in each pod; must divide --tp (default: --tp, a single pod)",
    )
    group.add_argument(
        "--peer-domain",
        metavar="NAME",
        help="DNS domain of the pods: pod 0 is REPLICA-0.NAME (default: --replica)",
    )
    group.add_argument("--leader", metavar="HOST", help="host of pod 0, instead of that name (default: not set)")
    group.add_argument(
        "--pod-index",
        type=integer(0),
        metavar="N",
        help="index of this pod in the replica (default: MINISGL_POD_INDEX, or 0)",
    )
    group.add_argument(
        "--pod-name", metavar="NAME", help="name of this pod (default: MINISGL_POD_NAME, or the host name)"
    )
    group.add_argument(
        "--node-name", metavar="NAME", help="node of this pod (default: MINISGL_NODE_NAME, or unknown)"
    )
    add_options(group, Ports())
    add_engine_arguments(parser)
    group = parser.add_argument_group("start and stop")
    add_options(group, _RESTARTS)
    group.add_argument(
        "--drain-timeout",
        type=number(0),
        default=300.0,
        metavar="S",
        help="time for running requests to finish after SIGTERM or /drain; a second SIGTERM stops them "
        "(default: 300 seconds)",
    )
    group.add_argument(
        "--state-directory",
        type=Path,
        default=Path("/run/minisgl"),
        metavar="DIR",
        help="directory for the pod's restarts; must outlive the container (default: /run/minisgl)",
    )
    add_options(parser.add_argument_group("log"), LogOptions())
    parser.set_defaults(refuse=parser.error)


def run(args: argparse.Namespace) -> int:
    ranks_per_pod = args.ranks_per_pod or args.tp
    if args.tp % ranks_per_pod:
        args.refuse(f"--ranks-per-pod {ranks_per_pod} does not divide --tp {args.tp}")
    pods = args.tp // ranks_per_pod
    pod_index = args.pod_index if args.pod_index is not None else _pod_index(args.refuse)
    if pod_index >= pods:
        args.refuse(f"pod index {pod_index}: --tp {args.tp} with --ranks-per-pod {ranks_per_pod} makes {pods} pods")
    options = filled(
        args,
        EngineOptions(
            # Ranks of other pods use other devices: each rank checks its own when it starts.
            engine=EngineConfig(model=str(args.model), device=choose_device(args.device)),
            identity=ReplicaIdentity(
                replica=args.replica,
                revision=args.revision_label,
                tensor_parallel=args.tp,
                ranks_per_pod=ranks_per_pod,
            ),
            model_name=args.served_model_name or args.model.name,
            pod_index=pod_index,
            pod=args.pod_name or os.environ.get("MINISGL_POD_NAME") or socket.gethostname(),
            node=args.node_name or os.environ.get("MINISGL_NODE_NAME", ""),
            leader=args.leader or f"{args.replica}-0.{args.peer_domain or args.replica}",
            ports=Ports(),
            limits=_RESTARTS,
            drain_timeout=args.drain_timeout,
            directory=args.state_directory,
        ),
    )
    set_up_log(args, options.log)
    engine(options)
    return 0


def _pod_index(refuse: Callable[[str], object]) -> int:
    """Index that Kubernetes has set in the environment."""
    text = os.environ.get("MINISGL_POD_INDEX", "0")
    if not re.fullmatch(r"\d{1,6}", text):
        refuse(f"environment variable MINISGL_POD_INDEX: {text!r} is not a whole number")
    return int(text)
