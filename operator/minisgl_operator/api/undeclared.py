"""Fields that the definition in the cluster does not have, because it is older than this operator. The API server
refuses a server-side apply with such fields as a whole, and names them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from minisgl_operator.api.objects import Manifest, copy_of

_PATH: Final = re.compile(r"((?:\.\w+|\[[^\]]*\])+): field not declared in schema")
_STEP: Final = re.compile(r"\.(\w+)|\[[^\]]*\]")


def undeclared_fields(message: str) -> list[str]:
    """Paths in a message of the API server, such as `.status.replicaStatuses[name="a"].dataTypes`."""
    return _PATH.findall(message)


def without_fields(manifest: Manifest, paths: Sequence[str]) -> Manifest:
    """A copy without the fields at `paths`; behind brackets in all items of a list, since their schema is the same."""
    found = copy_of(manifest)
    for path in paths:
        _remove([found], [step.group(1) for step in _STEP.finditer(path)])
    return found


def _remove(values: Sequence[Any], steps: Sequence[str | None]) -> None:
    """Remove what is behind `steps`: names of fields, and None for the items of a list."""
    first, *others = steps
    inner: list[Any] = []
    for value in values:
        if first is None:
            inner += value if isinstance(value, list) else []
        elif isinstance(value, dict) and not others:
            value.pop(first, None)
        elif isinstance(value, dict) and first in value:
            inner.append(value[first])
    if others and inner:
        _remove(inner, others)
