"""Recurrent states of rows that decode, and of prompts."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from support.kernels.interpreter import interpreted
from support.kernels.recurrent_cases import CASES


def test_the_kernels_compute_what_torch_does_and_touch_no_other_state() -> None:
    found = interpreted("support.kernels.recurrent_cases")
    assert found.keys() == CASES.keys()
    assert all(difference < 1e-4 for difference in found.values()), found
