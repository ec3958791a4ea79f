"""Version 0.2.0 writes messages and reads those of others. Runs with the runtime of 0.2.0, unpacked from its archive:

    PYTHONPATH=UNPACKED/0.2.0/runtime:tests python tests/runtime/compat/v0_2_0 tests/runtime/compat/frames/0.2.0

writes the frames anew. With `--read` it then reads the JSON object {family: {name: frame}} from stdin, frames written
as in `support.compat.frames`, and prints the values in their place.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from registry import families
from samples import SAMPLES

from minisgl import __version__
from support.compat.codecs import Family
from support.compat.frames import Frames, Sample, dumps, from_json, to_json
from support.compat.samples import made_samples


def _sample(family: Family, given: Any) -> Sample:
    frame = family.encode(given)
    return Sample(given, frame, family.decode(frame))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path, help="where the frames are written")
    parser.add_argument("--read", action="store_true", help="read frames from stdin")
    args = parser.parse_args()
    assert __version__ == "0.2.0", f"these are the messages of 0.2.0, and this is the code of {__version__}"
    known = families()
    for name, family in known.items():
        samples = made_samples(family.declared) | SAMPLES.get(name, {})
        frames = Frames(family.schema, {each: _sample(family, given) for each, given in samples.items()})
        (args.directory / f"{name}.json").write_text(dumps(frames))
    if args.read:
        asked = from_json(json.load(sys.stdin))
        values = {
            name: {each: known[name].decode(frame) for each, frame in frames.items()} for name, frames in asked.items()
        }
        json.dump(to_json(values), sys.stdout)


if __name__ == "__main__":
    main()
