"""`minisgl models fetch REPO DIR`"""

from __future__ import annotations

import argparse
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import msgspec

from minisgl.errors import HubError
from minisgl.flags.arguments import add_options, filled, port, set_up_log
from minisgl.hub.fetch import fetch
from minisgl.hub.fetch_error import FetchError
from minisgl.hub.neighbours import Neighbours
from minisgl.hub.places import origin
from minisgl.launcher.control_server import ControlServer, StatusBoard
from minisgl.logging import LogOptions
from minisgl.wire.status import FetchStatus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "repository",
        metavar="REPO",
        help="Hub id owner/name; HF_TOKEN is sent if it is set. Or s3://BUCKET/PREFIX, with the credentials and the "
        "region of the AWS variables and configuration",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="directory for the checkpoint")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit on the Hub (default: main)")
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="URL of the Hub or of the object store (default: HF_ENDPOINT, or the public Hub; AWS_ENDPOINT_URL_S3 or "
        "AWS_ENDPOINT_URL, or AWS)",
    )
    parser.add_argument(
        "--control-port",
        type=port,
        metavar="N",
        help="TCP port of /live, /ready and /status with the progress (default: none)",
    )
    parser.add_argument(
        "--termination-log",
        type=Path,
        metavar="PATH",
        help="file for the last status, as JSON (default: not written)",
    )
    group = parser.add_argument_group("other checkpoints in the parent directory of DIR")
    group.add_argument("--owner", default="", metavar="NAME", help="model that uses the checkpoint (default: unknown)")
    group.add_argument(
        "--share-files",
        action="store_true",
        help="hard-link large files that another checkpoint has with the same hash (default: off)",
    )
    group.add_argument(
        "--prune",
        choices=("partial", "unused"),
        default="",
        help="directories to remove if space is missing: partial downloads, or also fetched checkpoints of --owner "
        "that --keep does not name (default: none)",
    )
    group.add_argument(
        "--keep", nargs="+", default=[], metavar="NAME", help="directories that are never removed (default: none)"
    )
    add_options(parser.add_argument_group("log"), LogOptions())


def run(args: argparse.Namespace) -> int:
    """Fetch, and report the last status. Exit codes: 1 when another attempt may succeed, 2 when it would not."""
    set_up_log(args, filled(args, LogOptions()), "fetch")
    # Process 1 of a container ignores signals without a handler. Downloaded files stay, for the next attempt.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    board = StatusBoard()
    last = FetchStatus()

    def publish(status: FetchStatus) -> None:
        nonlocal last
        last = status
        board.publish(status, "" if status.phase == "Done" else f"{status.phase.lower()} {status.percent} %")

    with ExitStack() as stack:
        if args.control_port is not None:
            stack.enter_context(ControlServer(args.control_port, board, drain=lambda: None))
        try:
            endpoint = args.endpoint and args.endpoint.rstrip("/")
            source = origin(args.repository, args.revision, endpoint)
            neighbours = Neighbours(
                owner=args.owner, share_files=args.share_files, prune=args.prune, keep=tuple(args.keep)
            )
            publish(fetch(source, args.directory.expanduser(), publish, neighbours))
        except HubError as error:
            reason = error.code if isinstance(error, FetchError) else ""
            publish(msgspec.structs.replace(last, phase="Failed", reason=reason, message=str(error)))
            raise
        finally:
            text = msgspec.json.encode(last)
            print(text.decode(), flush=True)
            if args.termination_log is not None:
                args.termination_log.write_bytes(text)
    return 0
