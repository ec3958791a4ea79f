"""Masks of many rows are filled by a thread, beside the plan and the launch of the next step."""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from minisgl.scheduler.mask_thread import MaskThread
from minisgl.wire.messages import Thinking
from support.constrained import ToyGrammar
from support.scheduling import Answer, Harness

ROWS = 7
GRAMMAR = ToyGrammar(factor=2, length=40, least=40)
DEADLINE_SECONDS = 30.0


def constrained(harness: Harness, *, tokens: int = 10) -> list[Answer]:
    """Requests whose masks a thread fills, with compiled grammars."""
    answers = [harness.submit([1, 2, number], tokens, seed=number, grammar=GRAMMAR.text) for number in range(ROWS)]
    harness.grammars.compile(ROWS)
    return answers


def before_filling(harness: Harness, call: Callable[[], object]) -> None:
    """Run `call` before each filling of masks, on the thread that fills them."""
    fill = harness.grammars.fill

    def wrapped(matchers: Sequence[tuple[Any, int]], masks: Any) -> Any:
        call()
        return fill(matchers, masks)

    harness.grammars.fill = wrapped  # type: ignore[method-assign]


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
    for _ in range(4):
        harness.step()
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
    for _ in range(4):
        harness.step()
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
    for _ in range(4):
        harness.step()
    failing = harness.grammars.matchers[2]
    failing.fails = True
    harness.run()
    failed = [answer for answer in answers if answer.failure is not None]
    assert [answer.failure.code for answer in failed if answer.failure] == ["grammar_failed"]
    assert failed[0].tokens == failed[0].expected()[: len(failed[0].tokens)] and failed[0].finish != "stop"
    assert harness.scheduler.counters.finished == ROWS
    check_answers(harness, [answer for answer in answers if answer.failure is None])


def test_a_request_that_is_aborted_while_its_mask_fails_has_no_other_end() -> None:
    harness = Harness()
    answers = constrained(harness)
    for _ in range(4):
        harness.step()
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
