"""Selection of experts by scores, by Triton's interpreter; on a GPU `tests/gpu/test_experts.py` tests it."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from support.kernels.interpreted_routing import CASES
from support.kernels.interpreter import interpreted


def test_the_kernel_selects_as_torch_does_and_whatever_the_logits_experts_that_exist() -> None:
    names = [*CASES, "0.0", "nan", "inf", "-inf"]
    assert interpreted("support.kernels.interpreted_routing") == dict.fromkeys(names, True)
