"""Garbage collection of the operator's process."""

from __future__ import annotations

import gc
from typing import Final

_NEVER: Final = 2**30


def collect_old_objects_on_request() -> None:
    """Limit Python's own collections to new objects; the controller collects all after each full list.

    With a thousand models a collection of all objects takes half a second in which nothing else runs, and while they
    change there would be one every few seconds.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
