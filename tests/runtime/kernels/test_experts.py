"""The experts' kernels by Triton's interpreter; on a GPU `tests/gpu/test_experts.py` tests them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from support.interpreted_experts import CASES
from support.interpreter import interpreted


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    found: dict[str, float] = interpreted("support.interpreted_experts")
    return found


@pytest.mark.parametrize("name", CASES)
def test_experts_are_those_of_float64(name: str, errors: dict[str, float]) -> None:
    assert errors[name] < 1e-3
