"""`python -m support.launcher_group SPECS`: a launcher for a group of stubs, to be signalled and killed by tests.

Prints one JSON line `{"run_directory", "pids"}` when the group is ready.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from minisgl import logging as log
from minisgl.launcher.errors import LauncherError
from minisgl.launcher.process import ProcessSpec
from minisgl.launcher.run_directory import run_directory
from minisgl.launcher.supervisor import Supervisor


class Group(msgspec.Struct, kw_only=True):
    specs: list[ProcessSpec]
    startup_timeout: float = 30.0
    drain_timeout: float = 30.0


def main() -> int:
    group = msgspec.json.decode(sys.argv[1], type=Group)
    log.set_up("launcher", format="text")
    renderer = log.Renderer("text", sys.stderr)
    with run_directory() as directory:
        (directory / "socket").touch()

        def ready() -> None:
            print(json.dumps({"run_directory": str(directory), "pids": pids()}), flush=True)

        def pids() -> dict[str, Any]:
            return {process.spec.name: process.pid for process in supervisor.processes}

        supervisor = Supervisor(
            group.specs,
            startup_timeout=group.startup_timeout,
            drain_timeout=group.drain_timeout,
            log_level="info",
            on_line=lambda line: print(renderer.render(line), file=sys.stderr),
            on_ready=ready,
        )
        try:
            supervisor.run()
        except LauncherError as error:
            print(f"{error.code}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
