"""Threads that create and compile grammars, behind a real scheduler."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from minisgl.errors import GrammarError
from minisgl.scheduler.compiling import ConstraintCompiler
from minisgl.scheduler.constraints import Vocabulary
from support.constrained import ToyGrammar, ToyGrammars, ToyMatcher
from support.scheduling import EOS, VOCAB, Answer, Harness

GRAMMAR = ToyGrammar(factor=3, length=6, least=6).text


class Created(ToyGrammars):
    """Grammars as threads use them: `matcher` compiles. A text `hold …` waits until `release` is set."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.release = threading.Event()
        self.holding = threading.Event()

    def ready_matcher(self, text: str) -> Any:
        return self._new(text) if text in self.known else None

    def matcher(self, text: str) -> Any:
        if text.startswith("hold"):
            self.holding.set()
            assert self.release.wait(60)
            text = text.removeprefix("hold ")
        if text == "panic":
            raise RuntimeError("a bug of the library")
        return self._new(text)

    def _new(self, text: str) -> Any:
        grammar = msgspec.json.decode(text, type=ToyGrammar)
        return ToyMatcher(grammar, Vocabulary(VOCAB, EOS), VOCAB)


def _harness(threads: ConstraintCompiler) -> Harness:
    harness = Harness()
    harness.scheduler.constrained._compiler = threads
    return harness


@pytest.fixture
def created() -> Iterator[Created]:
    grammars = Created()
    yield grammars
    grammars.release.set()


@pytest.fixture
def threads(created: Created) -> Iterator[ConstraintCompiler]:
    threads = ConstraintCompiler(lambda: created)  # type: ignore[arg-type, return-value]
    yield threads
    created.release.set()
    threads.close()


def _check(*answers: Answer) -> None:
    for answer in answers:
        assert answer.failure is None and answer.tokens == answer.expected()


def _make_known(harness: Harness, created: Created) -> Answer:
    """Answer a request under GRAMMAR, which is known afterwards."""
    first = harness.submit([1, 2], 8, grammar=GRAMMAR)
    harness.run()
    created.known.add(GRAMMAR)
    return first


def test_grammars_are_created_by_the_first_request(threads: ConstraintCompiler) -> None:
    harness = _harness(threads)
    plain = harness.submit([1, 2], 4, allowed_token_ids=(1, 2))
    harness.run()
    assert threads.grammars is None
    constrained = harness.submit([1, 2], 8, grammar=GRAMMAR)
    harness.run()
    assert threads.grammars is not None and constrained.is_compiled
    _check(plain, constrained)
    harness.check_idle()


def test_a_slow_grammar_holds_up_no_other_request(threads: ConstraintCompiler, created: Created) -> None:
    harness = _harness(threads)
    slow = harness.submit([1, 2], 8, grammar=f"hold {GRAMMAR}")
    assert created.holding.wait(60)
    others = [harness.submit([1, 3], 8, grammar=GRAMMAR), harness.submit([1, 4], 8)]
    while not all(answer.finish for answer in others):
        harness.step()
    assert not slow.is_compiled and harness.scheduler.has_work
    aborted = harness.submit([1, 5], 8, grammar=f"hold {GRAMMAR}")
    assert harness.abort(aborted)
    created.release.set()
    while slow.finish is None:
        harness.step()
    assert slow.is_compiled and not slow.failure and not aborted.tokens
    _check(*others)
    harness.run()


def test_a_request_with_a_known_grammar_waits_for_no_thread(threads: ConstraintCompiler, created: Created) -> None:
    harness = _harness(threads)
    first = _make_known(harness, created)
    threads.close()
    again = harness.submit([1, 2], 8, grammar=GRAMMAR)
    assert not harness.scheduler.num_held
    harness.run()
    assert first.is_compiled
    _check(first, again)
    harness.check_idle()


def test_the_output_of_a_continued_request_is_consumed_on_a_thread(
    threads: ConstraintCompiler, created: Created
) -> None:
    harness = _harness(threads)
    first = _make_known(harness, created)
    output = np.array(first.tokens[:3], "<i4")
    continued = harness.submit([1, 2], 8, grammar=GRAMMAR, output=output.tobytes())
    continued.tokens += output.tolist()
    assert harness.scheduler.num_held == 1
    harness.run()
    assert continued.is_compiled and not continued.failure and continued.tokens == first.tokens


def test_a_failure_of_the_library_is_an_error_of_the_request(threads: ConstraintCompiler) -> None:
    harness = _harness(threads)
    failing = harness.submit([1, 2], 4, grammar="panic")
    beside = harness.submit([1, 3], 8)
    harness.run()
    assert failing.failure is not None and failing.failure.code == "grammar_failed"
    _check(beside)
    harness.check_idle()


def test_without_a_usable_tokenizer_requests_with_a_grammar_fail(caplog: pytest.LogCaptureFixture) -> None:
    def create() -> Any:
        raise GrammarError("grammar_unavailable", "tokenizer.json cannot be used")

    threads = ConstraintCompiler(create)
    with caplog.at_level(logging.WARNING):
        threads.begin()
        harness = _harness(threads)
        failing = harness.submit([1, 2], 4, grammar=GRAMMAR)
        allowed = harness.submit([1, 2], 4, allowed_token_ids=(1, 2))
        harness.run()
    assert failing.failure is not None and failing.failure.code == "grammar_unavailable"
    assert "requests with a grammar will fail" in caplog.text
    _check(allowed)
    harness.check_idle()
    threads.close()
