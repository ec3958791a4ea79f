"""Limits that keep the time and the stack of one compilation bounded, and refusals of schemas, with the place."""

from __future__ import annotations

from typing import Final

from minisgl.errors import GrammarError

MAX_BYTES: Final = 256 << 10
"""Size of a schema without annotations and unused definitions, as JSON text."""
MAX_NODES: Final = 20_000
"""Schemas within a schema."""
MAX_DEPTH: Final = 64
"""Schemas that one schema is nested in, not counting references."""
MAX_LEVELS: Final = 2_000
"""Sum of the depths of a schema and of all definitions that it uses: the library follows references by recursion."""
MAX_PATTERN: Final = 8 << 10
MAX_PATTERN_PROPERTIES: Final = 16
MAX_PROPERTIES: Final = 1_000
"""Of one object."""
MAX_OPTIONAL: Final = 4_000
"""Optional properties that may come next at one place of an answer. For 2,000 a mask takes 0.05 s, for 4,000 0.2 s."""
MAX_DIVISOR: Final = 50_000
"""Digits of `multipleOf`, without the point and zeros at the end."""
MAX_ENUM: Final = 10_000
MAX_LENGTH: Final = 1 << 20
"""Limit of minLength, maxItems and the like; a larger maximum is no limit to an answer."""
EXACT_INTEGER: Final = 2**53
"""Larger integers are not exact as the floating-point numbers that the library computes with."""


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
