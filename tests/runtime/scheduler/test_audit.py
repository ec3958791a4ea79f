"""The audit finds inconsistencies of the scheduler's state."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.scheduler_audit import check
from support.scheduling import Harness


@pytest.mark.parametrize(
    "spoil",
    [lambda free: free.pop(), lambda free: free.append(free[0]), lambda free: free.append(0)],
    ids=["lost", "free twice", "free although in use"],
)
def test_the_audit_compares_the_free_list_with_the_rows(spoil: Callable[[list[int]], object]) -> None:
    harness = Harness(rows=3)
    harness.submit([1], 20, ignore_eos=True)
    harness.step()
    check(harness.scheduler)
    assert harness.scheduler.table.requests[0] is not None
    spoil(harness.scheduler.table._free_rows)
    with pytest.raises(AssertionError, match="a row is lost or free twice"):
        check(harness.scheduler)
