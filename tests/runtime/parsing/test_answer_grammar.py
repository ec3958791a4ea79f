"""Grammars of answers: what they allow is what the scanner understands, in each format."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

import jsonschema
import numpy as np
import pytest

from minisgl.grammar.grammars import Grammars
from minisgl.grammar.matcher import Matcher
from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.answer_grammar import answer_grammar
from minisgl.parsing.call_rules import CallableTool
from minisgl.parsing.detect import find_formats
from minisgl.parsing.names import Parsers, ToolCallParser
from minisgl.parsing.reasoning import ReasoningState
from minisgl.tokenizer.token_bytes import TokenBytes, added_tokens
from minisgl.wire.text import StructuredOutput
from support.parsing.replay import Result, replay
from support.tiny_tokenizers import byte_level, write_directory

ADDED: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")
TOKENIZER: Final = byte_level(added=ADDED)
TABLE: Final = TokenBytes(TOKENIZER)
EOS: Final = TOKENIZER.token_to_id("<|im_end|>")
PARSERS: Final[tuple[ToolCallParser, ...]] = ("hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral")

SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99},
        "city": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["C", "F"]},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["id"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"far": {"type": "boolean"}},
            "required": ["far"],
            "additionalProperties": False,
        }
    },
}
TOOLS: Final = (
    CallableTool("weather", SCHEMA, True),
    CallableTool("now", {"type": "object", "properties": {}, "additionalProperties": False}, False),
)
CITY: Final = StructuredOutput(
    "json",
    '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],'
    ' "additionalProperties": false}',
)
EXAMPLES: Final[dict[str, tuple[str, str, str]]] = {
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"id": 1, "unit": "C"}}\n</tool_call>',
        "\n",
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=id>\n1\n</parameter>\n<parameter=city>\na\n<b>\n</parameter>\n"
        '<parameter=place>\n{"far": true}\n</parameter>\n</function>\n</tool_call>',
        "\n",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "llama3_json": ('{"name": "weather", "parameters": {"id": 1}}', "; ", '{"name": "now", "parameters": {}}'),
    "pythonic": ('[weather(id=1, place={"far": true})', ", ", "now()]"),
    "mistral": ('[TOOL_CALLS]weather[ARGS]{"id": 1}', "", "[TOOL_CALLS]now[ARGS]{}"),
}

every_parser = pytest.mark.parametrize("parser", PARSERS)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    directory = write_directory(tmp_path_factory.mktemp("tokenizer"), TOKENIZER)
    return Grammars(directory, TOKENIZER.get_vocab_size(), [EOS])


def formats(parser: ToolCallParser, has_tokens: bool = True) -> AnswerFormat:
    added = added_tokens(TOKENIZER) if has_tokens else {}
    return find_formats(Parsers(tool_calls=parser, reasoning="qwen3"), None, added)


def allows(matcher: Matcher, text: str) -> bool:
    """Return whether a text is a whole answer."""
    matcher = matcher.copy()
    return all(matcher.consume(token) for token in TOKENIZER.encode(text).ids) and matcher.can_end


def one_and_both(parser: str) -> tuple[str, str]:
    first, between, second = EXAMPLES[parser]
    return first + ("]" if parser == "pythonic" else ""), first + between + second


@every_parser
def test_a_required_call_is_the_whole_answer(grammars: Grammars, parser: ToolCallParser) -> None:
    one, both = one_and_both(parser)
    matcher = grammars.matcher(answer_grammar(formats(parser), ReasoningState.BEHIND, tools=TOOLS, must_call=True))
    assert allows(matcher, one)
    assert allows(matcher, both)
    assert not allows(matcher, "")
    assert not allows(matcher, "Yes")
    assert not allows(matcher, f"Yes {one}")
    assert not allows(matcher, one[:-1])
    assert not allows(matcher, one.replace("weather", "other"))
    assert not allows(matcher, one.replace("1", '"x"'))


@every_parser
@pytest.mark.parametrize("required", [(), (0, 2), (499,)])
def test_grammars_grow_linearly_with_parameters_and_their_definitions(
    grammars: Grammars, parser: ToolCallParser, required: tuple[int, ...]
) -> None:
    large = {"type": "object", "properties": {f"name{i}": {"type": "integer"} for i in range(500)}}
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"$ref": "#/$defs/large"} for i in range(500)},
        "required": [f"p{i}" for i in required],
        "$defs": {"large": large},
    }
    text = answer_grammar(
        formats(parser), ReasoningState.BEHIND, tools=[CallableTool("f", schema, False)], must_call=True
    )
    assert len(text) < 200_000
    if parser == "pythonic":
        matcher = grammars.matcher(text)
        values = sorted({*required, 3, 7})
        assert allows(matcher, f"[f({', '.join(f'p{i}={{}}' for i in values)})]")
        assert allows(matcher, "[f()]") == (not required)
        assert not allows(matcher, f"[f({', '.join(f'p{i}={{}}' for i in reversed(values))})]")


@every_parser
def test_calls_that_are_not_parallel_are_one(grammars: Grammars, parser: ToolCallParser) -> None:
    one, both = one_and_both(parser)
    text = answer_grammar(formats(parser), ReasoningState.BEHIND, tools=TOOLS, parallel=False, must_call=True)
    matcher = grammars.matcher(text)
    assert allows(matcher, one)
    assert not allows(matcher, both)


@every_parser
def test_text_is_free_and_calls_are_not(grammars: Grammars, parser: ToolCallParser) -> None:
    one, both = one_and_both(parser)
    matcher = grammars.matcher(answer_grammar(formats(parser), ReasoningState.BEHIND, tools=TOOLS))
    for text in ("", "Yes", "a < b { [ (", "\n\n", one, both):
        assert allows(matcher, text), text
    assert not allows(matcher, one.replace("1", '"x"'))
    if parser in ("hermes", "qwen3_coder", "mistral"):
        assert allows(matcher, f"Yes\n{both}")
        assert not allows(matcher, "Yes\n" + one.replace("1", '"x"'))
    else:
        # Nothing marks them, so they are only allowed at the beginning, where they can be told from text.
        assert not allows(matcher, f"Yes\n{one}")


@every_parser
def test_a_schema_constrains_the_text_beside_calls(grammars: Grammars, parser: ToolCallParser) -> None:
    one, _ = one_and_both(parser)
    matcher = grammars.matcher(answer_grammar(formats(parser), ReasoningState.BEHIND, tools=TOOLS, constraint=CITY))
    assert allows(matcher, '{"city": "x"}')
    assert allows(matcher, "<|python_tag|>" + one if parser == "llama3_json" else one)
    assert not allows(matcher, "Yes")
    assert not allows(matcher, '{"city": 1}')


def test_a_required_call_has_nothing_to_do_with_the_schema_of_texts(grammars: Grammars) -> None:
    text = answer_grammar(formats("hermes"), ReasoningState.BEHIND, tools=TOOLS, must_call=True, constraint=CITY)
    assert not allows(grammars.matcher(text), '{"city": "x"}')


def test_objects_that_nothing_tells_from_calls_are_only_text(grammars: Grammars) -> None:
    answers = formats("llama3_json", has_tokens=False)
    matcher = grammars.matcher(answer_grammar(answers, ReasoningState.BEHIND, tools=TOOLS, constraint=CITY))
    assert allows(matcher, '{"city": "x"}')
    assert not allows(matcher, EXAMPLES["llama3_json"][0])


@every_parser
def test_line_breaks_behind_reasoning_are_allowed(grammars: Grammars, parser: ToolCallParser) -> None:
    one, _ = one_and_both(parser)
    for state in (ReasoningState.WITHIN, ReasoningState.BEFORE):
        matcher = grammars.matcher(answer_grammar(formats(parser), state, tools=TOOLS, must_call=True))
        assert allows(matcher, one)
        assert allows(matcher, "\n\n" + one)


@every_parser
def test_calls_behind_reasoning_and_line_breaks_are_calls(grammars: Grammars, parser: ToolCallParser) -> None:
    one, both = one_and_both(parser)
    for state in (ReasoningState.BEFORE, ReasoningState.WITHIN):
        matcher = grammars.matcher(answer_grammar(formats(parser), state, tools=TOOLS))
        assert allows(matcher, f"\n\n{one}")
        assert allows(matcher, f"\n\n{both}")
        assert allows(matcher, "\n\nYes")
        assert not allows(matcher, f"\n\n{one}".replace("1", '"x"'))


@pytest.mark.parametrize("constraint", [CITY, StructuredOutput("regex", "[0-9]+")])
def test_a_constraint_begins_behind_the_reasoning(grammars: Grammars, constraint: StructuredOutput) -> None:
    valid = '{"city": "x"}' if constraint is CITY else "12"
    matcher = grammars.matcher(answer_grammar(formats("hermes"), ReasoningState.WITHIN, constraint=constraint))
    assert allows(matcher, valid)
    assert allows(matcher, "\n\n" + valid)
    matcher = grammars.matcher(answer_grammar(formats("hermes"), ReasoningState.BEHIND, constraint=constraint))
    assert not allows(matcher, "\n\n" + valid)


def test_reasoning_that_text_marks_is_part_of_the_grammar(grammars: Grammars, tmp_path: Path) -> None:
    """Letters of a marker are no token here, so the vocabulary must not have it as one."""
    tokenizer = byte_level(added=())
    grammars = Grammars(write_directory(tmp_path, tokenizer), tokenizer.get_vocab_size(), [EOS])
    answers = find_formats(Parsers(tool_calls="hermes", reasoning="qwen3"), None, added_tokens(tokenizer))
    call = EXAMPLES["hermes"][0]

    def allowed(state: ReasoningState, text: str, **options: Any) -> bool:
        matcher = grammars.matcher(answer_grammar(answers, state, **options))
        return all(matcher.consume(token) for token in tokenizer.encode(text).ids) and matcher.can_end

    for state, opened in ((ReasoningState.BEFORE, "<think>"), (ReasoningState.WITHIN, "")):
        assert allowed(state, f'{opened}Hm {{ [.</think>\n\n{{"city": "x"}}', constraint=CITY)
        assert allowed(state, f"{opened}Hm.</think>{call}", tools=TOOLS, must_call=True)
        assert not allowed(state, f"{opened}Hm.</think>Yes", tools=TOOLS, must_call=True)
    assert allowed(ReasoningState.BEFORE, call, tools=TOOLS, must_call=True)
    assert not allowed(ReasoningState.BEHIND, f"<think>Hm.</think>{call}", tools=TOOLS, must_call=True)
    # The same for calls whose marker is text.
    assert allowed(ReasoningState.BEHIND, f"Yes {call}", tools=TOOLS)
    assert allowed(ReasoningState.BEHIND, "Yes", tools=TOOLS)
    assert not allowed(ReasoningState.BEHIND, "Yes <tool_call>no", tools=TOOLS)


@every_parser
def test_tools_without_listed_parameters_take_any(grammars: Grammars, parser: ToolCallParser) -> None:
    tools = (CallableTool("any", {"type": "object"}, False),)
    matcher = grammars.matcher(answer_grammar(formats(parser), ReasoningState.BEHIND, tools=tools, must_call=True))
    examples = {
        "hermes": '<tool_call>\n{"name": "any", "arguments": {"a": 1}}\n</tool_call>',
        "qwen3_coder": "<tool_call>\n<function=any>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "llama3_json": '{"name": "any", "parameters": {"a": 1}}',
        "pythonic": "[any(a=1, b=[2])]",
        "mistral": '[TOOL_CALLS]any[ARGS]{"a": 1}',
    }
    assert allows(matcher, examples[parser])


def test_the_older_format_of_mistral_is_a_list(grammars: Grammars) -> None:
    added = {text: token for text, token in added_tokens(TOKENIZER).items() if text != "[ARGS]"}
    answers = find_formats(Parsers(tool_calls="mistral"), None, added)
    matcher = grammars.matcher(answer_grammar(answers, ReasoningState.BEHIND, tools=TOOLS, must_call=True))
    one = '{"name": "weather", "arguments": {"id": 1}}'
    assert allows(matcher, f"[TOOL_CALLS][{one}]")
    assert allows(matcher, f"[TOOL_CALLS][{one}, {one}]")


@every_parser
@pytest.mark.parametrize("seed", range(15))
def test_random_answers_of_the_grammar_are_valid_calls(grammars: Grammars, parser: ToolCallParser, seed: int) -> None:
    """A model that knows nothing but the grammar: each token is any one that the mask allows."""
    rng = random.Random(f"{parser} {seed}")
    answers = formats(parser)
    matcher = grammars.matcher(answer_grammar(answers, ReasoningState.BEHIND, tools=TOOLS, must_call=True))
    mask = np.zeros((1, grammars.mask_words), np.int32)
    pieces: list[str] = []
    ahead: list[int] = []
    """Tokens that are generated next."""
    while True:
        assert len(pieces) < 2000
        matcher.fill_mask(mask[0])
        allowed = [int(token) for token in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]
        if not ahead:
            # Texts and lists of calls end some time.
            ends = parser == "qwen3_coder" and len(allowed) > 200 and rng.random() < 0.1
            closing = [token for token in allowed if TABLE.name(token).strip() in _CLOSING]
            closes = closing and (len(pieces) > 200 or rng.random() < 0.5)
            ahead = XML_END if ends else [rng.choice(closing if closes else allowed)]
        token, *ahead = ahead
        if token == EOS:
            break
        assert matcher.consume(token)
        pieces.append(TABLE.name(token).decode("latin-1"))
    found = replay(answers, _text(pieces), ReasoningState.BEHIND, {tool.name: tool.schema for tool in TOOLS})
    check_valid(found)


_CLOSING: Final = (b'"', b"}", b")", b"]", b"<|im_end|>", b"</tool_call>")
XML_END: Final = TOKENIZER.encode("\n</parameter>\n").ids


def _text(pieces: list[str]) -> list[str]:
    """Decode pieces of bytes, except markers."""
    joined: list[str] = []
    for piece in pieces:
        if piece in ADDED or not joined or joined[-1] in ADDED:
            joined.append(piece)
        else:
            joined[-1] += piece
    return [piece if piece in ADDED else piece.encode("latin-1").decode("utf-8", "replace") for piece in joined]


def check_valid(found: Result) -> None:
    """Check names and arguments of calls against the tools."""
    assert found.calls and not found.text
    schemas = {tool.name: tool.schema for tool in TOOLS}
    for name, arguments in found.calls:
        schema = dict(schemas[name])
        decoded = json.loads(arguments)
        if isinstance(decoded.get("city"), str):
            # A format without quotes cannot limit a text.
            schema["properties"] = {**SCHEMA["properties"], "city": {"type": "string"}}
        jsonschema.validate(decoded, schema)
