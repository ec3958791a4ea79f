"""Check of constraints for the frontend, which has no native code that a constraint could make crash."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from minisgl.errors import GrammarError
from minisgl.grammar.validate import validate
from minisgl.wire.text import CheckConstraints, CheckedConstraints, ConstraintProblem, TextFailed

logger = logging.getLogger(__name__)

_THREADS: Final = 2
_SECONDS: Final = 1.0
"""For all constraints of a request."""
_MOST_CHARACTERS: Final = 1000
"""Of a problem, which may quote what the client has sent. The frontend keeps thousands of them."""


class ConstraintChecks:
    """Threads that answer `CheckConstraints`; running answers go on meanwhile."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called when there is an answer."""
        self._wake = wake
        self._threads = ThreadPoolExecutor(_THREADS, "constraint")
        self._answers: deque[CheckedConstraints | TextFailed] = deque()

    def begin(self, question: CheckConstraints) -> None:
        self._threads.submit(self._check, question)

    def take_answers(self) -> list[CheckedConstraints | TextFailed]:
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _check(self, question: CheckConstraints) -> None:
        answer: CheckedConstraints | TextFailed
        try:
            answer = CheckedConstraints(id=question.id, problems=tuple(_problems(question)))
        except BaseException:  # a panic of the library is no Exception
            logger.exception("a constraint could not be checked")
            message = "the constraint could not be checked; report it with the log of the tokenizer worker"
            answer = TextFailed(id=question.id, code="internal_error", message=message)
        self._answers.append(answer)
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
            return [*problems, ConstraintProblem(error.code, error.message[:_MOST_CHARACTERS])]
        problems.append(None)
    return problems
