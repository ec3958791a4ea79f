"""What a client that was turned away is told of when to come again."""

from __future__ import annotations

import math
from collections.abc import Mapping

LONGEST_SECONDS = 60
"""What docs/operations.md promises."""


def assert_says_when_to_come_again(headers: Mapping[str, str]) -> None:
    """Both headers name the same time, which depends on how fast requests start and on chance; whole seconds are
    rounded up."""
    seconds, milliseconds = int(headers["retry-after"]), int(headers["retry-after-ms"])
    assert 1 <= seconds <= LONGEST_SECONDS
    assert seconds == math.ceil(milliseconds / 1000)
