"""`python -m cluster COMMAND`: see --help."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Final

from cluster import images, lifecycle, relay
from cluster.control_plane import kubectl_command
from cluster.places import CommandFailed, NotUp, enter, kill
from cluster.system import MachineUnfit
from cluster.tools import ToolchainMissing, program, say

_PASS_ON: Final = ("kubectl", "helm", "enter")
"""Commands that pass their other arguments to another program."""


def main() -> int:
    args, rest = _parser().parse_known_args()
    if rest and args.command not in _PASS_ON:
        _parser().error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return _run(args, rest)
    except (CommandFailed, MachineUnfit, NotUp, TimeoutError, ToolchainMissing) as error:
        print(f"cluster: error: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace, rest: list[str]) -> int:
    match args.command:
        case "up":
            began = time.monotonic()
            lifecycle.up(args.nodes)
            say(f"the cluster is up: {args.nodes} nodes, {time.monotonic() - began:.1f} s")
        case "down":
            lifecycle.down()
        case "status":
            print("\n".join(lifecycle.status()))
            return 0 if lifecycle.is_up() else 1
        case "load":
            images.load_archive(args.archive)
        case "kill":
            kill(args.place)
        case "expose":
            print(f"127.0.0.1:{relay.expose(args.place, args.target)}")
        case "kubeconfig":
            print(relay.host_kubeconfig())
        case "kubectl":
            _become([*kubectl_command(), *rest])
        case "helm":
            _become([str(program("helm")), f"--kubeconfig={relay.host_kubeconfig()}", *rest])
        case "enter":
            _become([*enter(args.place), *rest])
    return 0


def _become(command: list[str]) -> None:
    os.execvp(command[0], command)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cluster", description="A real Kubernetes on this machine, in namespaces.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="start the cluster; builds programs and images if necessary")
    up.add_argument(
        "--nodes",
        type=int,
        default=lifecycle.NODES,
        help="number of nodes (default: %(default)s); 0: control plane only",
    )
    commands.add_parser("down", help="stop the cluster and remove all of it except for built programs and images")
    commands.add_parser(
        "status", help="list the components with their memory; exit code 1 if the control plane is down"
    )
    load = commands.add_parser("load", help="import an image archive (docker save) into all nodes")
    load.add_argument("archive", type=Path)
    kill_parser = commands.add_parser("kill", help="kill a node like a power failure; `up` starts it again")
    kill_parser.add_argument("place")
    expose = commands.add_parser("expose", help="forward a port of 127.0.0.1 to IP:PORT in the network of a place")
    expose.add_argument("place", help="control, node0, node1 ...")
    expose.add_argument("target", help="IP:PORT")
    commands.add_parser("kubeconfig", help="write a kubeconfig for programs of this machine and print its path")
    for name, what in (("kubectl", "run kubectl as the administrator"), ("helm", "run helm as the administrator")):
        commands.add_parser(name, help=what, add_help=False, prefix_chars="\0")
    enter_parser = commands.add_parser("enter", help="run a command in a place")
    enter_parser.add_argument("place")
    return parser


if __name__ == "__main__":
    sys.exit(main())
