"""What every part of the API is made of: frozen objects, rules that hold in the API server too, bounded scalars."""

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
    """One rule, said twice: `cel` for the API server and `holds` for objects that are parsed here.

    `field` is the path, relative to the object that carries the rule, that a refusal points at ("" for the object).
    A rule on a change (its CEL names `oldSelf`) has no `holds`: one object alone cannot break it.
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
    """One object of the API. Unknown fields are errors, as they are for `kubectl apply`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        protected_namespaces=(),
    )

    rules: ClassVar[tuple[Rule, ...]] = ()

    def manifest(self) -> dict[str, Any]:
        """The object as it stands in a manifest: camelCase, without the fields that have their default."""
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
    """A list whose items differ in `key` (or, without one, as a whole): what server-side apply merges by."""

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
            result["x-kubernetes-list-map-keys"] = [self.key]
        return result


def _whole_quantity(value: Any) -> Any:
    """Kubernetes writes a quantity as a number or as text; a negative one is never meant here."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


# An exponent of more digits would be a number that takes for ever to compute.
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
"""An amount of something as Kubernetes writes it: 500m, 16Gi, 4."""

Integer = Annotated[int, Field(strict=True)]
Boolean = Annotated[bool, Field(strict=True)]
ObjectName = Annotated[
    str,
    Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"),
]
"""The name of an object in the same namespace, or of one without namespace (DNS-1123 subdomain)."""
SecretKey = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
QualifiedName = Annotated[
    str,
    Field(min_length=1, max_length=316, pattern=r"^([-.a-z0-9]+/)?[a-zA-Z0-9]([-._a-zA-Z0-9]*[a-zA-Z0-9])?$"),
]
"""A label key or resource name: nvidia.com/gpu."""
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([a-zA-Z0-9]([-._a-zA-Z0-9]*[a-zA-Z0-9])?)?$")]
ImageReference = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[a-zA-Z0-9][-._:/@a-zA-Z0-9]*$")]
