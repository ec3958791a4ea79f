"""Check of constraints without a tokenizer, before anything is queued."""

from __future__ import annotations

from typing import Final

from minisgl.errors import GrammarError
from minisgl.grammar import lark
from minisgl.grammar.build import build, decode_schema
from minisgl.grammar.dead_ends import can_be_empty, dead_end
from minisgl.grammar.ebnf import to_lark
from minisgl.grammar.library import NOTHING_ALLOWED, matches_nothing, problem_of
from minisgl.grammar.limits import MAX_TEXT, code_of
from minisgl.grammar.schema.exact import exact
from minisgl.grammar.schema.locate import locate
from minisgl.grammar.schema.plain import is_plain
from minisgl.grammar.schema.reader import Schema
from minisgl.grammar.schema.refusals import pointer
from minisgl.grammar.structural_tag import Grammar, parts
from minisgl.wire.text import StructuredOutput

_MAX_CHECKS: Final = 64
"""Parts of a structural tag, at about a millisecond each."""
_IN_PLAIN_WORDS: Final = {
    "oneOf constraints": "a value may be valid under several of the schemas in oneOf; give them different types or "
    "a property with different constants, or use anyOf",
    "min/maxProperties": "minProperties and maxProperties are only supported where all properties are required",
    "Unsatisfiable schema": "no value is valid",
    NOTHING_ALLOWED: "no value is valid",
    "Unable to determine": "the pattern and the limits of the length are too complex together",
}


def validate(constraint: StructuredOutput) -> None:
    """Check a constraint, which takes up to a second. Raises GrammarError for one that no engine could apply."""
    if len(constraint.value) > MAX_TEXT[constraint.kind]:
        raise GrammarError("grammar_too_complex", f"more than {MAX_TEXT[constraint.kind]} characters are not supported")
    if constraint.kind == "json":
        validate_schema(decode_schema(constraint.value))
    else:
        problem = problem_of(build(constraint))
        if problem:
            raise GrammarError(code_of(problem, "invalid_grammar"), problem)
        if constraint.kind == "grammar":
            _check_dead_ends(constraint.value, "")
        elif constraint.kind == "structural_tag":
            _check_parts(constraint.value)


def _check_dead_ends(grammar: str, where: str) -> None:
    if part := dead_end(to_lark(grammar)):
        message = f"an answer can come to {part!r}, which matches nothing or never ends"
        raise GrammarError("invalid_grammar", f"{where}: {message}" if where else message, where)


def _check_parts(definition: str) -> None:
    """Refuse regular expressions and grammars of a structural tag that match nothing."""
    checks = 0
    for path, part in parts(definition):
        where = pointer(path)
        if isinstance(part, Grammar):
            _check_dead_ends(part.grammar, where)
            text = to_lark(part.grammar)
        else:
            text = f"start: {lark.regex(part.pattern)}"
            if not can_be_empty(text):
                continue
        checks += 1
        if checks <= _MAX_CHECKS and matches_nothing(text):
            raise GrammarError("invalid_grammar", f"{where}: no text matches", where)


def validate_schema(schema: Schema) -> None:
    """Check a JSON schema. Raises GrammarError, with the path of the schema or keyword that is refused."""
    read = exact(schema)
    problem = "" if is_plain(read.schema) else _schema_problem(read.schema)
    if problem:
        path, reason = locate(read, schema, _schema_problem, problem)
        words = next((words for start, words in _IN_PLAIN_WORDS.items() if reason.startswith(start)), None)
        if reason.startswith("Unsatisfiable schema: "):
            words = f"{words}: {reason.partition(': ')[2]}"
        where = pointer(path)
        raise GrammarError(code_of(reason, "unsupported_schema"), f"{where}: {words or reason}", where)


def _schema_problem(schema: Schema) -> str:
    return problem_of(lark.grammar(f"start: {lark.exact_json(schema)}"))
