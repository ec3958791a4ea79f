"""Conversion of types to structural schemas, as the API server reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jsonschema
import pytest
import yaml
from pydantic import Field, ValidationError

from minisgl_operator.__main__ import main
from minisgl_operator.api.base import ApiModel
from minisgl_operator.api.crd import crd
from minisgl_operator.api.schema import SchemaError, defaulted, structural
from minisgl_operator.api.status import InferenceModelStatus
from minisgl_operator.api.types import InferenceModel, InferenceModelSpec
from support.cluster.api_reference import FILES, ROOT
from support.cluster.validation_cases import CASES, EVERYTHING, Case

SPEC: dict[str, Any] = structural(InferenceModelSpec)


@pytest.mark.parametrize("path", sorted(FILES), ids=lambda path: path.name)
def test_committed_files_match_the_types(path: Any) -> None:
    assert path.read_text() == FILES[path](), "run `PYTHONPATH=operator:tests python -m support.cluster.api_reference`"


def test_the_command_prints_the_definition(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crd"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == crd()


def test_the_definition_fits_into_the_annotation_of_a_client_side_apply() -> None:
    """Annotations of an object are limited to 256 KiB, also where `kubectl apply` keeps the last manifest there."""
    assert len(json.dumps(crd())) < 256 * 1024


def test_the_operator_package_shadows_no_module_of_python() -> None:
    """With operator/__init__.py on the path, Python would not start."""
    assert not (ROOT / "operator" / "__init__.py").exists()


class _Inner(ApiModel):
    number: int = Field(default=3, ge=0, le=9, description="A number.")


class _NoDescription(ApiModel):
    field: int = Field(ge=0, le=9)


class _NoBound(ApiModel):
    field: int = Field(ge=0, description="A number.")


class _NoLength(ApiModel):
    field: str = Field(description="A text.")


class _NoItems(ApiModel):
    field: tuple[bool, ...] = Field(default=(), description="A list.")


class _OtherKeyword(ApiModel):
    field: int = Field(ge=0, le=9, multiple_of=3, description="A number.")


class _Union(ApiModel):
    field: Annotated[str, Field(max_length=3)] | bool = Field(description="This or that.")


class _OtherDefault(ApiModel):
    field: _Inner = Field(default=_Inner(number=4), description="An object.")


@pytest.mark.parametrize(
    ("part", "error"),
    [
        (_NoDescription, "_NoDescription.field: no description"),
        (_NoBound, "_NoBound.field: no maximum"),
        (_NoLength, "_NoLength.field: no maxLength"),
        (_NoItems, "_NoItems.field: no maxItems"),
        (_OtherKeyword, "_OtherKeyword.field: keywords without structural schema: multipleOf"),
        (_Union, "_Union.field: a union"),
        (_OtherDefault, "_OtherDefault.field: the default differs from the defaults of the fields"),
    ],
)
def test_types_without_a_structural_schema_are_errors(part: type[ApiModel], error: str) -> None:
    with pytest.raises(SchemaError, match=error.replace("'", ".")):
        structural(part)


class _Outer(ApiModel):
    inner: _Inner = Field(default=_Inner(), description="With a default within.")
    choice: Literal["a", "b"] | None = Field(default=None, description="One of two.")


def test_inner_defaults_apply_to_an_absent_object() -> None:
    schema = structural(_Outer)
    assert schema["properties"]["inner"]["default"] == {}
    assert schema["properties"]["choice"] == {"description": "One of two.", "type": "string", "enum": ["a", "b"]}
    assert defaulted(schema) == {"inner": {"number": 3}}


def test_defaults_of_the_api_server_equal_those_of_the_types() -> None:
    """An object reads the same whether this version of the definition stored it or an older one."""
    smallest: dict[str, Any] = {"model": {"source": {"pvc": {"claimName": "models"}}}}
    filled = defaulted(SPEC) | {"model": {"dtype": "auto", "source": {"pvc": {"claimName": "models", "path": ""}}}}
    assert InferenceModelSpec.model_validate(filled) == InferenceModelSpec.model_validate(smallest)


@pytest.mark.parametrize("case", [case for case in CASES if "spec" in case.model], ids=lambda case: case.name)
def test_the_schema_accepts_what_the_types_accept(case: Case) -> None:
    if not case.field:
        spec = InferenceModel.parse(case.model).spec.model_dump(mode="json", by_alias=True, exclude_none=True)
        jsonschema.Draft202012Validator(SPEC).validate(spec)


def test_status_has_no_defaults() -> None:
    """A field that the operator did not write was not observed, and must not get a value."""
    assert "'default'" not in str(structural(InferenceModelStatus))


Path = tuple[str | int, ...]


def _places(value: Any, path: Path = ()) -> Iterator[Path]:
    """Every inner value at any depth, except below affinity, which the API server checks."""
    yield path
    if path[-1:] != ("affinity",):
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, each in inner:
            yield from _places(each, (*path, key))


def _replaced(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    copied = value.copy()
    copied[path[0]] = _replaced(value[path[0]], path[1:], new)
    return copied


def _schema_of(path: Path) -> Any:
    """The schema of the value in this place. No keyword of a structural schema is about what is further inside."""
    schema = CLOSED
    for step in path:
        if isinstance(step, int):
            schema = schema["items"]
        else:
            fields = schema.get("properties", {})
            schema = fields[step] if step in fields else schema.get("additionalProperties", {})
    return schema


def _refused_by_rule_alone(spec: Any) -> bool | None:
    """None: accepted. True: rejected only by rules, which the schema has as CEL."""
    try:
        InferenceModelSpec.model_validate(spec)
    except ValidationError as error:
        return {each["type"] for each in error.errors()} <= {"rule", "duplicate"}
    return None


def _closed(schema: Any) -> Any:
    """The schema as the API server applies it: an object with fields allows no others."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(each) for key, each in schema.items()}
    return closed | {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else closed


CLOSED = _closed(SPEC)
VALUES: tuple[Any, ...] = (
    -1,
    0,
    1,
    2**40,
    0.5,
    True,
    "",
    "a",
    "A b",
    "-",
    "1Gi",
    "a" * 9000,
    [],
    ["a"],
    {},
    {"a": "b"},
)


@pytest.mark.parametrize("path", list(_places(EVERYTHING)), ids=lambda path: ".".join(map(str, path)) or "spec")
def test_types_and_schema_agree_on_any_value_in_any_place(path: Path) -> None:
    """Except for rules, which the table of validation cases covers. The rest of the spec is valid, so the schema of the
    place decides."""
    validator = jsonschema.Draft202012Validator(_schema_of(path))
    for new in VALUES:
        refused = _refused_by_rule_alone(_replaced(EVERYTHING, path, new))
        if refused is not True:
            assert validator.is_valid(new) is (refused is None), new


def test_everything_is_valid() -> None:
    jsonschema.Draft202012Validator(CLOSED).validate(EVERYTHING)
