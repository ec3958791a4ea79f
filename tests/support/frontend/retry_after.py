"""Check of the headers with the time to retry after."""

from __future__ import annotations

import math
from collections.abc import Mapping

LONGEST_SECONDS = 60
"""Limit that docs/operations.md states."""


def assert_has_retry_headers(headers: Mapping[str, str]) -> None:
    """Check that both headers have the same time, which depends on recent starts and on chance; seconds are rounded
    up."""
    seconds, milliseconds = int(headers["retry-after"]), int(headers["retry-after-ms"])
    assert 1 <= seconds <= LONGEST_SECONDS
    assert seconds == math.ceil(milliseconds / 1000)
