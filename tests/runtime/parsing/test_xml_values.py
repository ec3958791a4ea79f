"""Values of Qwen3-Coder's format: what a grammar allows is read as it was meant, however it is cut into pieces."""

from __future__ import annotations

import json
import random
import re
from typing import Any, Final

import pytest

from minisgl.grammar.grammars import Grammars
from minisgl.grammar.matcher import Matcher
from minisgl.parsing.answer_grammar import answer_grammar
from minisgl.parsing.call_rules import CallableTool
from minisgl.parsing.detect import find_formats
from minisgl.parsing.names import Parsers
from minisgl.parsing.reasoning import ReasoningState
from support.parsing.replay import cut, replay
from support.tiny_tokenizers import byte_level, write_directory

TOKENIZER: Final = byte_level(added=())
ANSWERS: Final = find_formats(Parsers(tool_calls="qwen3_coder"), None, {})
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "note": {"type": ["string", "null", "integer", "array"]},
        "city": {"enum": ["Oslo", "Rome"]},
        "data": {"type": "object"},
        "list": {"anyOf": [{"type": "array"}, {"type": "null"}]},
    },
    "additionalProperties": False,
}
ENDS: Final = re.compile(
    r"</parameter>\s*(<parameter=|</function>|</tool_call>\s*<tool_call>)|\n<parameter=|\n</function>\n</tool_call>"
)
FRAGMENTS: Final = (
    *("</parameter>", "\n</parameter>\n", "<parameter=city>", "\n<parameter=city>\n", "</function>", "</tool_call>"),
    *("\n</function>\n</tool_call>", "</function>\n</tool_call>", "<parameter", "</param", "<", ">", "\n", "\n\n", " "),
    *(
        "Oslo",
        "null",
        "None",
        "true",
        "12",
        "-",
        ".",
        "[",
        "]",
        "{",
        "}",
        '"',
        "\\",
        "(",
        ")",
        "+",
        "_",
        "0x1",
        "#",
        "é",
    ),
)


@pytest.fixture(scope="module")
def matcher(tmp_path_factory: pytest.TempPathFactory) -> Matcher:
    directory = write_directory(tmp_path_factory.mktemp("tokenizer"), TOKENIZER)
    end = TOKENIZER.token_to_id("<|im_end|>")
    tools = [CallableTool("f", SCHEMA, True)]
    text = answer_grammar(ANSWERS, ReasoningState.BEHIND, tools=tools, parallel=False, must_call=True)
    return Grammars(directory, TOKENIZER.get_vocab_size(), [end]).matcher(text)


def allows(matcher: Matcher, answer: str) -> bool:
    matcher = matcher.copy()
    return all(matcher.consume(token) for token in TOKENIZER.encode(answer).ids) and matcher.can_end


def written(values: dict[str, str]) -> str:
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


def read(answer: str, rng: random.Random) -> Any:
    """Return the arguments, which are the same for any pieces."""
    pieces = [[answer], [*answer], cut([answer], ANSWERS, rng), cut([answer], ANSWERS, rng)]
    (found, *others) = [replay(ANSWERS, parts, ReasoningState.BEHIND, {"f": SCHEMA}) for parts in pieces]
    assert all(other == found for other in others), answer
    ((_, arguments),) = found.calls
    assert not found.text
    return json.loads(arguments)


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(FRAGMENTS) for _ in range(rng.choice((0, 1, 2, 3, 6))))


def meant(text: str) -> Any:
    """Return the value of a text where the schema also allows null, an integer or an array."""
    if text.strip().lower() in ("null", "none"):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, list | int) and not isinstance(value, bool) else text


@pytest.mark.parametrize("seed", range(8))
def test_texts_are_read_as_they_were_meant(matcher: Matcher, seed: int) -> None:
    rng = random.Random(seed)
    allowed = 0
    for _ in range(150):
        text = random_text(rng)
        answer = written({"text": text, "city": "Rome"})
        is_free = not ENDS.search(text)
        assert allows(matcher, answer) == is_free, text
        if is_free:
            allowed += 1
            assert read(answer, rng) == {"text": text, "city": "Rome"}
    assert allowed > 50


@pytest.mark.parametrize("seed", range(8))
def test_texts_beside_other_types_are_read_the_same_in_any_pieces(matcher: Matcher, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        text = random_text(rng)
        answer = written({"note": text, "city": "Rome"})
        if allows(matcher, answer):
            value = read(answer, rng)
            assert value["city"] == "Rome"
            # Lists may also have the form of Python.
            assert value["note"] == meant(text) or isinstance(value["note"], list), text


@pytest.mark.parametrize("seed", range(8))
def test_strings_within_json_may_contain_the_syntax_of_calls(matcher: Matcher, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        data = {random_text(rng): [random_text(rng), 1], "b": {"c": random_text(rng)}}
        items = [random_text(rng), random_text(rng)]
        values = [json.dumps(value, ensure_ascii=False) for value in (data, items)]
        answer = written({"city": "Rome", "data": values[0], "list": values[1]})
        assert allows(matcher, answer)
        assert read(answer, rng) == {"city": "Rome", "data": data, "list": items}


def test_an_empty_string_may_have_no_line_of_its_own(matcher: Matcher) -> None:
    for empty in ("<parameter=text>\n</parameter>\n", "<parameter=text>\n\n</parameter>\n"):
        answer = written({"city": "Oslo"}).replace("<parameter=city>", f"{empty}<parameter=city>")
        assert allows(matcher, answer)
        assert not allows(matcher, answer.replace("Oslo", "Paris"))
        assert read(answer, random.Random(0)) == {"text": "", "city": "Oslo"}


def test_the_tag_that_ends_a_value_is_part_of_it_before_anything_else() -> None:
    for text in (
        "a</parameter>b",
        "x\n</parameter>\ny",
        "</parameter>",
        "</parameter></tool_call> x",
        "<a>\n</parameter>\n</a>",
    ):
        assert read(written({"text": text, "city": "Oslo"}), random.Random(0)) == {"text": text, "city": "Oslo"}


def test_a_string_does_not_contain_what_ends_it(matcher: Matcher) -> None:
    for text in (
        "a\n<parameter=city>\nParis",
        "a</parameter> \n<parameter=b",
        "a</parameter></function>",
        "a\n</parameter>\n</tool_call>\n<tool_call>",
        "a\n</function>\n</tool_call>",
    ):
        assert not allows(matcher, written({"text": text}))
    for text in (
        *("a <parameter=city> b", "<parameter=city>", "a\n</function>\n", "</tool_call>", "a\n"),
        *(
            "a</parameter>b",
            "</parameter>",
            "</parameter>\n\n</parameter>\n",
            "a\n</parameter>\n<parameter",
            "</parameter></fun",
        ),
        *("a</parameter>\n</tool_call>\n", "a</parameter>\n</tool_call>\n<tool_cal", '<Row key="</parameter>">'),
    ):
        assert allows(matcher, written({"text": text}))
        assert read(written({"text": text}), random.Random(0)) == {"text": text}
