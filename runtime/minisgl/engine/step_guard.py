"""After a step that failed there are no more: its effects on the tables are lost, and other ranks may have had them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from minisgl.engine.errors import EngineError


class StepGuard:
    def __init__(self) -> None:
        self._cause = ""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the work of a step. Raises EngineError, and does none of it, when that of an earlier step failed."""
        if self._cause:
            raise EngineError(
                "engine_failed", f"an earlier step failed ({self._cause}); the engine must be started again"
            )
        try:
            yield
        except BaseException as error:
            # Not the error itself: its frames hold on to the step's tensors.
            self._cause = str(error) or repr(error)
            raise
