"""The revision of an engine's pod template: what tells a replica that is up to date from one that is not."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

_LENGTH: Final = 10


def short_hash(content: dict[str, Any]) -> str:
    """The same for equal content, whatever the order of its keys. A label's value."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:_LENGTH]
