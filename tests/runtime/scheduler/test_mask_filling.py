"""Masks of many rows are filled by a thread, beside the plan and the launch of the next step."""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from minisgl.scheduler.mask_thread import MaskThread
from minisgl.wire.messages import Thinking
from support.constrained import ToyGrammar, ToyMatcher
from support.scheduling import Answer, Harness

ROWS = 7
OTHERS = 40
"""Rows that are not open, among which one is."""
GRAMMAR = ToyGrammar(factor=2, length=40, least=40)
NARROW = ToyGrammar(factor=90, length=40, least=40)
"""Allows one or two of all tokens."""
DEADLINE_SECONDS = 30.0


def constrained(harness: Harness, *, tokens: int = 10) -> list[Answer]:
    """Requests whose masks a thread fills, with compiled grammars."""
    answers = [harness.submit([1, 2, number], tokens, seed=number, grammar=GRAMMAR.text) for number in range(ROWS)]
    harness.grammars.compile(ROWS)
    return answers


def run_steps(harness: Harness, steps: int) -> None:
    """Run steps, and wait until the masks that are begun are filled."""
    for _ in range(steps):
        harness.step()
    loop = harness.loop
    if loop._filling is None:
        return
    for thread in [loop._thread, loop._open_thread] if loop._filling.begun else [loop._thread]:
        assert thread._shared is not None
        with thread._shared.done:
            pass


def replace_fill(harness: Harness, call: Callable[..., Any]) -> None:
    """Let `call` fill masks; its first argument does that as before."""
    fill = harness.grammars.fill

    def replaced(matchers: Sequence[tuple[Any, int]], masks: Any, *, slow: bool = False) -> Any:
        return call(fill, matchers, masks, slow)

    harness.grammars.fill = replaced  # type: ignore[method-assign]


def before_filling(harness: Harness, call: Callable[[], object]) -> None:
    """Run `call` before each filling of masks, on the thread that fills them."""

    def wrapped(fill: Callable[..., Any], matchers: Sequence[tuple[Any, int]], masks: Any, slow: bool) -> Any:
        call()
        return fill(matchers, masks, slow=slow)

    replace_fill(harness, wrapped)


def at_launch(harness: Harness, call: Callable[[int], object]) -> None:
    """Run `call` with the number of each step after its launch."""
    launch = harness.engine.launch

    def wrapped(plan: Any) -> Any:
        launched = launch(plan)
        call(plan.step)
        return launched

    harness.engine.launch = wrapped  # type: ignore[method-assign]


def check_answers(harness: Harness, answers: Sequence[Answer]) -> None:
    for answer in answers:
        assert answer.failure is None and answer.tokens == answer.expected()
    harness.check_idle()


def test_the_next_step_is_launched_while_masks_are_filled() -> None:
    """Each filling waits for the next launch; without overlap there would be none before its end."""
    harness = Harness()
    answers = constrained(harness)
    run_steps(harness, 4)
    launched = defaultdict(threading.Event)
    seen: list[bool] = []
    newest = harness.engine._queue[-1].step

    def wait() -> None:
        following = harness.engine._queue[0].step + 1
        # The last one of all does not come.
        if following <= newest + 4:
            seen.append(launched[following].wait(DEADLINE_SECONDS))

    before_filling(harness, wait)
    at_launch(harness, lambda step: launched[step].set())
    harness.run()
    assert seen == [True] * 3
    check_answers(harness, answers)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("queues_sampling", [True, False])
def test_answers_do_not_depend_on_who_waits_for_masks(overlap: bool, queues_sampling: bool) -> None:
    harness = Harness(overlap=overlap, rows=12)
    harness.engine.queues_sampling = queues_sampling
    thinking = Thinking(start=(50,), end=(60, 61), is_open=True, budget=2)
    others = [
        harness.submit([1, 2, 3, 4], 12),
        harness.submit([1, 2, 3, 5], 12, grammar=GRAMMAR.text, thinking=thinking),
        harness.submit([1, 2, 3, 6], 12, allowed_token_ids=(1, 2, 3), bad_words=((1, 2),), ignore_eos=True),
    ]
    answers = constrained(harness)
    late = [harness.submit([5, 6, number], 5, grammar=GRAMMAR.text) for number in range(6)]
    harness.run()
    check_answers(harness, [*answers, *others, *late])
    log = harness.engine.log
    for name, step in log:
        if name == "sample" and overlap and step:
            assert log.index(("collect", step - 1)) < log.index((name, step)) < log.index(("collect", step))
        if name == "sample" and not queues_sampling and ("launch", step + 1) in log:
            assert log.index((name, step)) < log.index(("launch", step + 1))


