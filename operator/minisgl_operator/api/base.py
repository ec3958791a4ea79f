"""Building blocks of the API types: frozen objects, rules that the API server enforces too, bounded scalars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


@dataclass(frozen=True)
class Rule:
    """One rule in two forms: `cel` for the API server, and `holds` for objects that are parsed here.

    `field` is the path that errors name, relative to the object with the rule ("" for the object itself).
    A rule about changes (its CEL uses `oldSelf`) has no `holds`: one object alone cannot violate it.
    """

    cel: str
    message: str
    field: str = ""
    holds: Callable[[Any], bool] | None = None

    def json(self) -> dict[str, str]:
        rule = {"rule": self.cel, "message": self.message}
        if self.field:
            rule["fieldPath"] = self.field
        return rule


class ApiModel(BaseModel):
    """An object of the API. Unknown fields are errors, as for `kubectl apply`. Docstrings of fields are their
    descriptions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()

    def manifest(self) -> dict[str, Any]:
        """The object as in a manifest: camelCase, without fields that have their default."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for rule in self.rules:
            if rule.holds is not None and not rule.holds(self):
                raise PydanticCustomError("rule", "{message}", {"message": rule.message, "field": rule.field})
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = handler(schema)
        if cls.rules:
            resolved = handler.resolve_ref_schema(reference)
            resolved["x-kubernetes-validations"] = [rule.json() for rule in cls.rules]
        return reference


@dataclass(frozen=True)
class Unique:
    """A list whose items are unique by the attribute `key` (without one, as a whole), by which server-side apply merges
    them."""

    key: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        seen: set[Any] = set()
        for item in items:
            identity = getattr(item, self.key) if self.key else item
            if identity in seen:
                raise PydanticCustomError("duplicate", "Duplicate value: {value}", {"value": repr(identity)})
            seen.add(identity)
        return items

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        result = handler(schema)
        result["x-kubernetes-list-type"] = "map" if self.key else "set"
        if self.key:
            result["x-kubernetes-list-map-keys"] = [to_camel(self.key)]
        return result


def _whole_quantity(value: Any) -> Any:
    """A quantity as text; Kubernetes also accepts a number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


# A number with a longer exponent would take too long to compute.
_QUANTITY_PATTERN: Final = r"^[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,2}|m|k|Ki|[MGTPE]i?)?$"

Quantity = Annotated[
    str,
    Field(max_length=32, pattern=_QUANTITY_PATTERN),
    BeforeValidator(_whole_quantity),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "minimum": 0,
            "maxLength": 32,
            "pattern": _QUANTITY_PATTERN,
        }
    ),
]
"""A quantity in the notation of Kubernetes, not negative: 500m, 16Gi, 4."""

Integer = Annotated[int, Field(strict=True)]
Boolean = Annotated[bool, Field(strict=True)]
ObjectName = Annotated[
    str,
    Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"),
]
"""Name of an object (DNS-1123 subdomain)."""
DnsLabel = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""Name of a part of a pod (DNS-1123 label)."""
SecretKey = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
QualifiedName = Annotated[
    str,
    Field(min_length=1, max_length=316, pattern=r"^([-.a-z0-9]+/)?[a-zA-Z0-9]([-._a-zA-Z0-9]*[a-zA-Z0-9])?$"),
]
"""A label key or resource name, such as nvidia.com/gpu."""
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([a-zA-Z0-9]([-._a-zA-Z0-9]*[a-zA-Z0-9])?)?$")]
ImageReference = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[a-zA-Z0-9][-._:/@a-zA-Z0-9]*$")]


def problem(error: Any) -> tuple[str, str]:
    """Path of the field in the document, and message, of a pydantic error."""
    path = ""
    for step in error["loc"]:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    if error["type"] == "rule":
        path += error["ctx"]["field"]
    messages = {
        "extra_forbidden": "unknown field: remove it, or see kubectl explain imodel.spec",
        "missing": "Required value: set this field",
    }
    return path.removeprefix("."), messages.get(error["type"], error["msg"])
