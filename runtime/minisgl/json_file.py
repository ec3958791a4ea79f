"""JSON files of a model: text from outside, read with limits on size and depth."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, Final

MAX_FILE_BYTES: Final = 16 << 20
"""More than configuration files need that name each layer of a thousand experts. What is made of a file takes up to
twenty times its size."""
_MAX_DEPTH: Final = 64


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a file. Raises ValueError, with what is wrong, and OSError."""
    check_size(path, MAX_FILE_BYTES)
    try:
        content = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it does not hold a JSON object")
    _check_depth(content)
    return content


def check_size(path: Path, most: int) -> None:
    """Raises ValueError for a file of more bytes than `most`, or one that may have no end, and OSError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if (size := status.st_size) > most:
        raise ValueError(f"its {size} bytes are more than {most}")


def _check_depth(content: dict[str, Any]) -> None:
    level: list[Any] = [content]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise ValueError(f"its values are nested more than {_MAX_DEPTH} deep")
