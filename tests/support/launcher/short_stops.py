"""`python -m support.launcher.short_stops COMMAND …` is `minisgl COMMAND …`, but its processes are killed soon after
the end of their drain."""

from __future__ import annotations

import sys

from minisgl.launcher import supervisor


def main() -> int:
    from minisgl.cli.main import main as run_command

    vars(supervisor)["_STOP_SECONDS"] = 0.3
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
