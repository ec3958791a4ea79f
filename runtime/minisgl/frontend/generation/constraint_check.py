"""Check that engines can apply the constraints of a request, before it is sent to one."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import msgspec

from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation.request import GenerationRequest
from minisgl.grammar.errors import GrammarError
from minisgl.grammar.validate import validate
from minisgl.wire.text import StructuredOutput, ToolOptions

_KEPT: Final = 4096
_THREADS: Final = 2
_SECONDS: Final = 1.0


class _Check(NamedTuple):
    field: str
    constraint: StructuredOutput


class ConstraintCheck:
    """Remembers constraints that were checked: programs send the same few again and again."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, GrammarError | None] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="constraint")

    async def check(self, request: GenerationRequest) -> None:
        """Check a request's constraint and the schemas of its strict tools on a thread, which takes up to a second.
        Raises ApiError."""
        checks = list(_checks(request))
        if checks:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._run, checks)

    def _run(self, checks: list[_Check]) -> None:
        until = time.monotonic() + _SECONDS
        for field, constraint in checks:
            problem = self._problem(constraint)
            if problem is None and time.monotonic() > until:
                problem = GrammarError("grammar_too_complex", "the constraint takes too long to check; simplify it")
            if problem is not None:
                raise ApiError.from_code(problem.code, f"{field}: {problem.message}", field)

    def _problem(self, constraint: StructuredOutput) -> GrammarError | None:
        key = _key(constraint)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        problem: GrammarError | None = None
        try:
            validate(constraint)
        except GrammarError as error:
            problem = error
        with self._lock:
            self._known[key] = problem
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return problem


def _checks(request: GenerationRequest) -> Iterator[_Check]:
    if request.structured_output is not None:
        yield _Check(request.structured_output_field, request.structured_output)
    if request.tools is not None and request.tools.choice != "none":
        yield from _tool_checks(request.tools, request.tool_fields)


def _tool_checks(tools: ToolOptions, fields: tuple[str, ...]) -> Iterator[_Check]:
    for i, definition in enumerate(tools.definitions):
        function = definition["function"]
        if function.get("strict"):
            schema = msgspec.json.encode(function.get("parameters", {})).decode()
            yield _Check(fields[i] if fields else f"tools[{i}].function.parameters", StructuredOutput("json", schema))


def _key(constraint: StructuredOutput) -> bytes:
    text = f"{constraint.kind} {constraint.compact} {constraint.value}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
