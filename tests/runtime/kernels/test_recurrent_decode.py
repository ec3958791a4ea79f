"""Recurrent states of rows that decode."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from support.kernels.interpreted_recurrent import CASES
from support.kernels.interpreter import interpreted


def test_the_kernels_compute_what_torch_does_and_touch_no_other_state() -> None:
    found = interpreted("support.kernels.interpreted_recurrent")
    assert found.keys() == CASES.keys()
    assert all(difference < 1e-4 for difference in found.values()), found
