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
"""Objects of one schema that are looked at, and the sum of the names and patterns of each."""
_MAX_OTHERS: Final = 64
"""Names of other objects that a pattern may match."""
_KEPT: Final = 512


def close_objects(root: dict[str, Any]) -> None:
    """Replace `patternProperties` by the properties that they match, where no key but theirs is valid."""
    schemas = list(schemas_within(root))
    objects = [schema for schema in schemas if "patternProperties" in schema]
    if not objects:
        return
    # The library merges the properties of schemas that apply to the same value.
    is_merged = any("allOf" in schema or ("$ref" in schema and len(schema) > 1) for schema in schemas)
    others = list({name: None for schema in schemas for name in _names(schema)})[:_MAX_OTHERS] if is_merged else []
    size = 0
    for schema in objects[:_MAX_OBJECTS]:
        names = list(dict.fromkeys([*_names(schema), *others]))
        keys = _encoded(_other_keys(schema, names))
        size += len(keys)
        if size > _MAX_BYTES:
            return
        if not _has_other_keys(keys):
            _close(schema, names)


def _names(schema: dict[str, Any]) -> list[str]:
    return [*schema.get("properties", ()), *schema.get("required", ())]


def _other_keys(schema: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return a schema of objects with any values that have none of the names."""
    patterns = schema["patternProperties"]
    return {
        "type": "object",
        "properties": dict.fromkeys(names, False),
        "patternProperties": {pattern: value is not False for pattern, value in patterns.items()},
        "additionalProperties": schema.get("additionalProperties", True) is not False,
    }


def _close(schema: dict[str, Any], names: list[str]) -> None:
    patterns = schema.pop("patternProperties")
    properties = schema.get("properties", {})
    applying: dict[str, list[Schema]] = {name: [properties[name]] if name in properties else [] for name in names}
    texts = tuple(msgspec.json.encode(name).decode() for name in names)
    for pattern, value in patterns.items():
        matches = matching(_grammar(_encoded({"type": "string", "pattern": pattern})), texts)
        for name, is_matching in zip(names, matches, strict=True):
            if is_matching:
                applying[name].append(value)
    if (rest := schema.get("additionalProperties", True)) is not False:
        applying = {name: values or [rest] for name, values in applying.items()}
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
