"""Reasoning as an opaque string, which clients send back with the conversation but do not show.

Two APIs have a field for it: `encrypted_content` and `signature`. It hides nothing: the text is the client's own.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final

_PREFIX: Final = "minisgl1."


def seal(reasoning: str) -> str:
    return _PREFIX + base64.urlsafe_b64encode(reasoning.encode("utf-8", "replace")).decode()


def unseal(sealed: str) -> str | None:
    """Return the reasoning; None for a string that another server made, which only that one can read."""
    if not sealed.startswith(_PREFIX):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(_PREFIX), b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
