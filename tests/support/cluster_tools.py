"""`python -m support.cluster_tools`: builds what the operator's and the chart's tests run, before the time of a test
counts. Where Go cannot be had they are skipped; with CI=true that is an error."""

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
