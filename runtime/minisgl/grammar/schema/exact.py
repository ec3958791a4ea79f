"""The one way from a user's schema to llguidance's."""

from __future__ import annotations

import msgspec

from minisgl.grammar.schema.disjoint import with_any_of
from minisgl.grammar.schema.keys import close_objects
from minisgl.grammar.schema.places import optional_at_once
from minisgl.grammar.schema.productive import circular, endless
from minisgl.grammar.schema.reader import Reader, Schema
from minisgl.grammar.schema.refusals import MAX_BYTES, MAX_OPTIONAL, too_complex, unsupported


class ExactSchema(msgspec.Struct, frozen=True):
    """A schema that llguidance enforces exactly, if it accepts it."""

    schema: Schema
    sources: dict[str, tuple[str | int, ...]]
    """Path of each definition in the user's schema."""


def exact(schema: Schema) -> ExactSchema:
    """Read a user's schema. Raises GrammarError `unsupported_schema` or `grammar_too_complex`, with its path."""
    return _read(schema, lenient=False)


def lenient(schema: Schema) -> ExactSchema:
    """Read a user's schema, and leave out what is not supported. Raises GrammarError where that is not possible."""
    return _read(schema, lenient=True)


def _read(schema: Schema, *, lenient: bool) -> ExactSchema:
    reader = Reader(schema, lenient=lenient)
    result = reader.read()
    if isinstance(result, dict):
        close_objects(result)
        with_any_of(result, lenient=lenient)
        for name in circular(result):
            path = reader.sources.get(name, ())
            raise unsupported(path, "references lead back to the same schema for the same value")
        if optional_at_once(result, MAX_OPTIONAL) > MAX_OPTIONAL:
            problem = f"more than {MAX_OPTIONAL} optional properties may come next at one place, those of alternatives "
            raise too_complex(
                (), problem + "together; require properties, or tell alternatives apart by their first one"
            )
        for name in endless(result):
            raise unsupported(reader.sources.get(name, ()), "references never end, so no finite value is valid")
    size = len(msgspec.json.encode(result))
    if size > MAX_BYTES:
        raise too_complex((), f"the schema has {size} bytes, more than {MAX_BYTES}")
    return ExactSchema(result, reader.sources)
