"""`python -m support.cluster.cluster_tools`: build the programs that tests of operator and chart run, before any test's
timeout counts. Where Go is not available these tests are skipped; with CI=true that is an error."""

from __future__ import annotations

import os
import sys

from cluster import tools


def main() -> int:
    try:
        for needed in (tools.KUBERNETES, tools.HELM):
            tools.directory(needed)
    except tools.ToolchainMissing as error:
        print(error, file=sys.stderr)
        return int(os.environ.get("CI") == "true")
    return 0


if __name__ == "__main__":
    sys.exit(main())
