"""The frontend's report of used tokens in a stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.frontend.server.usage_report import Usage
from minisgl.gateway.usage import UsageFilter, read_usage

REPORT = b': minisgl-usage {"prompt_tokens":3,"completion_tokens":9}\n\n'


def passed(pieces: list[bytes]) -> tuple[bytes, Usage | None]:
    found = UsageFilter()
    return b"".join([found.feed(piece) for piece in pieces]) + found.rest(), found.usage


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    ends = sorted(place % (len(stream) + 1) for place in places)
    return [stream[begin:end] for begin, end in zip([0, *ends], [*ends, len(stream)], strict=True)]


_TEXT = st.lists(
    st.sampled_from([b"data: a\n\n", b"\n", b": ping\n\n", b": minisgl-usage", b": mini", b" {}\n", b"x", b"\r\n"]),
    max_size=8,
).map(b"".join)
_PLACES = st.lists(st.integers(0, 1000), max_size=8)


@given(_TEXT, _PLACES)
def test_a_stream_without_a_report_stays_as_it_is(stream: bytes, places: list[int]) -> None:
    assert passed(cut(stream, places)) == (stream, None)


@given(_TEXT, _TEXT, _PLACES)
def test_the_report_is_taken_out_wherever_the_stream_is_cut(before: bytes, after: bytes, places: list[int]) -> None:
    begin = before + b"\n"
    assert passed(cut(begin + REPORT + after, places)) == (begin + after, Usage(3, 9))


def test_a_report_at_the_very_beginning_is_taken_out() -> None:
    assert passed([REPORT, b"data: [DONE]\n\n"]) == (b"data: [DONE]\n\n", Usage(3, 9))


@given(_PLACES)
def test_a_report_within_an_event_is_text(places: list[int]) -> None:
    stream = b"data: " + REPORT
    assert passed(cut(stream, places)) == (stream, None)


def test_a_line_that_only_begins_like_a_report_is_not_kept_for_ever() -> None:
    found = UsageFilter()
    long = b"\n: minisgl-usage " + b"x" * 1000
    assert found.feed(long) == long


def test_pieces_pass_at_once() -> None:
    found = UsageFilter()
    for piece in (b"data: a\n\n", b"dat", b"a: b", b"\n\n", b": ping\n\n"):
        assert found.feed(piece) == piece


@pytest.mark.parametrize("number", [-1, 2**31 + 1, 10**12, "9" * 401, "9" * 5000], ids=lambda value: str(value)[:20])
def test_a_report_of_numbers_that_no_request_has_is_none(number: object) -> None:
    assert read_usage(b'{"prompt_tokens":3,"completion_tokens":9}') == Usage(3, 9)
    for prompt, completion in ((number, 0), (0, number)):
        assert read_usage(f'{{"prompt_tokens":{prompt},"completion_tokens":{completion}}}'.encode()) is None
