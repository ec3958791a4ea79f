from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from minisgl.offline.pacing import FLAT_ROWS, GROUP, Pacing, rows_at_once
from minisgl.wire.messages import Submit

ROWS = 2 * FLAT_ROWS


def _submits(lengths: list[int], ignore_eos: bool = True) -> list[Submit]:
    return [
        Submit(id=bytes(16), prompt=bytes(4), max_tokens=length, ignore_eos=ignore_eos, seed=0) for length in lengths
    ]


def _run(pacing: Pacing, lengths: list[int]) -> tuple[list[int], list[int]]:
    """One token a step for each that runs: in which order all were handed over, and how many ran in each step."""
    order: list[int] = []
    running: dict[int, int] = {}
    rows = []
    while (due := pacing.take_due(len(order) - len(running))) or running:
        order += due
        running |= {number: lengths[number] for number in due}
        rows.append(len(running))
        running = {number: left - 1 for number, left in running.items() if left > 1}
    return order, rows


@given(st.lists(st.integers(1, 60), max_size=3 * FLAT_ROWS))
def test_each_is_handed_over_once_the_longest_first_and_none_makes_the_whole_longer(lengths: list[int]) -> None:
    order, rows = _run(Pacing(_submits(lengths), ROWS), lengths)
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[number] for number in order] == sorted(lengths, reverse=True)
    # Where that is too few rows for all, the scheduler divides them, not the pacing.
    assert len(rows) == max(lengths, default=0)


def test_no_more_run_at_once_than_end_together_with_the_longest() -> None:
    lengths = [4 * number for number in range(1, ROWS + 1)]
    _, rows = _run(Pacing(_submits(lengths), ROWS), lengths)
    assert len(rows) == max(lengths)
    assert FLAT_ROWS < max(rows) < 0.7 * ROWS, "half the rows for twice the steps would be the least"
    # They take over from others in groups.
    grown = [after - before for before, after in pairwise(rows) if after > before]
    assert 0 < len(grown) <= -(-(ROWS - max(rows)) // GROUP)


def test_all_run_at_once_where_fewer_would_take_longer_or_gain_nothing() -> None:
    assert rows_at_once([100] * ROWS, ROWS) == ROWS
    assert rows_at_once(list(range(FLAT_ROWS, 0, -1)), ROWS) == FLAT_ROWS
    assert rows_at_once([100] * 5000, ROWS) == 5000


def test_answers_whose_lengths_are_not_known_keep_the_order_in_which_they_were_asked_for() -> None:
    lengths = [5, 9, 7] * FLAT_ROWS
    assert Pacing(_submits(lengths, ignore_eos=False), ROWS).take_due(0) == list(range(len(lengths)))
