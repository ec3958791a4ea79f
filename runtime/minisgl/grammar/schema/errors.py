"""Refusals of schemas, with the place in the schema."""

from __future__ import annotations

from typing import Final

from minisgl.errors import GrammarError

_MAX_STEP: Final = 100
_MAX_POINTER: Final = 400

Path = tuple[str | int, ...]


def pointer(path: Path) -> str:
    """Return a JSON pointer to a place in a schema, such as `#/properties/a`."""
    steps = (str(step).replace("~", "~0").replace("/", "~1") for step in path)
    full = "#" + "".join(f"/{step if len(step) <= _MAX_STEP else step[:_MAX_STEP] + '…'}" for step in steps)
    return full if len(full) <= _MAX_POINTER else full[:_MAX_POINTER] + "…"


def unsupported(path: Path, problem: str) -> GrammarError:
    where = pointer(path)
    return GrammarError("unsupported_schema", f"{where}: {problem}", where)


def too_complex(path: Path, problem: str) -> GrammarError:
    where = pointer(path)
    return GrammarError("grammar_too_complex", f"{where}: {problem}", where)