def test_steps_with_prompts_are_launched_when_masks_are_filled() -> None:
    """They may wait for the device, which waits for the masks."""
    harness = Harness(rows=12)
    answers = constrained(harness)
    run_steps(harness, 4)
    new = harness.submit([5, 6, 7], 3)
    harness.step()
    newest = harness.engine._queue[-1]
    assert len(newest.prefill_slots)
    log = harness.engine.log
    assert log.index(("sample", newest.step - 1)) < log.index(("launch", newest.step))
    harness.run()
    check_answers(harness, [*answers, new])


@pytest.mark.parametrize("overlap", [True, False])
def test_a_mask_that_fails_ends_only_its_request(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    answers = constrained(harness)
    run_steps(harness, 4)
    failing = harness.grammars.matchers[2]
    failing.fails = True
    harness.run()
    failed = [answer for answer in answers if answer.failure is not None]
    assert [answer.failure.code for answer in failed if answer.failure] == ["grammar_failed"]
    assert failed[0].tokens == failed[0].expected()[: len(failed[0].tokens)] and failed[0].finish != "stop"
    assert harness.scheduler.counters.finished == ROWS
    check_answers(harness, [answer for answer in answers if answer.failure is None])


@pytest.mark.parametrize("overlap", [True, False])
def test_a_refused_token_ends_only_its_request(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    answers = constrained(harness)
    run_steps(harness, 4)
    harness.grammars.matchers[2].refuses = True
    harness.run()
    [failed] = [answer for answer in answers if answer.failure is not None]
    assert failed.failure is not None and failed.failure.code == "grammar_failed" and "token" in failed.failure.message
    assert failed.tokens == failed.expected()[: len(failed.tokens)] and failed.finish != "stop"
    assert harness.scheduler.counters.finished == ROWS
    check_answers(harness, [answer for answer in answers if answer.failure is None])


def test_tokens_are_consumed_beside_the_next_launch() -> None:
    harness = Harness()
    answers = constrained(harness)
    run_steps(harness, 4)
    consume = harness.grammars.consume
    launched = defaultdict(threading.Event)
    newest = harness.engine._queue[-1].step
    seen: list[bool] = []

    def wait(tokens: Sequence[tuple[Any, int]]) -> list[bool]:
        following = harness.engine._queue[0].step + 1
        # The last one of all does not come.
        if following <= newest + 4:
            seen.append(launched[following].wait(DEADLINE_SECONDS))
        return consume(tokens)

    harness.grammars.consume = wait  # type: ignore[method-assign]
    at_launch(harness, lambda step: launched[step].set())
    harness.run()
    assert seen == [True] * 3
    check_answers(harness, answers)


def test_a_request_that_is_aborted_while_its_mask_fails_has_no_other_end() -> None:
    harness = Harness()
    answers = constrained(harness)
    run_steps(harness, 4)
    for matcher in harness.grammars.matchers:
        matcher.fails = True
    resume = threading.Event()
    before_filling(harness, lambda: resume.wait(DEADLINE_SECONDS))
    # The masks of the newest step are filled behind this one.
    harness.step()
    counts = [len(answer.tokens) for answer in answers]
    for answer in answers[:3]:
        assert harness.abort(answer)
    resume.set()
    harness.run()
    assert [answer.failure is None for answer in answers] == [True] * 3 + [False] * (ROWS - 3)
    assert [len(answer.tokens) for answer in answers[:3]] == counts[:3]
    harness.check_idle()


def test_an_exception_while_masks_are_filled_ends_the_loop() -> None:
    harness = Harness()
    constrained(harness)

    def fail() -> None:
        raise MemoryError("no memory for masks")

    before_filling(harness, fail)
    with pytest.raises(MemoryError, match="no memory for masks"):
        harness.run()


def test_preempted_requests_keep_their_places_while_masks_are_filled() -> None:
    harness = Harness(pages=26, page_size=2, rows=8, max_model_len=26, budget=5)
    answers = [harness.submit([i, 2, 3, 4, 5, 6], 18, grammar=GRAMMAR.text) for i in range(10)]
    harness.run()
    assert harness.scheduler.counters.preemptions > 0
    check_answers(harness, answers)


def open_and_others(prepare: Callable[[Harness], None] = lambda harness: None) -> tuple[Harness, Answer, list[Answer]]:
    """One open row among many that are not, when several of their steps are done. `prepare` is called before these."""
    harness = Harness(rows=OTHERS + 1, pages=700, budget=200)
    prepare(harness)
    answers = [harness.submit([1, 2, row], 12, seed=row, grammar=NARROW.text) for row in range(OTHERS)]
    slow = harness.submit([1, 2, 3, 4], 14, grammar=GRAMMAR.text)
    harness.grammars.compile(OTHERS + 1)
    run_steps(harness, 5)
    return harness, slow, answers


def matcher_of(harness: Harness, grammar: ToyGrammar) -> ToyMatcher:
    return next(matcher for matcher in harness.grammars.matchers if matcher.grammar == grammar)


def test_masks_of_open_rows_are_begun_before_other_tokens_are_consumed() -> None:
    """Each slow mask waits until the other rows have consumed their tokens, and those wait until it has begun."""
    harness, slow, answers = open_and_others()
    begun, consumed = threading.Event(), threading.Event()
    consume = harness.grammars.consume
    seen: list[tuple[int, bool]] = []

    def fill_slowly(fill: Callable[..., Any], matchers: Sequence[tuple[Any, int]], masks: Any, slow: bool) -> Any:
        if slow:
            begun.set()
            seen.append((len(matchers), consumed.wait(DEADLINE_SECONDS)))
            consumed.clear()
        return fill(matchers, masks, slow=slow)

    def consume_behind(tokens: Sequence[tuple[Any, int]]) -> list[bool]:
        accepted = consume(tokens)
        if len(tokens) > 1 and begun.is_set():
            begun.clear()
            consumed.set()
        return accepted

    replace_fill(harness, fill_slowly)
    harness.grammars.consume = consume_behind  # type: ignore[method-assign]
    for _ in range(3):
        harness.step()
    assert len(seen) >= 2 and set(seen) == {(1, True)}
    harness.run()
    check_answers(harness, [slow, *answers])


@pytest.mark.parametrize("last", ["open", "others"])
def test_the_device_samples_when_both_threads_have_filled_their_masks(last: str) -> None:
    filled = {"open": threading.Semaphore(0), "others": threading.Semaphore(0)}
    log: list[str] = []

    def in_order(fill: Callable[..., Any], matchers: Sequence[tuple[Any, int]], masks: Any, slow: bool) -> Any:
        name, other = ("open", "others") if slow else ("others", "open")
        # All rows but the open one.
        is_split = slow or len(matchers) == OTHERS
        if is_split and name == last:
            assert filled[other].acquire(timeout=DEADLINE_SECONDS)
        failed = fill(matchers, masks, slow=slow)
        if is_split:
            log.append(name)
            filled[name].release()
        return failed

    def prepare(harness: Harness) -> None:
        sample = harness.engine.sample

        def logged(handle: Any, masks: Any) -> None:
            log.append("sample")
            sample(handle, masks)

        harness.engine.sample = logged  # type: ignore[method-assign]
        replace_fill(harness, in_order)

    harness, slow, answers = open_and_others(prepare)
    harness.run()
    check_answers(harness, [slow, *answers])
    first = "others" if last == "open" else "open"
    splits = [log[index : index + 3] for index, name in enumerate(log) if name == first]
    assert len(splits) > 5 and all(split == [first, last, "sample"] for split in splits)


@pytest.mark.parametrize("refuses", [True, False])
def test_an_open_row_that_fails_ends_only_its_request(refuses: bool) -> None:
    harness, slow, answers = open_and_others()
    matcher = matcher_of(harness, GRAMMAR)
    matcher.refuses, matcher.fails = refuses, not refuses
    harness.run()
    assert slow.failure is not None and slow.failure.code == "grammar_failed"
    check_answers(harness, answers)


@pytest.mark.parametrize("of_open", [True, False])
def test_an_exception_of_either_thread_ends_the_loop(of_open: bool) -> None:
    harness, _, _ = open_and_others()

    def fail(fill: Callable[..., Any], matchers: Sequence[tuple[Any, int]], masks: Any, slow: bool) -> Any:
        if slow == of_open:
            raise MemoryError("no memory for masks")
        return fill(matchers, masks, slow=slow)

    replace_fill(harness, fail)
    sample = Mock(wraps=harness.timed.sample)
    harness.timed.sample = sample  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="no memory for masks"):
        harness.run()
    # Else a launch that waits for the masks would hang.
    sample.assert_called_once()


def test_an_exception_behind_open_rows_waits_for_their_masks() -> None:
    harness, _, _ = open_and_others()
    consume = harness.grammars.consume
    resume, filled = threading.Event(), threading.Event()

    def fill_late(fill: Callable[..., Any], matchers: Sequence[tuple[Any, int]], masks: Any, slow: bool) -> Any:
        if slow:
            resume.wait(DEADLINE_SECONDS)
            filled.set()
        return fill(matchers, masks, slow=slow)

    def fail(tokens: Sequence[tuple[Any, int]]) -> list[bool]:
        if len(tokens) == 1:
            return consume(tokens)
        resume.set()
        raise MemoryError("no memory for tokens")

    replace_fill(harness, fill_late)
    harness.grammars.consume = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="no memory for tokens"):
        harness.run()
    assert filled.is_set()


def test_the_thread_ends_with_its_owner() -> None:
    thread = MaskThread()
    before = set(threading.enumerate())
    done: list[int] = []
    for number in range(3):
        thread.start(lambda number=number: done.append(number))  # type: ignore[misc]
        thread.join()
    assert done == [0, 1, 2]
    [worker] = set(threading.enumerate()) - before
    del thread
    gc.collect()
    worker.join(DEADLINE_SECONDS)
    assert not worker.is_alive()
