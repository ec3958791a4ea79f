"""Refusal of steps after a failed one: its effects on the tables are lost, while other ranks may have applied them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from minisgl.errors import EngineError


class StepGuard:
    """Remembers the first failure of a step."""

    def __init__(self) -> None:
        self._cause = ""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of the work of a step. Raises EngineError before the work when an earlier step has failed."""
        if self._cause:
            raise EngineError("engine_failed", f"an earlier step failed ({self._cause}); restart the engine")
        try:
            yield
        except BaseException as error:
            # Only the text: the frames of the error refer to the tensors of the step.
            self._cause = str(error) or repr(error)
            raise
