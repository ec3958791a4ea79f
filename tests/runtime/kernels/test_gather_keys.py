"""Copies of keys to contiguous memory."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from support.kernels.interpreted_gather import CASES
from support.kernels.interpreter import interpreted


def test_the_kernels_copy_as_torch_does_and_leave_zeros_behind_the_last_key() -> None:
    assert interpreted("support.kernels.interpreted_gather") == dict.fromkeys(CASES, True)
