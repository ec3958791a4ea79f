"""The one-shot all-reduce between ranks that are processes. Without a GPU it is interpreted; tests/gpu runs it on one,
and tests/runtime/distributed/test_nccl.py on several."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from support.interpreted_all_reduce import CASES
from support.interpreter import interpreted


@pytest.fixture(scope="module")
def faults() -> Any:
    return interpreted("support.interpreted_all_reduce")


@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_the_sum_in_the_ranks_order(faults: dict[str, str | None], name: str) -> None:
    assert faults[name] is None
