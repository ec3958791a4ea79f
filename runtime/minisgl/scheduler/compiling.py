"""Compilation of grammars on threads, beside the step loop."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np

from minisgl.errors import describe
from minisgl.scheduler.constraints import Constraint, Vocabulary
from minisgl.scheduler.request import Request
from minisgl.wire.messages import Submit

if TYPE_CHECKING:
    from minisgl.grammar.grammars import Grammars

logger = logging.getLogger(__name__)

_THREADS: Final = 4
"""Grammars that are compiled at once: a slow one must not hold up the others."""


class ConstraintCompiler:
    """Grammars of a scheduler, and the threads that create and compile them."""

    def __init__(self, create: Callable[[], Grammars]) -> None:
        self._create = create
        self._created: Future[Grammars] | None = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="minisgl-grammar")
        self.finished: deque[tuple[Request, Future[Constraint]]] = deque()
        """Compiled requests that the scheduler has not taken yet."""
        self._has_finished = threading.Event()

    def begin(self) -> None:
        """Begin to create the grammars; otherwise the first request does it."""
        if self._created is None:
            self._created = self._threads.submit(self._create)
            self._created.add_done_callback(_log_failure)

    @property
    def grammars(self) -> Grammars | None:
        """None before they are created, which is before the first request is compiled."""
        created = self._created
        return created.result() if created is not None and created.done() and created.exception() is None else None

    def ready(self, message: Submit, vocabulary: Vocabulary) -> Constraint | None:
        """Return the constraint of a request whose grammar is compiled already: handing 64 of them to threads takes
        10 ms, and copying them 2. None: `start` must compile it, or consume its output."""
        grammars = None if message.output else self.grammars
        try:
            matcher = None if grammars is None else grammars.ready_matcher(message.constraint.grammar)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of the library is no Exception; `start` reports it
            return None
        return None if matcher is None else Constraint(message, vocabulary, matcher)

    def start(self, request: Request, message: Submit, vocabulary: Vocabulary) -> Future[Constraint]:
        """Begin to compile the grammar of a request; its constraint will be behind `message.output`. The future may be
        cancelled."""
        self.begin()
        assert self._created is not None
        future = self._threads.submit(_compile, self._created, message, vocabulary)
        future.add_done_callback(lambda done: self._finish(request, done))
        return future

    def wait(self, seconds: float) -> None:
        """Wait until a request is compiled, but not for longer than this."""
        self._has_finished.wait(seconds)
        self._has_finished.clear()

    def close(self) -> None:
        """Drop requests that are not compiled yet."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _finish(self, request: Request, done: Future[Constraint]) -> None:
        self.finished.append((request, done))
        self._has_finished.set()


def _log_failure(created: Future[Grammars]) -> None:
    if (error := created.exception()) is not None:
        logger.warning("requests with a grammar will fail: %s", describe(error))


def _compile(grammars: Future[Grammars], message: Submit, vocabulary: Vocabulary) -> Constraint:
    constraint = Constraint(message, vocabulary, grammars.result().matcher(message.constraint.grammar))
    constraint.replay(np.frombuffer(message.output, "<i4").tolist())
    return constraint
