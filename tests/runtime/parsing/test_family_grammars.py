"""Grammars of calls in the formats of further families: what they allow is what the scanner reads as valid calls."""

from __future__ import annotations

import json
import random
from typing import Any, Final

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from minisgl.errors import GrammarError
from minisgl.grammar.grammars import Grammars
from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.answer_grammar import answer_grammar
from minisgl.parsing.call_rules import CallableTool
from minisgl.parsing.call_text import call_text
from minisgl.parsing.detect import find_formats
from minisgl.parsing.names import Parsers, ToolCallParser
from minisgl.parsing.reasoning import ReasoningState
from minisgl.tokenizer.token_bytes import TokenBytes, added_tokens
from support.parsing.replay import replay
from support.tiny_tokenizers import byte_level, write_directory

FORMATS: Final[tuple[ToolCallParser, ...]] = (
    *("glm45", "glm47", "minimax_m2", "seed_oss", "gemma4", "granite", "phi4_mini_json", "exaone4", "hunyuan"),
    *("hunyuan_a13b", "lfm2", "nemotron_json", "olmo3"),
)
MARKERS: Final = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>"),
    *("</minimax:tool_call>", "<seed:tool_call>", "</seed:tool_call>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<TOOLCALL>", "</TOOLCALL>"),
    *("<|tool_call|>", "<|/tool_call|>", "<tool_calls>", "</tool_calls>", "<function_calls>", "</function_calls>"),
)
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99},
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "place": {"$ref": "#/$defs/place"},
        "list": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["id"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"far": {"type": "boolean"}, "note": {"type": ["string", "null"]}},
            "required": ["far"],
            "additionalProperties": False,
        }
    },
}
TOOLS: Final = (
    CallableTool("weather", SCHEMA, True),
    CallableTool("now", {"type": "object", "properties": {}, "additionalProperties": False}, False),
)
ONE: Final[dict[str, Any]] = {"city": "a\n<b>", "id": 1, "place": {"far": True, "note": "x"}, "unit": "C"}

every_format = pytest.mark.parametrize("name", FORMATS)
vocabularies = pytest.mark.parametrize("has_tokens", [False, True], ids=["text", "tokens"])


class Vocabulary:
    """A tokenizer with the markers as tokens, or without any."""

    def __init__(self, directory: Any, added: tuple[str, ...]) -> None:
        self.tokenizer: Tokenizer = byte_level(added=added)
        self.names = TokenBytes(self.tokenizer)
        self.eos: int = added_tokens(self.tokenizer)["<|im_end|>"]
        write_directory(directory, self.tokenizer)
        self.grammars = Grammars(directory, self.tokenizer.get_vocab_size(), [self.eos])

    def formats(self, name: ToolCallParser) -> AnswerFormat:
        return find_formats(Parsers(tool_calls=name, reasoning="qwen3"), None, added_tokens(self.tokenizer))

    def allows(self, grammar: str, text: str) -> bool:
        matcher = self.grammars.matcher(grammar)
        return all(matcher.consume(token) for token in self.tokenizer.encode(text).ids) and matcher.can_end

    def random_answer(self, grammar: str, rng: random.Random) -> list[int]:
        """Return an answer of a model that knows nothing but the grammar: each token is any one that it allows."""
        matcher = self.grammars.matcher(grammar)
        mask = np.zeros((1, self.grammars.mask_words), np.int32)
        found: list[int] = []
        ahead: list[int] = []
        while len(found) < 1500:
            matcher.fill_mask(mask[0])
            allowed = [int(token) for token in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]
            if not ahead:
                closing = [token for token in allowed if self.names.name(token).strip() in CLOSING]
                closes = closing and (len(found) > 200 or rng.random() < 0.5)
                ahead = [rng.choice(closing if closes else allowed)]
                if len(allowed) > 200 and rng.random() < 0.15:
                    # A text, which only the beginning of a longer marker ends.
                    ends = [end for end in ENDS if all(map(matcher.copy().consume, self.tokenizer.encode(end).ids))]
                    ahead = self.tokenizer.encode(rng.choice(ends)).ids if ends else ahead
            token, *ahead = ahead
            if token == self.eos:
                return found
            assert matcher.consume(token)
            found.append(token)
        raise AssertionError("the answer does not come to an end")

    def pieces(self, tokens: list[int]) -> list[str]:
        """Return the texts of tokens; a marker stands alone."""
        pieces = [b""]
        for token in tokens:
            if (name := self.names.name(token)).decode("latin-1") in added_tokens(self.tokenizer):
                pieces += [name, b""]
            else:
                pieces[-1] += name
        return [piece.decode("utf-8", "replace") for piece in pieces]


