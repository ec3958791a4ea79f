"""Frames of earlier versions as they lie in `tests/runtime/compat/frames/VERSION/`, one file of JSON for each family.

Text holds values as JSON, and what JSON has not as an object with one key: `{"$hex": …}` for bytes, `{"$int": …}` for
an object whose keys are integers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FRAMES = Path(__file__).parents[2] / "runtime" / "compat" / "frames"


@dataclass(frozen=True)
class Sample:
    """One message.

    given: the values that it was made from.
    frame: its bytes.
    value: all of its fields, as the version that made it reads the frame.
    """

    given: Any
    frame: bytes
    value: Any


@dataclass(frozen=True)
class Frames:
    """The messages of one family. A sample's name is `tag/full` or `tag/least`; see `Family.schema` for `schema`."""

    schema: Mapping[str, str]
    samples: Mapping[str, Sample]


def load(version: str) -> dict[str, Frames]:
    """By the name of the family."""
    return {path.stem: _loads(path.read_text()) for path in sorted((FRAMES / version).glob("*.json"))}


def dumps(frames: Frames) -> str:
    """The text of a file: a line for each field, and three for each message."""
    schema = json.dumps(dict(frames.schema), indent=2, ensure_ascii=False)
    samples = ",\n".join(
        f"{_line(name)}: {{\n"
        f'  "given": {_line(to_json(sample.given))},\n'
        f'  "frame": {_line(_frame_to_json(sample.frame))},\n'
        f'  "value": {_line(to_json(sample.value))}\n'
        "}"
        for name, sample in frames.samples.items()
    )
    return f'{{"schema": {schema},\n"samples": {{\n{samples}\n}}}}\n'


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _loads(text: str) -> Frames:
    found = json.loads(text)
    return Frames(
        found["schema"],
        {
            name: Sample(from_json(each["given"]), _frame_from_json(each["frame"]), from_json(each["value"]))
            for name, each in found["samples"].items()
        },
    )


def to_json(value: Any) -> Any:
    match value:
        case bytes():
            return {"$hex": value.hex()}
        case list() | tuple():
            return [to_json(part) for part in value]
        case dict() if any(isinstance(key, int) for key in value):
            return {"$int": {str(key): to_json(part) for key, part in value.items()}}
        case dict():
            return {key: to_json(part) for key, part in value.items()}
    return value


def from_json(value: Any) -> Any:
    match value:
        case {"$hex": text, **rest} if not rest:
            return bytes.fromhex(text)
        case {"$int": entries, **rest} if not rest:
            return {int(key): from_json(part) for key, part in entries.items()}
        case list():
            return [from_json(part) for part in value]
        case dict():
            return {key: from_json(part) for key, part in value.items()}
    return value


def _frame_to_json(frame: bytes) -> Any:
    """JSON is kept as its text."""
    try:
        json.loads(frame)
    except ValueError:
        return to_json(frame)
    return frame.decode()


def _frame_from_json(frame: Any) -> bytes:
    if isinstance(frame, str):
        return frame.encode()
    decoded = from_json(frame)
    assert isinstance(decoded, bytes)
    return decoded
