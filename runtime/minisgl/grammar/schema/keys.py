"""Objects whose patterns match no key beside the named ones.

The library writes a comma before it finds that no key can follow.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import msgspec
from llguidance import LLMatcher

from minisgl.grammar.library import begins, matching
from minisgl.grammar.schema.disjoint import schemas_within
from minisgl.grammar.schema.reader import Schema
from minisgl.grammar.schema.values import ESCAPES

_MAX_OBJECTS: Final = 32
_MAX_BYTES: Final = 64 << 10
"""Objects of one schema that are looked at, and the sum of their names and patterns."""
_KEPT: Final = 512


def close_objects(root: dict[str, Any]) -> None:
    """Replace `patternProperties` by the properties that they match, where no key but theirs is valid."""
    objects = [schema for schema in schemas_within(root) if "patternProperties" in schema]
    size = 0
    for schema in objects[:_MAX_OBJECTS]:
        others = _encoded(_other_keys(schema))
        size += len(others)
        if size > _MAX_BYTES:
            return
        if not _has_other_keys(others):
            _close(schema)


def _names(schema: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys([*schema.get("properties", ()), *schema.get("required", ())]))


def _other_keys(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of objects with any values that have no named property."""
    patterns = schema["patternProperties"]
    return {
        "type": "object",
        "properties": dict.fromkeys(_names(schema), False),
        "patternProperties": {pattern: value is not False for pattern, value in patterns.items()},
        "additionalProperties": schema.get("additionalProperties", True) is not False,
    }


def _close(schema: dict[str, Any]) -> None:
    patterns = schema.pop("patternProperties")
    properties = schema.get("properties", {})
    names = _names(schema)
    applying: dict[str, list[Schema]] = {name: [properties[name]] if name in properties else [] for name in names}
    texts = tuple(msgspec.json.encode(name).decode() for name in names)
    for pattern, value in patterns.items():
        matches = matching(_grammar(_encoded({"type": "string", "pattern": pattern})), texts)
        for name, is_matching in zip(names, matches, strict=True):
            if is_matching:
                applying[name].append(value)
    schema["properties"] = {
        name: values[0] if len(values) == 1 else {"allOf": values} for name, values in applying.items() if values
    }
    schema["additionalProperties"] = False


@lru_cache(_KEPT)
def _has_other_keys(schema: bytes) -> bool:
    return begins(_grammar(schema), '{"')


def _encoded(schema: dict[str, Any]) -> bytes:
    return msgspec.json.encode(schema)


def _grammar(schema: bytes) -> str:
    return LLMatcher.grammar_from_json_schema(
        schema.decode(), overrides={"whitespace_pattern": "", "json_allowed_escapes": ESCAPES}
    )
