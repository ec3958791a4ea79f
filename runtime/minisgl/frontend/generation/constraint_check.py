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
from minisgl.frontend.server.admission import Admission
from minisgl.grammar.errors import GrammarError
from minisgl.grammar.validate import validate
from minisgl.wire.text import StructuredOutput, ToolOptions

_KEPT: Final = 4096
_THREADS: Final = 2
_SECONDS: Final = 1.0


class _Check(NamedTuple):
    field: str
    constraint: StructuredOutput
    key: bytes


class ConstraintCheck:
    """Remembers constraints that were checked: programs send the same few again and again."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._known: OrderedDict[bytes, GrammarError | None] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="constraint")

    async def check(self, request: GenerationRequest) -> None:
        """Check a request's constraint and the schemas of its strict tools on a thread, which takes up to a second,
        behind those of a limited number of other requests. Raises ApiError."""
        checks = list(_checks(request))
        problems = self._remembered(checks)
        if problems is None:
            with self._admission.checking():
                problems = await asyncio.get_running_loop().run_in_executor(self._threads, self._run, checks)
        for check, problem in zip(checks, problems, strict=False):
            if problem is not None:
                raise ApiError.from_code(problem.code, f"{check.field}: {problem.message}", check.field)

    def _remembered(self, checks: list[_Check]) -> list[GrammarError | None] | None:
        """Return the problem of each constraint; None if one of them was not checked."""
        with self._lock:
            if not all(check.key in self._known for check in checks):
                return None
            for check in checks:
                self._known.move_to_end(check.key)
            return [self._known[check.key] for check in checks]

    def _run(self, checks: list[_Check]) -> list[GrammarError | None]:
        """Return the problem of each constraint, up to the first one that has any."""
        until = time.monotonic() + _SECONDS
        problems: list[GrammarError | None] = []
        for check in checks:
            problem = self._problem(check)
            if problem is None and time.monotonic() > until:
                problem = GrammarError("grammar_too_complex", "the constraint takes too long to check; simplify it")
            problems.append(problem)
            if problem is not None:
                break
        return problems

    def _problem(self, check: _Check) -> GrammarError | None:
        if (remembered := self._remembered([check])) is not None:
            return remembered[0]
        problem: GrammarError | None = None
        try:
            validate(check.constraint)
        except GrammarError as error:
            problem = error
        with self._lock:
            self._known[check.key] = problem
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return problem


def _checks(request: GenerationRequest) -> Iterator[_Check]:
    if request.structured_output is not None:
        yield _check(request.structured_output_field, request.structured_output)
    if request.tools is not None and request.tools.choice != "none":
        yield from _tool_checks(request.tools, request.tool_fields)


def _tool_checks(tools: ToolOptions, fields: tuple[str, ...]) -> Iterator[_Check]:
    for i, definition in enumerate(tools.definitions):
        function = definition["function"]
        if function.get("strict"):
            schema = msgspec.json.encode(function.get("parameters", {})).decode()
            yield _check(fields[i] if fields else f"tools[{i}].function.parameters", StructuredOutput("json", schema))


def _check(field: str, constraint: StructuredOutput) -> _Check:
    text = f"{constraint.kind} {constraint.compact} {constraint.value}"
    key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return _Check(field, constraint, key)
