"""Drafts: where they are found, what is accepted of them, and where they are placed in a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl.kernels.speculation.place_drafts import place_drafts
from minisgl.kernels.speculation.row_text_tables import NO_TOKEN, RowTextTables
from minisgl.kernels.speculation.step_rows import DecodeRows, SampledRows
from minisgl.kernels.speculation.verify_drafts import find_drafts, verify_drafts
from minisgl.wire.messages import MOST_DRAFTS
from minisgl.wire.row_texts import LEAST_MATCHED, MATCHED_TOKENS

CPU = torch.device("cpu")
NONE = [NO_TOKEN] * MOST_DRAFTS
TEXTS = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=60),
    # Long repetitions: more tokens match than are compared.
    st.builds(
        lambda part, times: part * times, st.lists(st.integers(0, 3), min_size=1, max_size=25), st.integers(1, 4)
    ),
)


def _ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _expected_drafts(text: list[int], predicted: int, expected: int) -> tuple[list[int], int]:
    """By definition: of all earlier places, the one with the longest match; of these one in the predicted text; of
    these the expected one, or else the newest."""
    end = len(text)

    def matched(place: int) -> int:
        return max(
            length
            for length in range(min(MATCHED_TOKENS, place) + 1)
            if text[place - length : place] == text[end - length :]
        )

    length, _, _, place = max(
        ((matched(place), place < predicted, place == expected, place) for place in range(1, end)),
        default=(0, False, False, 0),
    )
    if length < LEAST_MATCHED:
        if not 0 < expected < predicted:
            return NONE, end
        place = expected
    grown = list(text)
    for number in range(MOST_DRAFTS):
        grown.append(grown[place + number])
    return grown[end:], place


@given(TEXTS, st.data())
def test_drafts_continue_the_newest_of_the_longest_matches(text: list[int], data: st.DataObject) -> None:
    predicted = data.draw(st.integers(0, len(text) - 1))
    expected = data.draw(st.integers(0, len(text) + 3))
    drafts, start = find_drafts(np.array(text, np.int32), predicted, expected)
    assert (drafts.tolist(), start) == _expected_drafts(text, predicted, expected)


@dataclass(frozen=True)
class _Row:
    """A row before a step that verifies its drafts."""

    text: list[int]
    """The predicted text, then the sequence."""
    origin: int
    drafts: list[int]
    sampled: list[int]
    room: int
    """Tokens that the sequence may still get."""
    source: int


@st.composite
def _rows(draw: st.DrawFn) -> _Row:
    text = draw(TEXTS)
    drafts = draw(st.lists(st.integers(0, 2), max_size=MOST_DRAFTS))
    others = draw(st.lists(st.integers(-1, 2), min_size=1, max_size=MOST_DRAFTS + 1))
    right = draw(st.integers(0, min(len(drafts), len(others) - 1)))
    sampled = [*drafts[:right], *others[right:]]
    return _Row(
        text, draw(st.integers(0, len(text) - 1)), drafts, sampled, draw(st.integers(-1, 10)), draw(st.integers(0, 60))
    )


@given(st.lists(_rows(), min_size=1, max_size=4))
def test_tokens_count_up_to_the_first_one_that_is_not_its_draft(rows: list[_Row]) -> None:
    tables = RowTextTables.empty(len(rows) + 1, 200, CPU)
    slots = list(range(len(rows)))[::-1]
    for slot, row in zip(slots, rows, strict=True):
        position = len(row.text) - row.origin
        tables.set_text(slot, _ints(position + row.room, row.origin), _ints(*row.text))
        tables.texts[slot, len(row.text) : len(row.text) + len(row.drafts)] = _ints(*row.drafts)
        tables.source[slot] = row.source
    widths = [len(row.sampled) for row in rows]
    first = [sum(widths[:row]) for row in range(len(rows))]
    positions = [len(row.text) - row.origin + number for row in rows for number in range(len(row.sampled))]
    sampled = [token for row in rows for token in row.sampled]
    report = verify_drafts(
        tables, SampledRows(_ints(*slots), _ints(*first), _ints(*widths)), _ints(*sampled), _ints(*positions)
    )
    for slot, row, (count, offered, hit, predicted) in zip(slots, rows, report.T.tolist(), strict=True):
        accepted = 0
        while accepted < min(len(row.sampled) - 1, len(row.drafts)) and row.sampled[accepted] == row.drafts[accepted]:
            accepted += 1
        assert count == max(min(1 + accepted, row.room), 1)
        assert offered == len(row.drafts) and predicted == (0 < row.source < row.origin)
        assert hit == (row.drafts[:1] == row.sampled[:1])
        text = row.text + row.sampled[:count]
        drafts, start = _expected_drafts(text, row.origin, row.source and row.source + count)
        assert tables.texts[slot, : len(text) + MOST_DRAFTS].tolist() == text + drafts
        assert tables.source[slot] == start
        assert tables.next_position[slot] == len(text) - row.origin - 1


def test_a_missing_token_is_not_taken_for_a_missing_draft() -> None:
    tables = RowTextTables.empty(2, 40, CPU)
    tables.set_text(0, _ints(30, 0), _ints(1, 2, 3))
    rows = SampledRows(_ints(0), _ints(0), _ints(3))
    assert verify_drafts(tables, rows, _ints(-1, -1, 5), _ints(3, 4, 5)).T.tolist() == [[1, 0, 0, 0]]


def test_a_row_has_no_drafts_of_the_row_that_had_its_slot_before() -> None:
    tables = RowTextTables.empty(2, 40, CPU)
    tables.set_text(0, _ints(30, 0), _ints(*range(20)))
    tables.set_text(0, _ints(30, 0), _ints(7, 8))
    report = verify_drafts(tables, SampledRows(_ints(0), _ints(0), _ints(1)), _ints(2), _ints(2))
    assert report.T.tolist() == [[1, 0, 0, 0]]


def test_drafts_fill_what_is_left_of_the_table() -> None:
    tables = RowTextTables.empty(2, 8, CPU)
    tables.set_text(0, _ints(30, 0), _ints(1, 2, 1))
    verify_drafts(tables, SampledRows(_ints(0), _ints(0), _ints(1)), _ints(2), _ints(3))
    assert tables.texts[0].tolist() == [1, 2, 1, 2, 1, 2, 1, 2]


@given(st.data())
def test_rows_of_last_tokens_get_the_dummy_slot(data: st.DataObject) -> None:
    tables = RowTextTables.empty(4, 60, CPU)
    dummy = 3
    for slot in range(dummy):
        known, origin = data.draw(st.integers(1, 20)), data.draw(st.integers(0, 20))
        tables.set_text(slot, _ints(known + data.draw(st.integers(-1, 9)), origin), torch.arange(origin + known).int())
        tables.texts[slot, origin + known : origin + known + 3] = _ints(50, 51, 52)
        tables.next_position[slot] = known - 1
    slots = data.draw(st.lists(st.integers(0, dummy), min_size=1, max_size=12))
    before = [slots[:row].count(slot) % 8 for row, slot in enumerate(slots)]
    sample_rows = data.draw(st.lists(st.integers(0, 20), max_size=15))
    # Sampling positions of rows that are no decode rows stay as they are.
    rows = DecodeRows(
        _ints(*slots), _ints(*before), _ints(*slots), _ints(*[-7] * len(sample_rows)), _ints(*sample_rows)
    )
    tokens = place_drafts(tables, rows, dummy)
    for row, slot in enumerate(slots):
        position = int(tables.next_position[slot]) + before[row]
        found = int(rows.slots[row]), int(rows.positions[row]), int(tokens[row])
        if position >= tables.limit[slot] - 1:
            assert found == (dummy, 0, 0)
        else:
            draft = int(tables.texts[slot, tables.origin[slot] + position])
            assert found == (slot, position, 0 if draft == NO_TOKEN else draft)
    assert rows.lengths.tolist() == [position + 1 for position in rows.positions.tolist()]
    expected = [int(rows.lengths[row]) if row < len(slots) else -7 for row in sample_rows]
    assert rows.sample_positions.tolist() == expected
