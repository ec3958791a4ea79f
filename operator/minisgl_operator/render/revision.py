"""Revision of a pod template, which identifies outdated replicas and Jobs."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

_LENGTH: Final = 10


def short_hash(content: dict[str, Any]) -> str:
    """Hash as a label's value; equal for equal content, whatever the order of its keys."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:_LENGTH]
