"""Grammar texts in llguidance's variant of Lark: expressions of rules, and whole grammars.

An expression stands on the right side of a rule. The rule `start` of a grammar's own rules is what an answer matches.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

import msgspec
from llguidance import regex_to_lark

from minisgl.grammar.schema.exact import exact
from minisgl.grammar.schema.patterns import translate
from minisgl.grammar.schema.reader import Schema
from minisgl.grammar.schema.values import ESCAPES

ANY_TEXT: Final = "/(?s:.*)/"
"""Any text without special tokens, also none."""

TOKEN_IDS: Final = "<["
"""Beginning of an expression for token ids, and of nothing else outside of texts."""

WHITESPACE: Final = r"[ \t]{0,2}(\r?\n[ \t]{0,32})?"
"""Whitespace at each place in a JSON text where it is allowed: as people indent, and bounded, since a model that
repeats whitespace would otherwise never come to an end."""

_JSON_OPTIONS: Final = {"coerce_one_of": False, "lenient": False, "json_allowed_escapes": ESCAPES}
"""`\\uXXXX` is not allowed: a key that is written in two ways would be two keys to the grammar."""
_OPTIONS: Final = '%llguidance {"no_forcing": true}\n'
"""Without this, a text in a grammar that spells a special token would only match that token, which has no text."""


class Fragment(NamedTuple):
    """An expression, and the grammars that it refers to by name."""

    expression: str
    grammars: tuple[tuple[str, str], ...] = ()
    """Names and rules."""


def literal(text: str) -> str:
    """Return an expression for a text. Empty texts match nothing more than an empty text."""
    return json.dumps(text)


def special_token(token_id: int) -> str:
    """Return an expression for a special token; a text never matches one, even where the text is its name."""
    return f"{TOKEN_IDS}{token_id}]>"


def json_schema(schema: Schema, *, compact: bool = False) -> str:
    """Return an expression for a JSON text that is valid under a user's schema. `compact`: without whitespace. Raises
    GrammarError."""
    return exact_json(exact(schema).schema, compact=compact)


def exact_json(schema: Schema, *, compact: bool = False) -> str:
    """Return the same for a schema that `exact` has returned."""
    if isinstance(schema, bool):
        schema = {} if schema else {"anyOf": []}
    options = _JSON_OPTIONS | {"whitespace_pattern": "" if compact else WHITESPACE}
    return "%json " + msgspec.json.encode({**schema, "x-guidance": options}).decode()


def regex(pattern: str) -> str:
    """Return an expression for a text that matches a whole regular expression. Raises GrammarError."""
    escaped = regex_to_lark(translate(pattern, of_schema=False), "")
    return f"/{escaped}/" if escaped else '""'


def one_of(expressions: list[str]) -> str:
    """Return an expression for any one of at least one expression."""
    return "(" + " | ".join(expressions) + ")"


def grammar(rules: str, *fragments: Fragment) -> str:
    """Return the text of a grammar, for `Submit.grammar`. `rules` contain the rule `start`, and may use the expressions
    of fragments."""
    named = dict(named for fragment in fragments for named in fragment.grammars)
    assert len(named) == len({name for fragment in fragments for name, _ in fragment.grammars})
    grammars = [{"name": "answer_text", "lark_grammar": _OPTIONS + rules}]
    grammars += [{"name": name, "lark_grammar": text} for name, text in named.items()]
    return msgspec.json.encode({"grammars": grammars}).decode()
