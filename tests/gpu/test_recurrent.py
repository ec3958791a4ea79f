"""The kernels of recurrent states on CUDA compute what torch does."""

from __future__ import annotations

from typing import Final

import pytest
import torch

from support.kernels.recurrent_cases import CASES

# Relative to the largest number; products take operands in the type of the inputs.
_MOST: Final = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", _MOST)
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_compute_what_torch_does_and_touch_no_other_state(name: str, dtype: torch.dtype) -> None:
    if "alike" in name and dtype == torch.bfloat16:
        pytest.skip("differences of keys that are nearly the same have few bits")
    assert CASES[name]("cuda", dtype) < _MOST[dtype]
