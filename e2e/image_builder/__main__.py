"""`python -m image_builder`: build the three images and print their references. With `check-engine`, build and check
the engine image of users instead."""

from __future__ import annotations

import sys

from cluster.places import CommandFailed
from cluster.system import MachineUnfit
from image_builder.build import build_all, check_engine


def main() -> int:
    try:
        if sys.argv[1:] == ["check-engine"]:
            check_engine()
            return 0
        images = build_all()
    except (CommandFailed, MachineUnfit) as error:
        print(f"images: error: {error}", file=sys.stderr)
        return 1
    print("\n".join(built.image.reference for built in images.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
