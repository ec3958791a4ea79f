"""Check that engines can apply the constraint of a request, before it is sent to one."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation.request import GenerationRequest
from minisgl.grammar.errors import GrammarError
from minisgl.grammar.validate import validate
from minisgl.wire.text import StructuredOutput

_KEPT: Final = 4096
_THREADS: Final = 2


class ConstraintCheck:
    """Remembers constraints that were checked: programs send the same few again and again."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, GrammarError | None] = OrderedDict()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="constraint")

    async def check(self, request: GenerationRequest) -> None:
        """Check a request's constraint on a thread, since that takes up to a second. Raises ApiError."""
        constraint = request.structured_output
        if constraint is None:
            return
        key = _key(constraint)
        if key in self._known:
            self._known.move_to_end(key)
            problem = self._known[key]
        else:
            problem = await asyncio.get_running_loop().run_in_executor(self._threads, _problem, constraint)
            self._known[key] = problem
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        if problem is not None:
            field = request.structured_output_field
            raise ApiError.from_code(problem.code, f"{field}: {problem.message}", field)


def _problem(constraint: StructuredOutput) -> GrammarError | None:
    try:
        validate(constraint)
    except GrammarError as error:
        return error
    return None


def _key(constraint: StructuredOutput) -> bytes:
    text = f"{constraint.kind} {constraint.compact} {constraint.value}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
