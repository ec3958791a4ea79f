"""The reference of InferenceModel for people, from the same types as the CustomResourceDefinition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from minisgl_operator.api.schema import Schema, structural
from minisgl_operator.api.status import InferenceModelStatus
from minisgl_operator.api.types import API_VERSION, NAME_RULE, InferenceModelSpec

_INTRODUCTION: Final = f"""# InferenceModel

`{API_VERSION}`, short name `imodel`. `kubectl explain imodel.spec` prints the same on a cluster, and
`minisgl serve -f FILE` serves the same file on one machine. The smallest one:

```yaml
apiVersion: {API_VERSION}
kind: InferenceModel
metadata:
  name: qwen3
spec:
  model:
    source:
      huggingFace:
        repo: Qwen/Qwen3-0.6B
```

What is wrong with an object is said when it is applied, with the name of the field. Unknown fields are
refused. Where a table says *required*, the field is required once the object around it is there.

`{NAME_RULE.message.replace(": ", "`: ", 1)}.

This page is written by `python -m support.cluster.api_reference` from the types.
"""


def page() -> str:
    parts = [_INTRODUCTION, "## spec", *_section("spec", structural(InferenceModelSpec), spec=True)]
    parts += ["## status", *_section("status", structural(InferenceModelStatus), spec=False)]
    return "\n".join(parts)


def _section(path: str, schema: Schema, *, spec: bool) -> Iterator[str]:
    """A table of the fields of one object, then the sections of the objects in it."""
    if path.count("."):
        yield f"### {path}"
    yield ""
    if rules := schema.get("x-kubernetes-validations"):
        yield from (f"- {rule['message']}." for rule in rules)
        yield ""
    required = schema.get("required", ())
    yield "| field | type | default | meaning |" if spec else "| field | type | meaning |"
    yield "|---|---|---|---|" if spec else "|---|---|---|"
    for name, field in schema["properties"].items():
        cells = [f"`{name}`", _type(field)]
        if spec:
            cells.append("*required*" if name in required else _default(field))
        yield "| " + " | ".join([*cells, field["description"].replace("|", "\\|")]) + " |"
    yield ""
    for name, field in schema["properties"].items():
        inner = field.get("items", field)
        if "properties" in inner:
            yield from _section(f"{path}.{name}{'[]' if 'items' in field else ''}", inner, spec=spec)


def _type(field: Schema) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "quantity"
    match field["type"]:
        case "array":
            return f"list of {_type(field['items'])}, at most {field['maxItems']}"
        case "integer" if field["maximum"] < 2**31 - 1:
            return f"integer, {field['minimum']} to {field['maximum']}"
        case "object" if "additionalProperties" in field:
            return f"map to {_type(field['additionalProperties'])}, at most {field['maxProperties']}"
        case "string" if field.get("format") == "date-time":
            return "time"
        case other:
            return str(other)


def _default(field: Schema) -> str:
    default: Any = field.get("default")
    if default in (None, {}):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`" if default != "" else '`""`'
