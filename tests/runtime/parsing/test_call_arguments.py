"""Arguments in formats that write them one by one: schemas hold although references and combinations are in the way."""

from __future__ import annotations

import json
import random
from typing import Any, Final

import jsonschema
import numpy as np
import pytest

from minisgl.errors import GrammarError
from minisgl.grammar.grammars import Grammars
from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.answer_grammar import answer_grammar
from minisgl.parsing.call_rules import CallableTool
from minisgl.parsing.detect import find_formats
from minisgl.parsing.names import Parsers, ToolCallParser
from minisgl.parsing.reasoning import ReasoningState
from minisgl.tokenizer.token_bytes import added_tokens
from support.parsing.replay import replay
from support.tiny_tokenizers import byte_level, write_directory

TOKENIZER: Final = byte_level(added=())
"""Without tokens for markers, so that the text of an answer is all there is."""
EOS: Final = TOKENIZER.token_to_id("<|im_end|>")
CITIES: Final = {"City": {"type": "string", "enum": ["Oslo", "Rome"]}}


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    directory = write_directory(tmp_path_factory.mktemp("tokenizer"), TOKENIZER)
    return Grammars(directory, TOKENIZER.get_vocab_size(), [EOS])


def formats(parser: ToolCallParser) -> AnswerFormat:
    return find_formats(Parsers(tool_calls=parser, reasoning="qwen3"), None, added_tokens(TOKENIZER))


def grammar(parser: ToolCallParser, schema: dict[str, Any], *, strict: bool = True, must_call: bool = True) -> str:
    tool = CallableTool("f", {"type": "object", **schema}, strict)
    return answer_grammar(formats(parser), ReasoningState.BEHIND, tools=[tool], parallel=False, must_call=must_call)


def allows(grammars: Grammars, text: str, answer: str) -> bool:
    matcher = grammars.matcher(text)
    return all(matcher.consume(token) for token in TOKENIZER.encode(answer).ids) and matcher.can_end


def xml(**arguments: str) -> str:
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments.items())
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


def arguments_of(parser: ToolCallParser, answer: str, schema: dict[str, Any]) -> Any:
    found = replay(formats(parser), [answer], ReasoningState.BEHIND, {"f": schema})
    ((_, arguments),) = found.calls
    return json.loads(arguments)


def random_answer(grammars: Grammars, text: str, rng: random.Random) -> str | None:
    """Return an answer of a model that knows nothing but the grammar; None if it does not come to an end."""
    matcher = grammars.matcher(text)
    mask = np.zeros(grammars.mask_words, np.int32)
    tokens: list[int] = []
    while len(tokens) < 400:
        matcher.fill_mask(mask)
        allowed = [int(token) for token in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]
        closing = [token for token in allowed if TOKENIZER.id_to_token(token) in CLOSING]
        if len(allowed) > 150 and rng.random() < 0.2:
            end, trial = rng.choice(ENDS), matcher.copy()
            if all(map(trial.consume, end)):
                matcher = trial
                tokens += end
                continue
        if closing and rng.random() < 0.5:
            token = rng.choice(closing)
        else:
            token = rng.choice(allowed)
        if token == EOS:
            return str(TOKENIZER.decode(tokens, skip_special_tokens=False))
        assert matcher.consume(token)
        tokens.append(token)
    return None


CLOSING: Final = ("<|im_end|>", '"', "}", "]", ")")
ENDS: Final = [
    TOKENIZER.encode(f"\n</parameter>\n{follows}").ids for follows in ("</function>", "</function>", "<parameter=")
]


def city(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "properties": {"city": schema},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": CITIES,
    } | more


