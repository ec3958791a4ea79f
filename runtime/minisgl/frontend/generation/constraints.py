"""Fields of request bodies that constrain the text of an answer, under the names of OpenAI, vLLM and SGLang.

Only their form is checked here; whether a schema or grammar can be applied is checked by `constraint_check`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from minisgl.frontend.generation.unsupported import reject_unsupported, supports
from minisgl.frontend.server.json_body import invalid
from minisgl.wire.text import ConstraintKind, StructuredOutput

ANY_JSON: Final = "$$ANY$$"
"""Value of SGLang's `json_schema` for any JSON text."""
_JSON_OBJECT: Final = StructuredOutput("json", '{"type":"object"}')

Schema = dict[str, Any] | bool
SchemaOrText = dict[str, Any] | bool | str
"""A JSON schema, or its text."""
Choices = Annotated[list[str], Meta(min_length=1, max_length=4096)]
DefinitionOrText = dict[str, Any] | str
"""Definition of a structural tag, or its JSON text."""


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    """`response_format` of any text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    """`response_format` of any JSON object."""


class JsonSchema(msgspec.Struct, kw_only=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema: Schema | None = None
    """None: any JSON object."""
    description: str | None = None
    strict: bool | None = None
    """Accepted without effect: a schema is always enforced."""


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    """`response_format` of JSON that is valid under a schema."""

    json_schema: JsonSchema


class StructuralTagFormat(msgspec.Struct, tag_field="type", tag="structural_tag"):
    """`response_format` of text with structured parts: `format` in the newer form, `structures` and `triggers` in the
    older one."""

    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


AnyFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's `structured_outputs`: one constraint, and options for JSON."""

    json: SchemaOrText | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: DefinitionOrText | None = None

    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    """Accepted without effect: there is no other backend."""
    disable_additional_properties: Annotated[bool | None, supports(False)] = None
    whitespace_pattern: Annotated[str | None, supports()] = None


class Constraint(msgspec.Struct, frozen=True):
    """The constraint of a request, and the field that asks for it."""

    field: str
    output: StructuredOutput


NAMES: Final[dict[str, ConstraintKind]] = {
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
    "json_schema": "json",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Fields of a body whose value is a constraint, with its kind."""
IN_STRUCTURED_OUTPUTS: Final[dict[str, ConstraintKind]] = {
    "json": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json",
    "structural_tag": "structural_tag",
}


def constraint_of(body: msgspec.Struct, path: str = "") -> Constraint | None:
    """Return the constraint of a body, which may have any of the fields above; `path` comes before their names. Raises
    ApiError for several constraints."""
    found: list[Constraint] = []
    if (format := _from_response_format(getattr(body, "response_format", None), path)) is not None:
        found.append(format)
    nested = getattr(body, "structured_outputs", None)
    if nested is not None:
        found.append(_from_structured_outputs(nested, f"{path}structured_outputs"))
    for name, kind in NAMES.items():
        if (value := getattr(body, name, None)) is not None:
            found.append(Constraint(path + name, _output(kind, value)))
    return _only(found)


def _from_response_format(format: AnyFormat | None, path: str) -> Constraint | None:
    name = f"{path}response_format"
    match format:
        case JsonObjectFormat():
            return Constraint(name, _JSON_OBJECT)
        case JsonSchemaFormat(JsonSchema(schema=None)):
            return Constraint(name, _JSON_OBJECT)
        case JsonSchemaFormat(JsonSchema(schema=schema)):
            return Constraint(f"{name}.json_schema.schema", _output("json", schema))
        case StructuralTagFormat():
            return Constraint(name, _output("structural_tag", msgspec.to_builtins(format)))
    return None


def _from_structured_outputs(options: StructuredOutputs, path: str) -> Constraint:
    reject_unsupported(options, f"{path}.")
    found: list[Constraint] = []
    for name, kind in IN_STRUCTURED_OUTPUTS.items():
        value = getattr(options, name)
        if name == "json_object":
            if value:
                found.append(Constraint(f"{path}.{name}", _JSON_OBJECT))
        elif value is not None:
            found.append(Constraint(f"{path}.{name}", _output(kind, value)))
    constraint = _only(found)
    if constraint is None:
        raise invalid(path, f"expected one of {', '.join(IN_STRUCTURED_OUTPUTS)}")
    if options.disable_any_whitespace and constraint.output.kind == "json":
        compact = msgspec.structs.replace(constraint.output, compact=True)
        return msgspec.structs.replace(constraint, output=compact)
    return constraint


def _only(found: list[Constraint]) -> Constraint | None:
    if len(found) > 1:
        one, other = found[:2]
        raise invalid(other.field, f"cannot be combined with {one.field}; send one constraint")
    return found[0] if found else None


def _output(kind: ConstraintKind, value: Any) -> StructuredOutput:
    if kind == "json" and value == ANY_JSON:
        value = True
    return StructuredOutput(kind, value if isinstance(value, str) else msgspec.json.encode(value).decode())
