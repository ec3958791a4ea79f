"""The place in a schema that makes the library refuse it: its errors name none."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from minisgl.grammar.schema.exact import ExactSchema
from minisgl.grammar.schema.reader import Schema
from minisgl.grammar.schema.refusals import Path

_SECONDS: Final = 0.3
_INNER: Final = re.compile(
    r"Unsatisfiable schema: (?:required property '(?P<name>.*?)'|required item|prefixItem)", re.DOTALL
)

Check = Callable[[Schema], str]
"""Returns the library's error for a whole schema, or an empty text."""


def locate(read: ExactSchema, user: Schema, check: Check, problem: str) -> tuple[Path, str]:
    """Return the path in the user's schema of the innermost schema that is refused for the same reason, and the
    reason. `problem`: the error for the whole schema. Takes a bounded time, after which the path may be too short."""
    if isinstance(read.schema, bool):
        return (), problem
    definitions = read.schema.get("$defs", {})
    until = time.monotonic() + _SECONDS
    node: Schema = read.schema
    path: Path = ()
    inner = True
    while inner:
        inner = False
        for child, steps in _children(node, definitions, read.sources, path):
            if time.monotonic() > until:
                break
            reason = "" if isinstance(child, bool) else check({**child, "$defs": definitions} if definitions else child)
            if reason and (reason == problem or _is_inside(problem, steps, reason)):
                node, path, problem, inner = child, steps, reason, True
                break
    return _in_users_words(user, path), problem


def _is_inside(problem: str, path: Path, reason: str) -> bool:
    """Whether the problem of a schema is that of the one at `path` within it, in other words."""
    if (found := _INNER.match(problem)) is None or not reason.startswith("Unsatisfiable"):
        return False
    return found["name"] is None or found["name"] == path[-1]


def _children(
    node: Any, definitions: dict[str, Schema], sources: dict[str, Path], path: Path
) -> Iterator[tuple[Any, Path]]:
    if not isinstance(node, dict):
        return
    for keyword in ("properties", "patternProperties"):
        for name, child in node.get(keyword, {}).items():
            yield child, (*path, keyword, name)
    for keyword in ("prefixItems", "anyOf", "oneOf", "allOf"):
        for i, child in enumerate(node.get(keyword, ())):
            yield child, (*path, keyword, i)
    for keyword in ("items", "additionalProperties"):
        if keyword in node:
            yield node[keyword], (*path, keyword)
    name = node.get("$ref", "").removeprefix("#/$defs/")
    if name in definitions and len(path) < 256:
        yield definitions[name], sources[name]


def _in_users_words(user: Any, path: Path) -> Path:
    """Return the path with the keywords that the user wrote, as far as it exists in the user's schema."""
    found: list[str | int] = []
    for step in path:
        renamed = {"anyOf": "oneOf", "prefixItems": "items", "properties": "propertyNames"}.get(str(step), step)
        for name in (step, renamed):
            if isinstance(user, dict) and name in user:
                user = user[name]
                found.append(name)
                break
            if isinstance(user, list) and isinstance(name, int) and name < len(user):
                user = user[name]
                found.append(name)
                break
        else:
            break
    return tuple(found)
