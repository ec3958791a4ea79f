"""Compare the reports of two runs of `minisgl bench offline`: the older one, the newer one, and their ratio.

python benchmarks/compare.py old.json new.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

SHOWN = ("tokens_per_second", "engine_up_seconds", "first_token_seconds", "tpot_ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    args = parser.parse_args()
    old, new = (json.loads(path.read_text())["figures"] for path in (args.old, args.new))
    print(f"{'':32} {'old':>10} {'new':>10} {'new/old':>8}")
    for name in old:
        if name.endswith(SHOWN) and name in new:
            print(f"{name:32} {old[name]:10,.2f} {new[name]:10,.2f} {new[name] / old[name]:8.3f}")


if __name__ == "__main__":
    main()
