from __future__ import annotations

import pytest

pytest.importorskip("triton")

from support.kernels.interpreted_layer_norm import CASES
from support.kernels.interpreter import interpreted


def test_the_kernel_computes_what_torch_does() -> None:
    assert interpreted("support.kernels.interpreted_layer_norm") == dict.fromkeys(CASES, True)
