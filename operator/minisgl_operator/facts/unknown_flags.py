"""Flags that the operator passes and that an image of an earlier version does not have."""

from __future__ import annotations

import re
from typing import Final

_MESSAGE: Final = re.compile(r": error: unrecognized arguments: (.+?)(?: \(see |$)", re.MULTILINE)


def unknown_flags(output: str) -> str:
    """The arguments that a command of an image has refused, from its last output; empty without any."""
    found = _MESSAGE.search(output)
    return "" if found is None else found.group(1)
