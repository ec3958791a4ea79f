"""Limits of grammars, with which a compilation takes less than a second, the library's errors about them, and threads
whose stacks suffice for them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

from llguidance import LLParserLimits

from minisgl.wire.text import ConstraintKind

MAX_TEXT: Final[dict[ConstraintKind, int]] = {
    "json": 2 << 20,
    "regex": 8 << 10,
    "choice": 256 << 10,
    "grammar": 128 << 10,
    "structural_tag": 256 << 10,
}
"""Characters of a constraint. Most of a long schema is descriptions, which cost nothing; what is left of it has a limit
of its own."""

_MAX_ALTERNATIVES: Final = 20_000
"""Places in the grammar at which an answer may be at once. Each property that may come next takes three or four, each
choice one: 4,096 choices take 0.04 s to compile and 10 MB, 1,000 optional properties 0.09 s and 6 MB."""

_MAX_MASK_ALTERNATIVES: Final = 1_000_000
"""The same for all tokens of a mask together, of which each may end at another place. 2,000 optional properties
take up to 300,000 with a vocabulary of 151,000 tokens; masks at this limit take 0.2 s."""

LIMITS: Final = LLParserLimits(
    max_items_in_row=_MAX_ALTERNATIVES,
    step_max_items=_MAX_MASK_ALTERNATIVES,
    initial_lexer_fuel=400_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)


_P = ParamSpec("_P")
_T = TypeVar("_T")

THREADS: Final = 2
_STACK_BYTES: Final = 64 << 20
"""A reference costs the library 16 KiB of stack. The memory is only reserved, and used as far as the stack grows."""


class DeepThreads:
    """A pool of threads with large stacks: the library recurses deeply in native code. They end with the process."""

    def __init__(self, threads: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="grammar")
        self._starting = threading.Lock()

    def submit(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Run a function that does not itself use these threads."""
        # The pool starts threads within `submit`; the size is a setting of the process.
        with self._starting:
            before = threading.stack_size(_STACK_BYTES)
            try:
                return self._pool.submit(function, *args, **kwargs)
            finally:
                threading.stack_size(before)


deep_threads: Final = DeepThreads()


_POSITION: Final = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")
_TOO_COMPLEX: Final = re.compile(
    r"(?<!range end )too (big|large|complex|deep|many)|limit|fuel|max is|Unable to determine", re.IGNORECASE
)
_DEAD_END: Final = "NoExtension"


def first_line(message: str) -> str:
    """Return an error in one line, without its position in a grammar that nobody but us has seen."""
    return _POSITION.sub("", message.partition("\n")[0])


def code_of(problem: str, otherwise: str) -> str:
    """Return `grammar_too_complex` for a limit that was exceeded, or the other code."""
    return "grammar_too_complex" if _TOO_COMPLEX.search(problem) else otherwise


def is_dead_end(problem: str) -> bool:
    """Whether the error says that no text can follow, though the answer may not end."""
    return problem.startswith(_DEAD_END)