CITY: Final = {"$ref": "#/$defs/City"}
CLOSED: Final = {
    "type": "object",
    "properties": {"city": CITY, "count": {"type": "integer", "maximum": 9}},
    "required": ["city", "count"],
    "additionalProperties": False,
}
SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "reference": city(CITY),
    "optional": city({"anyOf": [{"type": "string", "enum": ["Oslo", "Rome"]}, {"type": "null"}]}),
    "all of": city({"allOf": [CITY]}),
    "all of with text": city({"allOf": [{"type": "string"}, CITY]}),
    "constants": city({"anyOf": [{"const": "Oslo"}, {"const": "Rome"}]}),
    "one of constants": city({"oneOf": [{"const": "Oslo"}, {"const": "Rome"}]}),
    "reference or number": city({"anyOf": [CITY, {"type": "integer", "minimum": 1, "maximum": 99}]}),
    "text or cities": city({"anyOf": [{"type": "string"}, {"type": "array", "items": CITY}, {"type": "null"}]}),
    "text or an object": city(
        {"anyOf": [{"type": "string"}, CLOSED, {"const": [1]}, {"type": "array", "maxItems": 1}]}
    ),
    "texts of several lines": city({"enum": ["a", "a\nb", "a\nb\nc", 1]}),
    "several types": city({"enum": ["Oslo", 1, None, True, 2.5, {"a": [1]}]}),
    "nested": city(
        {"anyOf": [{"$ref": "#/$defs/Both"}, {"type": "boolean"}]},
        **{"$defs": CITIES | {"Both": {"anyOf": [CITY, {"type": "array", "items": CITY, "maxItems": 2}]}}},
    ),
    "reference at the top": {"$ref": "#/$defs/Closed", "$defs": CITIES | {"Closed": CLOSED}},
    "all of at the top": {"allOf": [{"$ref": "#/$defs/Closed"}], "$defs": CITIES | {"Closed": CLOSED}},
    "any of at the top": {
        "anyOf": [
            {"$ref": "#/$defs/Closed"},
            {
                "type": "object",
                "properties": {"kind": {"const": "far"}, "city": {"enum": ["Lima"]}},
                "required": ["kind", "city"],
                "additionalProperties": False,
            },
        ],
        "$defs": CITIES | {"Closed": CLOSED},
    },
    "integers of any name": {"additionalProperties": {"type": "integer", "maximum": 99}, "required": ["a"]},
    "cities of any name": {"additionalProperties": CITY, "required": ["a"], "$defs": CITIES},
    "required but not listed": {
        "properties": {"city": CITY},
        "required": ["city", "a"],
        "additionalProperties": {"type": "boolean"},
        "$defs": CITIES,
    },
    "reference to the whole": {
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "city": CITY},
        "required": ["next", "city"],
        "additionalProperties": False,
        "$defs": CITIES,
    },
    "reference to a neighbour": {
        "properties": {"city": {"enum": ["Oslo"]}, "other": {"$ref": "#/properties/city"}},
        "required": ["other"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("parser", ["qwen3_coder", "pythonic"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", SCHEMAS)
def test_arguments_are_valid_whatever_the_model_writes(
    grammars: Grammars, parser: ToolCallParser, name: str, strict: bool
) -> None:
    schema = {"type": "object", **SCHEMAS[name]}
    text = grammar(parser, schema, strict=strict)
    rng = random.Random(f"{parser} {name}")
    complete = 0
    for _ in range(12):
        if (answer := random_answer(grammars, text, rng)) is not None:
            jsonschema.validate(arguments_of(parser, answer, schema), schema)
            complete += 1
    assert complete


def test_texts_of_an_enumeration_have_no_quotes(grammars: Grammars) -> None:
    text = grammar("qwen3_coder", SCHEMAS["optional"])
    assert allows(grammars, text, xml(city="Oslo"))
    assert allows(grammars, text, xml(city="null"))
    assert not allows(grammars, text, xml(city='"Oslo"'))
    assert not allows(grammars, text, xml(city="Paris"))
    assert arguments_of("qwen3_coder", xml(city="null"), SCHEMAS["optional"]) == {"city": None}


def test_a_text_is_not_read_as_a_list_that_is_not_valid(grammars: Grammars) -> None:
    text = grammar("qwen3_coder", SCHEMAS["text or cities"])
    for written in ('["Oslo", "Rome"]', "[]", "null", "a [b]", "{}", "7"):
        assert allows(grammars, text, xml(city=written)), written
    for written in ('["Paris"]', "[1", " [", "\n['Paris']"):
        assert not allows(grammars, text, xml(city=written)), written


def test_each_text_of_an_enumeration_can_be_written(grammars: Grammars) -> None:
    text = grammar("qwen3_coder", SCHEMAS["texts of several lines"])
    assert all(allows(grammars, text, xml(city=written)) for written in ("a", "a\nb", "a\nb\nc", "1"))
    assert not allows(grammars, text, xml(city="a\n"))


def test_each_way_to_call_a_tool_can_be_written(grammars: Grammars) -> None:
    text = grammar("qwen3_coder", SCHEMAS["any of at the top"])
    assert allows(grammars, text, xml(city="Oslo", count="3"))
    assert allows(grammars, text, xml(kind="far", city="Lima"))
    assert not allows(grammars, text, xml(kind="far", city="Oslo"))
    assert not allows(grammars, text, xml(city="Lima", count="3"))


def test_values_that_the_scanner_would_read_otherwise_are_not_written(grammars: Grammars) -> None:
    schema = city({"enum": ["1", "null", "x", 2, None]})
    text = grammar("qwen3_coder", schema)
    for written, value in (("x", "x"), ("2", 2), ("null", None)):
        assert allows(grammars, text, xml(city=written))
        assert arguments_of("qwen3_coder", xml(city=written), schema) == {"city": value}
    assert not allows(grammars, text, xml(city="1"))


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (city({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1}]}), "#/properties/city"),
        (city({"anyOf": [{"type": "string"}, {"const": True}]}), "#/properties/city"),
        (city({"enum": ["a\n</parameter>\n</function>"]}), "#/properties/city"),
        ({"patternProperties": {"^x": {"type": "integer"}}}, "#/patternProperties"),
        ({"properties": {"a": {}}, "additionalProperties": False, "minProperties": 1}, "#/minProperties"),
        ({"const": {"a": 1}}, "#"),
    ],
)
def test_a_strict_tool_that_cannot_be_enforced_is_refused_with_the_place(
    grammars: Grammars, schema: dict[str, Any], path: str
) -> None:
    with pytest.raises(GrammarError) as error:
        grammar("qwen3_coder", schema)
    assert error.value.code == "unsupported_schema"
    assert error.value.path == path
    assert error.value.message.startswith(f"f: {path}: ")
    grammars.matcher(grammar("qwen3_coder", schema, strict=False))


