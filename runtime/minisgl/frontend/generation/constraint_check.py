"""Check that engines can apply the constraints of a request, before it is sent to one. Tokenizer workers do it: a
schema or grammar that made the library crash would end every connection of this process."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation.request import GenerationRequest
from minisgl.frontend.tokenizers import TokenizerPool
from minisgl.wire.text import ConstraintProblem, StructuredOutput, ToolOptions

_KEPT: Final = 4096
_TOO_COMPLEX: Final = "grammar_too_complex"


class _Check(NamedTuple):
    field: str
    constraint: StructuredOutput
    key: bytes


class ConstraintCheck:
    """Remembers constraints that were checked: programs send the same few again and again."""

    def __init__(self, tokenizers: TokenizerPool) -> None:
        self._tokenizers = tokenizers
        self._known: OrderedDict[bytes, ConstraintProblem | None] = OrderedDict()

    async def check(self, request: GenerationRequest, *, was_held: bool = False) -> None:
        """Check a request's constraint and the schemas of its strict tools, which takes up to a second, behind those of
        a limited number of other requests. `was_held`: the request waited for an engine, and is not rejected. Raises
        ApiError."""
        checks = list(_checks(request))
        problems = {check.key: self._known[check.key] for check in checks if check.key in self._known}
        for key in problems:
            self._known.move_to_end(key)
        new = [check for check in checks if check.key not in problems]
        if new:
            with self._tokenizers.requests.admission.checking(was_held=was_held):
                constraints = [check.constraint for check in new]
                found = await self._tokenizers.check_constraints(constraints, was_held=was_held)
            problems |= self._remember(new, found)
        for check in checks:
            if (problem := problems.get(check.key)) is not None:
                raise ApiError.from_code(problem.code, f"{check.field}: {problem.message}", check.field)

    def _remember(
        self, checks: Sequence[_Check], problems: Sequence[ConstraintProblem | None]
    ) -> dict[bytes, ConstraintProblem | None]:
        """Keep results, and return them by key. Checks behind the first problem have none."""
        results = {check.key: problem for check, problem in zip(checks, problems, strict=False)}
        for key, problem in results.items():
            # It may have been too much beside other constraints, or while the machine was busy.
            if problem is None or problem.code != _TOO_COMPLEX:
                self._known[key] = problem
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return results


def _checks(request: GenerationRequest) -> Iterator[_Check]:
    constraint, tools = request.options.structured_output, request.options.tools
    if constraint is not None:
        yield _check(request.structured_output_field, constraint)
    if tools is not None and tools.choice != "none":
        yield from _tool_checks(tools, request.tool_fields)


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
