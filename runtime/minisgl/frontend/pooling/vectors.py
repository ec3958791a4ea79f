"""Outputs of texts as arrays and as JSON, without a step of Python for each number."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.response_stream import Delta

Rows = NDArray[np.float32]
"""[texts, numbers of an output]"""


def rows_of(choices: Sequence[Delta]) -> Rows:
    """Return the outputs of all texts. Raises ApiError for an output that is missing, or has NaN or an infinity: JSON
    has no such numbers, and a search would return nonsense."""
    values = [b"" if choice.finished is None else choice.finished.values for choice in choices]
    if not values[0] or len({*map(len, values)}) != 1 or len(values[0]) % 4:
        raise ApiError.from_code("engine_error", "the engine sent no output, or an incomplete one; retry")
    rows: Rows = np.frombuffer(b"".join(values), "<f4").reshape(len(values), -1)
    if not np.isfinite(rows).all():
        first = int(np.argmin(np.isfinite(rows).all(axis=1)))
        message = f"the output of text {first} has numbers that are not finite; try `--dtype bfloat16` or `float32`"
        raise ApiError.from_code("engine_error", message)
    return rows


def shortened(rows: Rows, dimensions: int | None) -> Rows:
    """Return the first numbers of embeddings of which all beginnings are embeddings (Matryoshka), as unit vectors."""
    if dimensions is None or dimensions >= rows.shape[1]:
        return rows
    return unit_vectors(rows[:, :dimensions])


def unit_vectors(rows: Rows) -> Rows:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: Rows = rows / np.maximum(lengths, np.float32(1e-12))
    return unit


def json_rows(rows: Rows) -> list[bytes]:
    """Return each output as a JSON list of numbers."""
    return [msgspec.json.encode(row.tolist()) for row in rows]


def base64_rows(rows: Rows) -> list[bytes]:
    """Return each output as a JSON string: base64 of its float32 numbers, little-endian."""
    little = np.ascontiguousarray(rows, "<f4")
    return [b'"%b"' % base64.b64encode(row) for row in little]