def test_a_choice_may_contain_the_tag_that_ends_a_value(grammars: Grammars) -> None:
    schema = city({"enum": ["a", "a\n</parameter>\nb"]})
    for value in ("a", "a\n</parameter>\nb"):
        assert allows(grammars, grammar("qwen3_coder", schema), xml(city=value))
        assert arguments_of("qwen3_coder", xml(city=value), schema) == {"city": value}


NAMES: Final = ("user-id", "$filter", "@type", "a.b", "api version", "", "a=1")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strict", [True, False])
def test_keywords_that_are_no_names_are_refused_where_calls_are_promised(name: str, strict: bool) -> None:
    schema = {"properties": {"b": {"type": "integer"}, name: {"type": "integer"}}, "required": [name]}
    with pytest.raises(GrammarError) as error:
        grammar("pythonic", schema, strict=strict, must_call=not strict)
    assert error.value.code == "unsupported_schema"
    assert error.value.message.startswith("f: #/properties/")
    assert repr(name) in error.value.message


@pytest.mark.parametrize("name", NAMES)
def test_keywords_that_are_no_names_are_left_out_where_calls_are_free(grammars: Grammars, name: str) -> None:
    schema = {"properties": {"b": {"type": "integer"}, name: {"type": "integer"}}, "required": [name]}
    text = grammar("pythonic", schema, strict=False, must_call=False)
    assert allows(grammars, text, "[f(b=1)]")
    assert arguments_of("pythonic", "[f(b=1)]", schema) == {"b": 1}
    assert not allows(grammars, text, f"[f(b=1, {name}=1)]")


@pytest.mark.parametrize("name", ["user_id", "from", "größe", "_", "2fa"])
def test_every_other_keyword_is_read_as_it_is_written(grammars: Grammars, name: str) -> None:
    schema = {"properties": {name: {"type": "integer"}}, "required": [name], "additionalProperties": False}
    assert allows(grammars, grammar("pythonic", schema), f"[f({name}=1)]")
    assert arguments_of("pythonic", f"[f({name}=1)]", schema) == {name: 1}


@pytest.mark.parametrize("name", ["user-id", "$filter", "a.b", "api version", "größe"])
def test_names_in_tags_may_be_almost_any_text(grammars: Grammars, name: str) -> None:
    schema = {"properties": {name: {"type": "integer"}}, "required": [name], "additionalProperties": False}
    assert allows(grammars, grammar("qwen3_coder", schema), xml(**{name: "1"}))
    assert arguments_of("qwen3_coder", xml(**{name: "1"}), schema) == {name: 1}


@pytest.mark.parametrize("name", ["a>b", "<a", " a", "a\n", ""])
def test_names_that_tags_cannot_have_are_refused(name: str) -> None:
    schema = {"properties": {name: {"type": "integer"}}, "required": [name], "additionalProperties": False}
    for strict in (True, False):
        with pytest.raises(GrammarError, match="cannot write a parameter"):
            grammar("qwen3_coder", schema, strict=strict)


@pytest.mark.parametrize("parser", ["qwen3_coder", "pythonic"])
def test_schemas_with_too_many_alternatives_are_refused_or_left_out(grammars: Grammars, parser: ToolCallParser) -> None:
    doubled = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 9} for i in range(9)}
    many = {"$ref": "#/$defs/d0", "$defs": doubled | {"d9": {"type": "object", "properties": {"a": {}}}}}
    values = [f"value{i}" for i in range(5_000)]
    large = {
        "properties": {f"p{i}": {"$ref": "#/$defs/values"} for i in range(1_000)},
        "$defs": {"values": {"enum": values}},
    }
    for schema in (many, large):
        with pytest.raises(GrammarError) as error:
            grammar(parser, schema)
        assert error.value.code == "grammar_too_complex"
        assert error.value.message.startswith("f: #")
        grammars.matcher(grammar(parser, schema, strict=False))


@pytest.mark.parametrize("count", [300, 1_000])
def test_not_more_parameters_are_checked_than_takes_a_second(grammars: Grammars, count: int) -> None:
    types = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    limited = [{"allOf": [types, {"anyOf": [{"enum": ["x"]}, {"minimum": i}]}]} for i in range(count)]
    schema = {"properties": {f"p{i}": value for i, value in enumerate(limited)}}
    grammars.matcher(grammar("pythonic", schema, strict=False))
    if count > 400:
        with pytest.raises(GrammarError, match="more than 400 parameters"):
            grammar("pythonic", schema)
    else:
        grammars.matcher(grammar("pythonic", schema))
