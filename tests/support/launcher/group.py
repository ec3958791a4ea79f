"""`python -m support.launcher.group SPECS`: a launcher for groups of stub processes, which tests signal and kill.

Prints one JSON line `{"run_directory", "pids"}` when all are ready, and `closed` when no new client
may connect to the stub frontend.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial

import msgspec

from minisgl import logging as log
from minisgl.errors import LauncherError
from minisgl.launcher.group import GroupSpec
from minisgl.launcher.process import Process, ProcessSpec
from minisgl.launcher.restarts import Limits
from minisgl.launcher.run_directory import run_directory
from minisgl.launcher.supervisor import Supervisor


class Launch(msgspec.Struct, kw_only=True):
    groups: dict[str, list[list[ProcessSpec]]]
    """Group → specs of the first start, of the first restart, and so on; the last entry is used for all later ones."""
    startup_timeout: float = 30.0
    drain_timeout: float = 30.0
    max_restarts: int = 0
    restart_window: float = 600.0
    prepare: bool = False
    """Imports begin before the first start."""


def main() -> int:
    launch = msgspec.json.decode(sys.argv[1], type=Launch)
    log.set_up("launcher", format="text")
    renderer = log.Renderer("text", sys.stderr)
    with run_directory() as directory:
        (directory / "socket").touch()

        def ready() -> None:
            pids = {each.name: each.pid for each in supervisor.processes if isinstance(each, Process)}
            print(json.dumps({"run_directory": str(directory), "pids": pids}), flush=True)

        supervisor = Supervisor(
            [
                GroupSpec(
                    name=name,
                    processes=partial(_processes, starts),
                    prepared=[spec for spec in starts[0] if spec.preload and launch.prepare],
                )
                for name, starts in launch.groups.items()
            ],
            limits=Limits(
                max_restarts=launch.max_restarts,
                restart_window=launch.restart_window,
                startup_timeout=launch.startup_timeout,
            ),
            drain_timeout=launch.drain_timeout,
            log_level="info",
            on_line=lambda line: print(renderer.render(line), file=sys.stderr),
            on_ready=ready,
            on_end=lambda: print("closed", flush=True),
            standby_delay=0.0,
        )
        try:
            supervisor.run()
        except LauncherError as error:
            print(f"{error.code}: {error}", file=sys.stderr)
            return 1
    return 0


def _processes(starts: Sequence[list[ProcessSpec]], number: int) -> list[ProcessSpec]:
    return starts[min(number, len(starts)) - 1]


if __name__ == "__main__":
    sys.exit(main())
