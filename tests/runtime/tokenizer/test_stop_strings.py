from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.tokenizer.stop_strings import StopStrings

ALPHABET = "abc"
stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """Search character by character: the first character that completes a stop string ends the answer before it."""
    for end in range(1, len(text) + 1):
        matches = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: min(matches)], True
    return text, False


@settings(deadline=None)
@given(st.lists(st.text(ALPHABET, max_size=6), max_size=8), stop_lists)
def test_equals_the_naive_search_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    sent = "".join(matcher.push(piece) for piece in pieces)
    expected, stopped = naive("".join(pieces), stops)
    assert matcher.stopped == stopped
    assert sent + matcher.finish() == expected


@settings(deadline=None)
@given(st.text(ALPHABET, max_size=20), stop_lists)
def test_holds_back_only_what_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    sent = "".join(matcher.push(character) for character in text)
    if not matcher.stopped:
        held = text[len(sent) :]
        assert sent + held == text
        assert not held or any(len(stop) > len(held) and stop.startswith(held) for stop in stops)


def test_without_stop_strings_all_text_passes() -> None:
    matcher = StopStrings(())
    assert matcher.push("anything") == "anything"
    assert matcher.finish() == ""


def test_nothing_follows_a_match() -> None:
    matcher = StopStrings(["END"])
    assert matcher.push("text EN") == "text "
    assert matcher.push("D more") == ""
    assert matcher.stopped
    assert matcher.push("more") == "" == matcher.finish()


def test_an_incomplete_match_is_released() -> None:
    matcher = StopStrings(["\n\nUser:"])
    assert matcher.push("a\n\nUs") == "a"
    assert matcher.push("eful") == "\n\nUseful"


def test_the_stop_string_can_be_part_of_the_answer() -> None:
    stops = StopStrings(["END"], include=True)
    assert [stops.push(piece) for piece in ("a E", "N", "D b")] == ["a ", "", "END"]
    assert stops.stopped


def test_a_match_before_min_tokens_is_text() -> None:
    stops = StopStrings(["END"])
    assert stops.push("a END b E", may_stop=False) == "a END b "
    assert not stops.stopped
    assert stops.push("ND") == ""
    assert stops.stopped


def test_a_match_before_min_tokens_is_held_back_as_the_beginning_of_a_longer_one() -> None:
    stops = StopStrings(["abc d", "bc"])
    assert stops.push("abc", may_stop=False) == ""
    assert stops.push("x") == "abcx", "the match was complete before"
    assert not stops.stopped


@settings(deadline=None)
@given(st.lists(st.text(ALPHABET, max_size=6), max_size=8), stop_lists, st.integers(0, 8))
def test_only_matches_that_end_after_min_tokens_count(pieces: list[str], stops: list[str], free: int) -> None:
    """`free` is the number of pieces before the answer may stop."""
    matcher = StopStrings(stops)
    sent = "".join(matcher.push(piece, may_stop=number >= free) for number, piece in enumerate(pieces))
    text, passed = "".join(pieces), len("".join(pieces[:free]))
    ends = (end for end in range(passed + 1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops))
    end = next(ends, None)
    assert matcher.stopped == (end is not None)
    whole = text if end is None else text[: end - max(len(stop) for stop in stops if text[:end].endswith(stop))]
    assert sent + matcher.finish() == whole
