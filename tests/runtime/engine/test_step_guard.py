"""No engine runs a step after a failed one."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from minisgl.engine.step_guard import StepGuard
from minisgl.errors import EngineError


def test_steps_run_until_one_fails() -> None:
    guard, done = StepGuard(), []
    for step in range(3):
        with guard.step():
            done.append(step)
    with pytest.raises(KeyError), guard.step():
        raise KeyError("page 7")
    for _ in range(2):
        with pytest.raises(EngineError, match="page 7") as refused, guard.step():
            done.append(3)
        assert refused.value.code == "engine_failed"
    assert done == [0, 1, 2]


def test_an_error_without_a_message_counts_too() -> None:
    guard = StepGuard()
    with pytest.raises(MemoryError), guard.step():
        raise MemoryError
    with pytest.raises(EngineError, match="MemoryError"), guard.step():
        pass


def _fail(guard: StepGuard) -> weakref.ref[torch.Tensor]:
    tensor = torch.zeros(3)
    try:
        with guard.step():
            raise RuntimeError("out of memory")
    except RuntimeError:
        return weakref.ref(tensor)


def test_the_tensors_of_the_failed_step_are_not_kept() -> None:
    guard = StepGuard()
    gc.disable()
    try:
        assert _fail(guard)() is None
    finally:
        gc.enable()
