"""Parts of users' grammars that match nothing: they are refused before an answer can come to them."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from minisgl.errors import GrammarError
from minisgl.grammar.build import build
from minisgl.grammar.dead_ends import dead_end
from minisgl.grammar.ebnf import to_lark
from minisgl.grammar.validate import validate
from minisgl.wire.text import StructuredOutput
from support.grammar.walk import grammars, random_answer

REFUSED = {
    'start: "x" A\nA: /a+/ & /b+/': "A",
    'start: "x" A "z" | "y"\nA: /a+/ & /b+/': "A",
    'start: "x" B\nB: A "b"\nA: /a/ & ~/[a-c]/': "B",
    'start: "x" /[^\\s\\S]/': "/[^\\s\\S]/",
    'start: "x" ("y" | /[a-z]/ (A "b"))\nA: /a/ & /b/': "A",
    'root ::= "a" x\nx ::= x "b"': "x",
    'root ::= "a" (x | y)? "b" x{2,3}\nx ::= y\ny ::= x | y "b"': "x",
    'root ::= "a" root': "start",
    'start: s "."\ns: "a" | "(" t ")"\nt: "x" t | "y" t': "t",
}
ALLOWED = [
    'start: "x" (A)? "y"\nA: /a/ & /b/',
    'start: A "z" | "y"\nA: /a/ & /b/',
    'start: "x" A* A{0,3} "y"\nA: /a/ & /b/',
    'start: "x" B\nB: (/a/ & /b/) | "b"',
    'start: "x" "y"\nunused: "a" A\nA: /a/ & /b/',
    'root ::= "[" (item ("," item)*)? "]" # list\nitem ::= [^\\]\\[",]+ | "\\"" [0-9]{1,3} "\\"" | root',
    'root ::= root "a" | "b"',
    'start: x\nx: x x | "a" | ""',
    'start: "x" j\nj: %json {"type": "integer", "minimum": 0, "maximum": 9}',
    'start: "a" t\n%ignore /[ \\t]+/\nt[lazy]: /[^b]*b/',
    'start: "a" b{2,3}\n// a comment: "x" A\nb: "c"i | c\nc: "d" [c] "e"',
]


def grammar(text: str) -> StructuredOutput:
    return StructuredOutput("grammar", text)


@pytest.mark.parametrize("text", REFUSED)
def test_a_grammar_with_a_part_that_matches_nothing_is_refused(text: str) -> None:
    with pytest.raises(GrammarError) as error:
        validate(grammar(text))
    assert error.value.code == "invalid_grammar" and repr(REFUSED[text]) in error.value.message


@pytest.mark.parametrize("text", ALLOWED)
def test_other_grammars_are_accepted_and_their_answers_end(text: str) -> None:
    validate(grammar(text))
    matcher = grammars().matcher(build(grammar(text)))
    assert any(random_answer(matcher.copy(), random.Random(seed)) is not None for seed in range(10))


@pytest.mark.parametrize(
    ("format", "path"),
    [
        (
            {
                "type": "sequence",
                "elements": [{"type": "const_string", "value": "a"}, {"type": "regex", "pattern": r"[^\s\S]"}],
            },
            "#/format/elements/1/pattern",
        ),
        (
            {
                "type": "tag",
                "begin": "<a>",
                "content": {"type": "grammar", "grammar": 'root ::= "a" x\nx ::= x "b"'},
                "end": "</a>",
            },
            "#/format/content/grammar",
        ),
        (
            {"type": "star", "content": {"type": "grammar", "grammar": "start: A\nA: /a/ & /b/"}},
            "#/format/content/grammar",
        ),
    ],
)
def test_a_part_of_a_structural_tag_that_matches_nothing_is_refused_with_its_path(format: Any, path: str) -> None:
    with pytest.raises(GrammarError) as error:
        validate(StructuredOutput("structural_tag", json.dumps({"type": "structural_tag", "format": format})))
    assert (error.value.code, error.value.path) == ("invalid_grammar", path)
    assert error.value.message.startswith(f"{path}: ")


@pytest.mark.parametrize(
    "text",
    [
        "start: r0\n" + "\n".join(f'r{i}: "a" r{(i * 7 + 1) % 4000}' for i in range(4000)) + '\nr4000: "a"',
        "start: r0\n" + "\n".join(f'r{i}: "a" r{i - 1} | "b"' for i in range(4000, 0, -1)) + '\nr0: "x" r4000',
        'start: "a" ' + " ".join(f"/[^{chr(97 + i % 26)}]{{1,{i + 1}}}/" for i in range(2000)),
        'start: "a" ' + "(" * 90 + '"b"' + ")?" * 90 + ' "c"',
        'start: "a" '
        + " | ".join(f"A{i}" for i in range(300))
        + "\n"
        + "\n".join(f"A{i}: /a.{{{i}}}/ & /b/" for i in range(300)),
    ],
)
def test_the_search_takes_less_than_a_second(text: str) -> None:
    start = time.process_time()
    dead_end(to_lark(text))
    assert time.process_time() - start < 3
