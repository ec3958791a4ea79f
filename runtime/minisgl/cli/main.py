"""`minisgl COMMAND …`: runs a command and turns its errors into one line and an exit code.

0: done. 1: failed; the line states why. 2: the command line is wrong. No other code chooses the exit code of an error.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from minisgl import logging as log
from minisgl.cli import (
    bench_comm,
    bench_offline,
    bench_serve,
    chat,
    completion,
    engine,
    frontend,
    gateway,
    kernels_build,
    models_agent,
    models_check,
    models_demo,
    models_dummy,
    models_fetch,
    models_tiny,
    serve,
    version,
)
from minisgl.errors import CodedError
from minisgl.extras import require
from minisgl.flags.arguments import Parser
from minisgl.version import __version__


class _Needs(NamedTuple):
    """What a command needs besides the dependencies of the distribution; see `require`."""

    extra: str
    modules: Sequence[str] = ()


_SERVE: Final = _Needs("serve")
_ENGINE: Final = _Needs("engine")
_FRONTEND: Final = _Needs("frontend")
_DOWNLOAD: Final = _Needs("frontend", ("huggingface_hub",))
_GATEWAY: Final = _Needs("frontend", ("fastapi", "httptools", "uvicorn", "uvloop"))
_CLIENT: Final = _Needs("frontend", ("uvloop",))

_Commands: TypeAlias = "argparse._SubParsersAction[Parser]"

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    _open_standard_streams()
    raise_limit()
    args = build_parser().parse_args(arguments)
    try:
        if args.needs is not None:
            require(*args.needs)
        status: int = args.run(args)
    except CodedError as error:
        # Any other error is a bug, and its traceback is needed.
        if getattr(args, "logs_errors", False):
            logger.error("%s", error, extra={"code": error.code})
        else:
            log.write_stderr(f"minisgl: error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return status


def build_parser() -> Parser:
    parser = Parser(prog="minisgl", description="Serve language models behind an OpenAI endpoint.")
    parser.add_argument("--version", action="version", version=f"minisgl {__version__}", help="print the version")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add(commands, "serve", serve, "serve a model behind an OpenAI endpoint", _SERVE)
    _add(commands, "engine", engine, "run the ranks of a replica in this pod, for frontends elsewhere", _ENGINE)
    _add(
        commands,
        "frontend",
        frontend,
        "serve the OpenAI endpoint of a cluster's engines, which are found by DNS",
        _FRONTEND,
    )
    _add(commands, "gateway", gateway, "serve the models of a cluster or of several servers at one URL", _GATEWAY)
    _add(commands, "chat", chat, "chat with an endpoint or a model in the terminal")
    models = _group(commands, "models", "create, download and check checkpoints")
    _add(models, "tiny", models_tiny, "write a small random checkpoint with all files of a real one", _ENGINE)
    _add(models, "demo", models_demo, "train a very small model that answers questions about minisgl", _ENGINE)
    _add(
        models,
        "agent",
        models_agent,
        "train a very small model that thinks and calls tools, in each format of calls",
        _ENGINE,
    )
    _add(
        models,
        "dummy",
        models_dummy,
        "write a well-known model's shape, with a synthetic tokenizer and no weights",
        _ENGINE,
    )
    _add(models, "fetch", models_fetch, "download a checkpoint from a Hub into a directory, atomically", _DOWNLOAD)
    _add(models, "check", models_check, "check whether a checkpoint can be served", _ENGINE)
    kernels = _group(commands, "kernels", "prepare kernels for GPUs")
    _add(
        kernels,
        "build",
        kernels_build,
        "compile the kernels of models ahead of time, on a machine without a GPU",
        _ENGINE,
    )
    bench = _group(commands, "bench", "measure speed")
    _add(bench, "offline", bench_offline, "tokens per second of scheduler and engine, without a server", _ENGINE)
    _add(bench, "serve", bench_serve, "latency and throughput of any OpenAI endpoint under load", _CLIENT)
    _add(bench, "comm", bench_comm, "latency and bandwidth of all-reduce between ranks, by size", _ENGINE)
    _add(commands, "version", version, "print the versions of minisgl, its libraries and the hardware")
    _add(commands, "completion", completion, "print the shell's completion of commands and flags")
    commands.choices["completion"].set_defaults(all_commands=parser)
    return parser


def _open_standard_streams() -> None:
    """Open standard streams that the caller has closed. A socket would get their numbers otherwise, and then what
    libraries write to stderr."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    # Python has no object for a stream that was closed at its start.
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


class _Command(Protocol):
    """Interface of a command's module."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def _add(commands: _Commands, name: str, command: _Command, summary: str, needs: _Needs | None = None) -> None:
    # The operator knows by name which flags users may give to the commands of pods.
    accepts_foreign = command not in (engine, frontend)
    description = f"{summary[0].upper()}{summary[1:]}."
    parser = commands.add_parser(name, help=summary, description=description, accepts_foreign=accepts_foreign)
    command.add_arguments(parser)
    parser.set_defaults(run=command.run, needs=needs)


def _group(commands: _Commands, name: str, summary: str) -> _Commands:
    parser = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    return parser.add_subparsers(metavar="COMMAND", required=True)


def raise_limit() -> None:
    """Raise the soft limit of this process, and of the processes that it starts, to the hard limit. Shells and service
    managers set a low one, mostly 1,024, only for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        # A hard limit that is above the kernel's own. The server warns when the one that remains is nearly used up.
        return
