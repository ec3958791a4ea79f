"""Recurrent states of rows: requests begin behind checkpoints, which are few and are found where texts part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from minisgl.scheduler.checkpoints import NO_CHECKPOINT, Checkpoints
from minisgl.wire.plan import StateChange
from support.constrained import ToyGrammar
from support.scheduling import VOCAB, Answer, Harness

PAGE, BLOCK = 4, 64


def harness(**changes: Any) -> Harness:
    options = {"pages": 400, "page_size": PAGE, "max_model_len": 600, "budget": 512, "checkpoints": 20}
    return Harness(**(options | changes))


def text(length: int, seed: int = 0) -> list[int]:
    return list(map(int, np.random.default_rng(seed).integers(12, VOCAB, length)))


def answered(served: Harness, prompt: list[int], max_tokens: int = 4) -> Answer:
    answer = served.submit(prompt, max_tokens, ignore_eos=True)
    served.run()
    assert answer.tokens == answer.expected()
    return answer


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("budget", [512, 40])
def test_the_next_turn_computes_less_than_a_block_of_what_it_repeats(overlap: bool, budget: int) -> None:
    served = harness(overlap=overlap, budget=budget)
    turn = text(150)
    for seed in range(1, 4):
        answer = answered(served, turn, 70)
        assert answer.cached == max(0, (len(turn) - len(text(20)) - 1) // BLOCK * BLOCK) or seed == 1
        turn = [*turn, *answer.tokens, *text(20, seed)]


def test_a_prompt_of_whole_blocks_is_found_whole_by_the_next_turn() -> None:
    served = harness()
    answer = answered(served, text(128), 40)
    assert answered(served, [*text(128), *answer.tokens, *text(20, 1)]).cached == 128


@pytest.mark.parametrize("history", [[], text(350)], ids=["first turn", "second turn"])
def test_choices_of_one_prompt_compute_it_once_but_for_a_block(history: list[int]) -> None:
    served = harness(page_size=BLOCK, pages=200, max_model_len=1200, checkpoints=40, budget=4096)
    if history:
        answered(served, history)
    prompt = [*history, *text(600, 1)]
    answers = [served.submit(prompt, 20, seed=seed, ignore_eos=True) for seed in range(8)]
    before = served.scheduler.counters.prefill_tokens
    served.run()
    assert all(answer.tokens == answer.expected() for answer in answers)
    assert served.scheduler.counters.prefill_tokens - before <= 600 + BLOCK + 7 * 2 * BLOCK


def test_a_row_that_ends_before_it_runs_leaves_no_change_of_states() -> None:
    served = harness()
    answered(served, text(300))
    answered(served, text(300, 1))
    # Its grammar is never compiled, and all but the last of its tokens are cached.
    waiting = served.submit(text(257), 4, grammar=ToyGrammar(factor=2, length=4, least=2).text)
    served.step()
    served.abort(waiting)
    assert answered(served, text(300, 2)).cached == 0


def test_a_prompt_that_is_sent_again_computes_its_last_block_only() -> None:
    served = harness()
    answered(served, text(300))
    assert answered(served, text(300)).cached == 256
    # The last token is always computed.
    answered(served, text(128, seed=1))
    assert answered(served, text(128, seed=1)).cached == 64


def test_the_third_prompt_begins_where_the_second_parted_from_the_first() -> None:
    served = harness()
    shared = text(270)
    cached = [answered(served, [*shared, *text(100, seed)]).cached for seed in (1, 2, 3, 4)]
    # The first one has a checkpoint behind 3 blocks.
    assert cached == [0, 192, 256, 256]


def test_prompts_that_arrive_together_wait_one_step_for_the_state_that_they_share() -> None:
    served = harness(budget=4096)
    shared = text(270)
    answered(served, [*shared, *text(100, 1)])
    answers = [served.submit([*shared, *text(100, seed)], 4, ignore_eos=True) for seed in range(2, 7)]
    served.run()
    assert [answer.cached for answer in answers] == [192, 256, 256, 256, 256]
    assert all(answer.tokens == answer.expected() for answer in answers)


def test_salts_have_states_of_their_own() -> None:
    served = harness()
    for salt, cached in ((b"", 0), (b"a", 0), (b"a", 256), (b"b", 0), (b"", 256)):
        answer = served.submit(text(300), 2, cache_salt=salt, ignore_eos=True)
        served.run()
        assert (answer.cached, answer.tokens) == (cached, answer.expected())


def test_a_preempted_request_goes_on_from_its_last_state() -> None:
    served = harness(pages=190, rows=2)
    answers = [served.submit(text(250, seed), 200, ignore_eos=True) for seed in (1, 2)]
    computed = 0
    while served.scheduler.has_work:
        served.step()
        computed = served.scheduler.counters.prefill_tokens
    assert served.scheduler.counters.preemptions
    assert all(answer.tokens == answer.expected() for answer in answers)
    # The state at the end of its prompt is there still; that of its answer went with pages which the other one took.
    assert computed <= 2 * 250 + served.scheduler.counters.preemptions * (250 + 200 - 192)


def test_no_state_remains_of_a_request_whose_logits_were_not_finite() -> None:
    served = harness(overlap=False)
    answered(served, text(300))
    spoiled = served.submit([*text(200), *text(100, 1)], 4)
    served.engine.fail_logits_of.add(0)
    served.run()
    assert spoiled.failure is not None
    assert answered(served, [*text(200), *text(100, 2)]).cached == 0


@pytest.mark.parametrize("checkpoints", [0, 1, 2])
def test_too_few_checkpoints_cost_only_time(checkpoints: int) -> None:
    served = harness(checkpoints=checkpoints, rows=3)
    for round in range(2):
        answers = [served.submit(text(150, seed), 80, ignore_eos=True) for seed in range(6)]
        served.run()
        assert all(answer.tokens == answer.expected() for answer in answers), round
    served.check_idle()


def test_without_a_cache_every_request_starts_from_zeros() -> None:
    served = harness(cache="naive")
    assert [answered(served, text(300)).cached for _ in range(2)] == [0, 0]


def test_flushed_and_evicted_prefixes_free_their_checkpoints() -> None:
    served = harness(pages=150)
    for seed in range(5):
        answered(served, text(300, seed))
    assert served.scheduler.pages.used_state_checkpoints > 0
    served.scheduler.flush_cache()
    served.check_idle()
    assert served.scheduler.pages.used_state_checkpoints == 0
    assert answered(served, text(300, 4)).cached == 0


def test_plans_name_every_state_that_a_row_begins_with() -> None:
    served = harness(audit=False)
    answered(served, text(300))
    served.submit(text(300), 1)
    plan = served.scheduler.plan()
    assert plan is not None
    [[kind, slot, tokens, checkpoint]] = plan.state_changes.T.tolist()
    assert (kind, slot, tokens) == (StateChange.LOAD, 0, 256)
    assert checkpoint != NO_CHECKPOINT


@dataclass
class Prefix:
    saved: int
    checkpoint: int = NO_CHECKPOINT

    def saved_pages(self) -> int:
        return self.saved


def test_the_checkpoint_that_saves_least_goes_first() -> None:
    checkpoints = Checkpoints(3, audit=False)
    long, middle, short = prefixes = [Prefix(saved) for saved in (5000, 300, 200)]
    for prefix in prefixes:
        checkpoints.keep(checkpoints.take(), prefix)
    # What saves less than it did when it was kept is dropped as what it is, and what saves more is kept.
    short.saved = 6000
    checkpoints.keep(checkpoints.take(), Prefix(400))
    assert middle.checkpoint == NO_CHECKPOINT
    assert NO_CHECKPOINT not in (short.checkpoint, long.checkpoint)


def test_a_checkpoint_that_came_to_save_less_makes_no_other_one_older() -> None:
    checkpoints = Checkpoints(3, audit=False)
    for saved in (100, 300):
        checkpoints.keep(checkpoints.take(), Prefix(saved))
    shrunk = Prefix(500)
    checkpoints.keep(checkpoints.take(), shrunk)
    for saved in (600, 700):
        checkpoints.keep(checkpoints.take(), Prefix(saved))
    shrunk.saved = 1
    checkpoints.keep(checkpoints.take(), idle := Prefix(400))
    assert shrunk.checkpoint == NO_CHECKPOINT
    newest = Prefix(400)
    checkpoints.keep(checkpoints.take(), newest)
    assert NO_CHECKPOINT not in (newest.checkpoint, idle.checkpoint)


def test_what_is_used_outlives_what_saves_more() -> None:
    checkpoints = Checkpoints(3, audit=False)
    long, used = Prefix(1000), Prefix(500)
    for prefix in (long, used):
        checkpoints.keep(checkpoints.take(), prefix)
    # Values rise with those that went.
    for _ in range(40):
        checkpoints.use(used)
        checkpoints.keep(checkpoints.take(), Prefix(400))
    assert long.checkpoint == NO_CHECKPOINT != used.checkpoint


def test_a_kind_of_checkpoints_that_is_never_used_goes_before_one_that_is() -> None:
    checkpoints = Checkpoints(4, audit=False)
    for _ in range(10):
        used, unused = Prefix(300), Prefix(700)
        checkpoints.keep(checkpoints.take(1), used)
        checkpoints.use(used)
        checkpoints.keep(checkpoints.take(2), unused)
    checkpoints.keep(checkpoints.take(1), Prefix(300))
    assert unused.checkpoint == NO_CHECKPOINT != used.checkpoint


def test_prompts_that_part_early_begin_near_to_where_they_part() -> None:
    served = harness(pages=1000, checkpoints=100)
    history = text(580)
    answered(served, history)
    for shared, cached in ((140, 128), (250, 192), (330, 320), (500, 320), (570, 512)):
        assert answered(served, [*history[:shared], *text(10, shared)]).cached == cached


def test_places_of_rows_may_have_two_checkpoints() -> None:
    checkpoints = Checkpoints(1, audit=False, rows=2, per_row=2)
    prefixes = [Prefix(saved) for saved in (100, 500, 300, 400, 200)]
    for prefix in prefixes:
        checkpoints.keep(checkpoints.take(), prefix)
    assert {prefix.checkpoint for prefix in prefixes} == {*checkpoints.at_row(0), *checkpoints.at_row(1), 0}
    # The place that is worth less: 600 and 700 pages.
    assert checkpoints.next_row() == 0 and checkpoints.at_row(0) == range(-6, -4)
    checkpoints.occupy(0)
    assert [prefix.checkpoint == NO_CHECKPOINT for prefix in prefixes] == [True, True, False, False, False]
    checkpoints.vacate(0)
    assert checkpoints.next_row() == 0


@pytest.mark.parametrize("per_row", [1, 2])
def test_states_move_to_places_of_rows_and_are_found_there(per_row: int) -> None:
    served = harness(checkpoints=1, rows=8, checkpoints_per_row=per_row)
    for round in range(2):
        for seed in range(5):
            assert answered(served, text(300, seed)).cached == 256 * round
    together = [served.submit(text(300, seed), 30, ignore_eos=True) for seed in range(3, 11)]
    served.run()
    assert all(answer.tokens == answer.expected() for answer in together)
    served.check_idle()


def test_prefixes_keep_their_states_at_rows_that_are_not_in_use() -> None:
    checkpoints = Checkpoints(2, audit=False, rows=2)
    prefixes = [Prefix(saved) for saved in (400, 100, 300, 200)]
    for prefix in prefixes:
        checkpoints.keep(checkpoints.take(), prefix)
    assert sorted(prefix.checkpoint for prefix in prefixes) == [*checkpoints.at_row(0), *checkpoints.at_row(1), 0, 1]
    assert len(checkpoints.take_moves()) == 2 and not checkpoints.take_moves()
    # The least valuable of all goes, at a row or not.
    checkpoints.keep(checkpoints.take(), Prefix(500))
    assert [prefix.checkpoint == NO_CHECKPOINT for prefix in prefixes] == [False, True, False, False]
    # A row takes the place with the least valuable one.
    at_rows = [prefix for prefix in prefixes if prefix.checkpoint < NO_CHECKPOINT]
    slot = checkpoints.next_row()
    checkpoints.occupy(slot)
    gone = min(at_rows, key=Prefix.saved_pages)
    assert [prefix for prefix in at_rows if prefix.checkpoint == NO_CHECKPOINT] == [gone]
    checkpoints.vacate(slot)
    assert checkpoints.next_row() == slot


def test_few_checkpoints_do_while_rows_are_not_in_use() -> None:
    served = harness(checkpoints=2, rows=8)
    for round in range(2):
        for seed in range(5):
            assert answered(served, text(300, seed)).cached == 256 * round
    # They are used by rows, one after the other.
    together = [served.submit(text(300, seed), 30, ignore_eos=True) for seed in range(10, 18)]
    served.run()
    assert all(answer.tokens == answer.expected() for answer in together)
    assert sum(answered(served, text(300, seed)).cached > 0 for seed in range(5)) <= 1


def test_rows_cannot_take_checkpoints_of_other_rows() -> None:
    checkpoints = Checkpoints(1, audit=True)
    assert checkpoints.take() == 0
    assert checkpoints.take() == NO_CHECKPOINT
    checkpoints.give_back(0)
    assert (checkpoints.take_freed(), checkpoints.take_freed(), checkpoints.take()) == ([0], [], 0)