CLOSING: Final = (b'"', b"}", b")", b"]", b"<|im_end|>", *(marker.encode() for marker in MARKERS if marker[1] in "/"))
ENDS: Final = (
    *("</parameter>\n<parameter=", "</parameter>\n</function>", '</parameter>\n<parameter name="'),
    *("</parameter>\n</invoke>", "</arg_value>\n<arg_key>", "</arg_value>\n</tool_call>", "</arg_value><arg_key>"),
    *("</arg_value></tool_call>", '<|"|>'),
)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Vocabulary]:
    return {
        has_tokens: Vocabulary(tmp_path_factory.mktemp("tokenizer"), MARKERS if has_tokens else ())
        for has_tokens in (False, True)
    }


@every_format
@vocabularies
def test_calls_as_templates_write_them_are_allowed_and_others_are_not(
    known: dict[bool, Vocabulary], name: ToolCallParser, has_tokens: bool
) -> None:
    vocabulary = known[has_tokens]
    answers = vocabulary.formats(name)

    def grammar(**options: Any) -> str:
        return answer_grammar(answers, ReasoningState.BEHIND, tools=TOOLS, **options)

    ordered = ONE if name == "gemma4" else {key: ONE[key] for key in SCHEMA["properties"] if key in ONE}
    one = call_text(answers, [("weather", ordered)])
    both = call_text(answers, [("weather", ordered), ("now", {})])
    required, single, free = grammar(must_call=True), grammar(must_call=True, parallel=False), grammar()
    for text in (one, both, call_text(answers, [("now", {})])):
        assert vocabulary.allows(required, text), text
        assert vocabulary.allows(free, text)
        assert vocabulary.allows(free, f"Yes\n{text}")
    assert vocabulary.allows(single, one)
    assert not vocabulary.allows(single, both)
    assert vocabulary.allows(free, "Yes")
    for wrong in ({"id": 100}, {"id": "x"}, {}, {"id": 1, "unit": "K"}, {"id": 1, "place": {}}, {"id": 1, "z": 1}):
        text = call_text(answers, [("weather", wrong)])
        assert not vocabulary.allows(required, text), text
        assert not vocabulary.allows(free, f"Yes\n{text}")
    assert not vocabulary.allows(required, call_text(answers, [("other", {})]))
    assert not vocabulary.allows(required, one[:-1])
    assert not vocabulary.allows(required, "Yes")


@every_format
@vocabularies
@pytest.mark.parametrize("seed", range(4))
def test_random_answers_of_the_grammar_are_valid_calls(
    known: dict[bool, Vocabulary], name: ToolCallParser, has_tokens: bool, seed: int
) -> None:
    vocabulary, rng = known[has_tokens], random.Random(f"{name} {has_tokens} {seed}")
    answers = vocabulary.formats(name)
    grammar = answer_grammar(answers, ReasoningState.BEHIND, tools=TOOLS, must_call=True)
    pieces = vocabulary.pieces(vocabulary.random_answer(grammar, rng))
    found = replay(answers, pieces, ReasoningState.BEHIND, {tool.name: tool.schema for tool in TOOLS})
    assert found.calls and not found.text
    for one, arguments in found.calls:
        jsonschema.validate(json.loads(arguments), {tool.name: tool.schema for tool in TOOLS}[one])


@every_format
@vocabularies
def test_tools_without_listed_parameters_take_any(
    known: dict[bool, Vocabulary], name: ToolCallParser, has_tokens: bool
) -> None:
    vocabulary = known[has_tokens]
    answers = vocabulary.formats(name)
    tools = (CallableTool("any", {"type": "object"}, False),)
    grammar = answer_grammar(answers, ReasoningState.BEHIND, tools=tools, must_call=True)
    assert vocabulary.allows(grammar, call_text(answers, [("any", {"a": 1, "b": "x", "c": [2, {"d": None}]})]))
    assert vocabulary.allows(grammar, call_text(answers, [("any", {})]))


@pytest.mark.parametrize(
    "value",
    [
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
    ],
)
def test_what_gemma_cannot_enforce_is_refused_for_strict_tools_only(value: dict[str, Any]) -> None:
    answers = find_formats(Parsers(tool_calls="gemma4"), None, {})
    schema = {"type": "object", "properties": {"a": value}}
    with pytest.raises(GrammarError, match=r"^f: .*format of calls"):
        answer_grammar(answers, ReasoningState.BEHIND, tools=[CallableTool("f", schema, True)], must_call=True)
    assert answer_grammar(answers, ReasoningState.BEHIND, tools=[CallableTool("f", schema, False)], must_call=True)


def test_recursive_schemas_end_in_gemmas_format(known: dict[bool, Vocabulary]) -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "n": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}}
    answers = known[True].formats("gemma4")
    grammar = answer_grammar(answers, ReasoningState.BEHIND, tools=[CallableTool("f", schema, False)], must_call=True)
    deep: dict[str, Any] = {"n": 1}
    for _ in range(20):
        deep = {"n": 1, "next": deep}
    assert known[True].allows(grammar, call_text(answers, [("f", {"a": deep})]))
    assert not known[True].allows(grammar, call_text(answers, [("f", {"a": {"n": "x"}})]))
