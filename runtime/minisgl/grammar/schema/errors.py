"""Refusals of schemas, with the place in the schema."""

from __future__ import annotations

from minisgl.grammar.errors import GrammarError

Path = tuple[str | int, ...]


def pointer(path: Path) -> str:
    """Return a JSON pointer to a place in a schema, such as `#/properties/a`."""
    return "#" + "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)


def unsupported(path: Path, problem: str) -> GrammarError:
    where = pointer(path)
    return GrammarError("unsupported_schema", f"{where}: {problem}", where)


def too_complex(path: Path, problem: str) -> GrammarError:
    where = pointer(path)
    return GrammarError("grammar_too_complex", f"{where}: {problem}", where)
