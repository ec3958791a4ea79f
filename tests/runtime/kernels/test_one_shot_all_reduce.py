"""The one-shot all-reduce between ranks that are processes. Without a GPU it is interpreted; tests/gpu runs it on one,
and tests/runtime/distributed/test_nccl.py on several."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from minisgl.distributed.one_shot import one_shot_capacity
from support.kernels.interpreted_all_reduce import CASES
from support.kernels.interpreter import interpreted


@pytest.fixture(scope="module")
def faults() -> Any:
    return interpreted("support.kernels.interpreted_all_reduce")


@pytest.mark.parametrize("name", CASES)
def test_every_rank_sums_in_rank_order(faults: dict[str, str | None], name: str) -> None:
    assert faults[name] is None


def test_unmeasured_rank_counts_use_nccl() -> None:
    assert [ranks for ranks in range(1, 17) if one_shot_capacity(ranks)] == [2, 4]
