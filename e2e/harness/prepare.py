"""`python -m harness.prepare`: build what a cluster needs and this machine lacks, before any test's timeout counts."""

from __future__ import annotations

import sys

from cluster.places import CommandFailed
from cluster.system import MachineUnfit
from cluster.tools import ToolchainMissing
from harness.installation import prepare


def main() -> int:
    try:
        prepare()
    except (CommandFailed, MachineUnfit, ToolchainMissing) as error:
        print(f"prepare: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
