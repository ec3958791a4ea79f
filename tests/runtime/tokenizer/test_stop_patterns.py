"""Regular expressions that end an answer, against Python's own engine on every part of the text."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minisgl.tokenizer.patterns import MAX_STATES, PatternError, automaton
from minisgl.tokenizer.stop_patterns import MAX_MATCH, StopPatterns
from minisgl.tokenizer.stop_strings import StopStrings

ALPHABET = "abB1 \n"
ATOMS = [
    "a",
    "b",
    ".",
    "[ab]",
    "[^a]",
    r"\d",
    r"\s",
    r"\w",
    r"\W",
    "[a-b1]",
    "^a",
    "(?m:^)b",
    "(?s:.)",
    "(?i:b)",
    r"\Aa",
]


def combined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    quantifiers = st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "*?", "+?", "??"])
    return st.one_of(
        st.tuples(parts, parts).map("".join),
        st.tuples(parts, parts).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(parts, quantifiers).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        parts.map(lambda part: f"({part})"),
    )


expressions = st.recursive(st.sampled_from(ATOMS), combined, max_leaves=5)
pieces = st.lists(st.text(ALPHABET, max_size=4), max_size=5)


def naive(text: str, sources: list[str]) -> tuple[str, str | None]:
    """Search character by character: the first character that completes a match ends the answer before it."""
    found = [re.compile(source) for source in sources]
    for end in range(1, len(text) + 1):
        for begin in range(end):
            for expression in found:
                if expression.fullmatch(text, begin, end):
                    return text[:begin], expression.pattern
    return text, None


def is_refused(sources: list[str]) -> bool:
    try:
        automaton((), tuple(sources))
    except PatternError:
        return True
    return False


@settings(deadline=None, max_examples=500)
@given(pieces, st.lists(expressions, min_size=1, max_size=2))
def test_equals_python_on_every_part_however_the_text_is_cut(pieces: list[str], sources: list[str]) -> None:
    assume(not is_refused(sources))
    matcher = StopPatterns((), sources)
    sent = "".join(matcher.push(piece) for piece in pieces)
    expected, source = naive("".join(pieces), sources)
    assert matcher.stopped == (source is not None)
    assert sent + matcher.finish() == expected


@settings(deadline=None, max_examples=300)
@given(expressions)
def test_is_refused_exactly_if_it_matches_the_empty_text(source: str) -> None:
    assert is_refused([source]) == any(re.compile(source).match(before, len(before)) for before in ("", "a", "a\n"))


@settings(deadline=None, max_examples=300)
@given(pieces, st.lists(st.text("ab1", min_size=1, max_size=3), min_size=1, max_size=3), st.booleans())
def test_strings_are_found_as_without_expressions(pieces: list[str], stops: list[str], include: bool) -> None:
    plain, matcher = StopStrings(stops, include), StopPatterns(stops, ["x"], include)
    for piece in pieces:
        assert matcher.push(piece) == plain.push(piece)
        assert matcher.stopped == plain.stopped
    assert matcher.finish() == plain.finish()


@settings(deadline=None, max_examples=200)
@given(pieces, expressions)
def test_text_that_was_sent_is_never_part_of_a_match(pieces: list[str], source: str) -> None:
    assume(not is_refused([source]))
    matcher, sent = StopPatterns((), [source]), ""
    for piece in pieces:
        sent += matcher.push(piece)
    whole, _ = naive("".join(pieces), [source])
    assert whole.startswith(sent)


def test_a_match_grows_over_several_pieces() -> None:
    matcher = StopPatterns((), [r"\n{2,}(User|Human):"])
    assert [matcher.push(piece) for piece in ("Hi.", "\n", "\n", "\nHu", "man")] == ["Hi.", "", "", "", ""]
    assert not matcher.stopped
    assert matcher.push(": more") == ""
    assert (matcher.stopped, matcher.matched) == (True, r"\n{2,}(User|Human):")
    assert matcher.push("more") == "" == matcher.finish()


def test_text_that_no_match_begins_in_is_sent_at_once() -> None:
    matcher = StopPatterns((), [r"\d{3}-\d{4}"])
    assert [matcher.push(piece) for piece in ("call 55", "a5", "55-", "x")] == ["call ", "55a", "", "555-x"]


def test_the_match_can_be_part_of_the_answer() -> None:
    matcher = StopPatterns(["END"], ["[0-9]+;"], include=True)
    assert [matcher.push(piece) for piece in ("a 1", "2", "; b")] == ["a ", "", "12;"]
    assert matcher.matched == "[0-9]+;"


def test_texts_may_have_any_number_of_different_characters() -> None:
    matcher = StopPatterns((), [r"[一-龥]a"])
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 5000)))
    assert matcher.push(text) == text[:-1]
    assert matcher.push("a") == "" and matcher.stopped


def test_the_stop_string_that_ends_first_wins() -> None:
    matcher = StopPatterns(["b"], ["abc"])
    assert matcher.push("xabc") == "xa"
    assert matcher.matched == "b"


def test_a_match_before_min_tokens_is_text() -> None:
    matcher = StopPatterns((), [r"\d\d"])
    assert matcher.push("1234", may_stop=False) == "123"
    assert matcher.push("5") == ""
    assert matcher.stopped


def test_held_text_is_bounded() -> None:
    matcher = StopPatterns((), ["a.*b"])
    sent = 0
    for number in range(1, 101):
        sent += len(matcher.push("a" * 100))
        assert number * 100 - sent <= MAX_MATCH
    assert matcher.push("b") == ""
    assert matcher.stopped


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("(", "not a valid"),
        ("a{2,1}", "not a valid"),
        ("a{99999999999}", "not a valid"),
        ("a(?=b)", "lookaround"),
        ("(?<!b)a", "lookaround"),
        (r"(a)\1", "back reference"),
        ("(a)?(?(1)b|c)", "conditional"),
        ("(?>a|b)", "atomic"),
        ("a++", "possessive"),
        ("a$", "not generated"),
        (r"\bEND", "not generated"),
        ("a*", "empty"),
        ("^", "empty"),
        ("(?m)^", "empty"),
        ("", "empty"),
        ("a{600}", "too large"),
        ("(((a{100}){100}){100}){100}", "too large"),
        ("(((a{0,100}){0,100}){0,100}){0,100}b", "too large"),
        ("(((){100000}){100000}){100000}", "empty"),
        ("(" * 128 + ")" * 128, "empty"),
        ("(" * 5000 + "a" + ")" * 5000, "nested"),
    ],
)
def test_expressions_that_cannot_be_searched_for_are_refused(source: str, problem: str) -> None:
    with pytest.raises(PatternError, match=problem):
        automaton((), (source,))


def test_the_limit_counts_expressions_together_and_no_stop_strings() -> None:
    half = f"a{{{MAX_STATES // 2 - 10}}}"
    automaton(tuple("x" * 256 + chr(65 + n) for n in range(16)), (half, half + "b"))
    with pytest.raises(PatternError, match="too large"):
        automaton((), (half, half, half))


@pytest.mark.parametrize("source", ["(a+)+b", "(a|aa)+b", "(.*)*x", "(a?){60}a{60}b", "(?:a|b|ab)*c", "([ab]*a){8}c"])
def test_catastrophic_expressions_take_linear_time(source: str) -> None:
    """Python's engine would need 2**400 steps for some of these."""
    matcher = StopPatterns((), [source])
    text = "".join(matcher.push("aa" * 50) for _ in range(8)) + matcher.finish()
    assert text == "a" * 800


def test_sets_follow_python() -> None:
    for source in (r"[^\d\s]", r"[\w-]", r"(?i)[a-k]", r"(?i)ß", r"(?a:\w)", r"(?a:\d)", "[]a]", "[^]a]", r"(?i)[^x]"):
        for character in "aKkxXßẞé٣5 \n-]_ſK":
            matcher = StopPatterns((), [source])
            matcher.push(character)
            assert matcher.stopped == bool(re.fullmatch(source, character)), (source, character)
