"""The kernels of a decode step against float64. Without a GPU they are interpreted; tests/gpu has the same on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from support.kernels.decode_kernels import CASES
from support.kernels.interpreter import interpreted


@pytest.fixture(scope="module")
def faults() -> Any:
    return interpreted("support.kernels.decode_kernels")


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_matches_float64(faults: dict[str, str | None], name: str) -> None:
    assert faults[name] is None
