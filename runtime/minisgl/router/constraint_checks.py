"""Check of constraints for the frontend, which has no native code that a constraint could make crash."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from minisgl.grammar.errors import GrammarError
from minisgl.grammar.validate import validate
from minisgl.wire.text import CheckConstraints, CheckedConstraints, ConstraintProblem

_THREADS: Final = 2
_SECONDS: Final = 1.0
"""For all constraints of a request."""


class ConstraintChecks:
    """Threads that answer `CheckConstraints`; running answers go on meanwhile."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called when there is an answer."""
        self._wake = wake
        self._threads = ThreadPoolExecutor(_THREADS, "constraint")
        self._answers: deque[CheckedConstraints] = deque()

    def begin(self, question: CheckConstraints) -> None:
        self._threads.submit(self._check, question)

    def take_answers(self) -> list[CheckedConstraints]:
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _check(self, question: CheckConstraints) -> None:
        self._answers.append(CheckedConstraints(id=question.id, problems=tuple(_problems(question))))
        self._wake()


def _problems(question: CheckConstraints) -> list[ConstraintProblem | None]:
    """Problem of each constraint, up to the first one that has any."""
    until = time.monotonic() + _SECONDS
    problems: list[ConstraintProblem | None] = []
    for constraint in question.constraints:
        try:
            validate(constraint)
            if time.monotonic() > until:
                raise GrammarError("grammar_too_complex", "the constraint takes too long to check; simplify it")
        except GrammarError as error:
            return [*problems, ConstraintProblem(error.code, error.message)]
        problems.append(None)
    return problems
