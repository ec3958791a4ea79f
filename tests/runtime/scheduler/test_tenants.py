"""A tenant that floods the scheduler does not keep another one waiting."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import cast

import pytest

from minisgl.scheduler.admission import KEPT_ROWS
from minisgl.scheduler.clients import MAX_MESSAGES_PER_POLL, SHARED_MESSAGES_PER_POLL, Clients
from minisgl.scheduler.request import Request
from minisgl.scheduler.scheduler import MOST_JOINING
from minisgl.scheduler.server import serve
from minisgl.scheduler.shares import EXPECTED_SECONDS, Shares
from minisgl.scheduler.step_output import RequestError
from minisgl.wire.messages import Submit
from minisgl.wire.plan import StepPlan
from support.messages import submit_of
from support.scheduling import Answer, Harness

OVERLAP = pytest.mark.parametrize("overlap", [True, False])
LAG = 3
"""Steps until a row that is taken away is free, and that with which the answer of a step is late."""


def steps_to_first_token(harness: Harness, number: int) -> int:
    answer = harness.submit([90, 91, number], 4, tenant=b"other", ignore_eos=True)
    for step in range(1, 1000):
        harness.step()
        if answer.tokens:
            return step
    raise AssertionError("no token")


def flood(harness: Harness, count: int, prompt: int = 8, max_tokens: int = 20) -> list[Answer]:
    return [
        harness.submit(
            [number % 90, number // 90, *(place % 90 for place in range(prompt - 2))],
            max_tokens,
            tenant=b"flood",
            ignore_eos=True,
        )
        for number in range(count)
    ]


@OVERLAP
@pytest.mark.parametrize("begun", [0, 1, 2, 7, 40])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rows": 64, "pages": 4096},
        {"pages": 24},
        {"rows": 64, "pages": 4096, "budget": 8},
        {"target_itl_ms": 1.0, "cache": "naive"},
    ],
    ids=["rows", "prompts", "pages", "budget", "time"],
)
def test_a_flood_does_not_delay_the_first_token_of_another_tenant(
    overlap: bool, begun: int, options: dict[str, object]
) -> None:
    """Whatever is short: rows, pages, or the budget of prompt tokens."""
    alone = steps_to_first_token(Harness(overlap=overlap, **options), 0)  # type: ignore[arg-type]
    harness = Harness(overlap=overlap, **options)  # type: ignore[arg-type]
    answers = flood(harness, 100)
    for _ in range(begun):
        harness.step()
    waited = [steps_to_first_token(harness, number) for number in range(5)]
    assert max(waited) <= 1.5 * alone + LAG
    harness.run()
    assert all(answer.tokens == answer.expected() for answer in answers), "those that made room went on"
    harness.check_idle()


@OVERLAP
def test_the_first_token_of_a_tenant_that_comes_again_is_as_early_as_alone(overlap: bool) -> None:
    """A row is kept for it, and its step computes nothing else."""
    steps: list[tuple[int, int]] = []

    def step_seconds(plan: StepPlan) -> float:
        steps.append((len(plan.decode_slots), len(plan.prefill_slots)))
        return 1e-3

    alone = steps_to_first_token(Harness(overlap=overlap), 0)
    harness = Harness(overlap=overlap, step_seconds=step_seconds)
    answers = flood(harness, 100)
    for number in range(8):
        for _ in range(6):
            harness.step()
        steps.clear()
        waited = steps_to_first_token(harness, number)
        if number:
            assert waited <= alone
            assert (0, 1) in steps
    harness.run()
    assert all(answer.tokens == answer.expected() for answer in answers)
    harness.check_idle()


@OVERLAP
def test_long_prompts_of_one_tenant_do_not_delay_short_ones_of_another(overlap: bool) -> None:
    harness = Harness(overlap=overlap, pages=4096, max_model_len=512, budget=16)
    answers = flood(harness, 6, prompt=400)
    for _ in range(10):
        harness.step()
    assert steps_to_first_token(harness, 0) <= 2 + LAG
    harness.run()
    assert all(answer.tokens == answer.expected() for answer in answers)


@OVERLAP
@pytest.mark.parametrize("is_shared", [True, False])
def test_few_requests_join_a_plan_while_another_tenant_is_here(overlap: bool, is_shared: bool) -> None:
    joined: list[int] = []

    def step_seconds(plan: StepPlan) -> float:
        joined.append(plan.new_rows.shape[1])
        return 1e-3

    harness = Harness(
        overlap=overlap, rows=128, pages=4096, budget=4096, audit=False, checks=False, step_seconds=step_seconds
    )
    if is_shared:
        harness.submit([90], 40, tenant=b"other", ignore_eos=True)
        harness.step()
    answers = flood(harness, 200, max_tokens=4)
    harness.run()
    assert all(answer.tokens == answer.expected() for answer in answers)
    assert (max(joined) == MOST_JOINING) if is_shared else (max(joined) > 2 * MOST_JOINING)


class Turns:
    """Clients of a scheduler: each message comes when the loop next takes some."""

    def __init__(self, messages: list[Submit], stop: threading.Event) -> None:
        self.limits: list[int] = []
        """Most messages that were asked for, at each turn of the loop."""
        self._messages = messages
        self._stop = stop

    def receive(self, wait_ms: int, most: int) -> Iterator[tuple[int, Submit]]:
        self.limits.append(most)
        if self._messages:
            yield 0, self._messages.pop(0)
        elif wait_ms:
            self._stop.set()

    def take_disconnected(self) -> list[int]:
        return []

    def send(self, *_: object) -> None: ...

    send_step = broadcast = flush = send


def test_few_messages_are_taken_between_two_steps_while_another_tenant_is_here() -> None:
    def limits(tenants: list[bytes]) -> list[int]:
        stop = threading.Event()
        messages = [
            submit_of(id=b"%016d" % n, prompt=bytes(8), max_tokens=20, seed=0, ignore_eos=True, tenant=tenant)
            for n, tenant in enumerate(tenants)
        ]
        clients = Turns(messages, stop)
        serve(Harness().loop, cast(Clients, clients), stop)
        return clients.limits

    assert set(limits([b"a", b"a"])) == {MAX_MESSAGES_PER_POLL}
    shared = limits([b"a", b"b"])
    assert shared[:2] == [MAX_MESSAGES_PER_POLL] * 2
    assert shared[3:10] == [SHARED_MESSAGES_PER_POLL] * 7


def test_a_tenant_alone_is_served_in_the_order_of_arrival_without_preemption() -> None:
    harness = Harness()
    answers = flood(harness, 50)
    ended: list[Answer] = []
    while harness.scheduler.has_work:
        harness.step()
        ended += [answer for answer in answers if answer.finish and answer not in ended]
    assert ended == answers
    assert harness.scheduler.counters.preemptions == 0


def test_two_floods_get_equal_shares_of_the_rows() -> None:
    harness = Harness(max_waiting=10_000)
    one = flood(harness, 100)
    for _ in range(20):
        harness.step()
    other = [
        harness.submit([80, number % 90, 80 + number // 90], 20, tenant=b"other", ignore_eos=True)
        for number in range(100)
    ]
    for _ in range(200):
        harness.step()
    rows = harness.scheduler.table.rows_of
    assert abs(rows[b"flood"] - rows[b"other"]) <= 2
    harness.run()
    assert all(answer.tokens == answer.expected() for answer in (*one, *other))


def test_a_higher_priority_is_not_preempted_for_another_tenant() -> None:
    harness = Harness(rows=2)
    first = [harness.submit([1, number], 20, tenant=b"a", priority=1, ignore_eos=True) for number in range(2)]
    for _ in range(4):
        harness.step()
    harness.submit([2], 1, tenant=b"b")
    harness.run()
    assert harness.scheduler.counters.preemptions == 0
    assert all(answer.tokens == answer.expected() for answer in first)


def test_a_queue_that_one_tenant_has_filled_has_room_for_another() -> None:
    harness = Harness(max_waiting=20)
    flood(harness, 20)
    with pytest.raises(RequestError) as full:
        flood(harness, 1)
    assert full.value.code == "queue_full"
    for number in range(10):
        harness.submit([80, number], 1, tenant=b"other")
    with pytest.raises(RequestError):
        for number in range(10):
            harness.submit([81, number], 1, tenant=b"other")
    harness.run()
    harness.check_idle()


def test_a_tenant_has_a_limited_name() -> None:
    with pytest.raises(RequestError, match="tenant has more than 64 bytes"):
        Harness().submit([1], 1, tenant=b"t" * 65)


@OVERLAP
@pytest.mark.parametrize("is_aborted", [False, True], ids=["end of sequence", "abort"])
@pytest.mark.parametrize("seed", range(2))
def test_rows_that_end_by_themselves_are_not_taken_away(overlap: bool, is_aborted: bool, seed: int) -> None:
    """Their last step may be in flight, while a row is taken away for another tenant."""
    rng = random.Random(seed)
    harness = Harness(overlap=overlap, rows=16, pages=4096, budget=64)
    answers = [
        harness.submit([number % 90, number // 90, 3, 4], 40, tenant=b"flood", ignore_eos=is_aborted, seed=number)
        for number in range(200)
    ]
    for number in range(150):
        running = [answer for answer in answers if answer.tokens and answer.finish is None]
        if is_aborted and running:
            harness.abort(answers.pop(answers.index(running[-1])))
        if rng.random() < 0.5:
            tenant = b"other%d" % (number % 3)
            answers.append(harness.submit([90, 91, number % 90], 4, tenant=tenant, ignore_eos=True))
        harness.step()
    harness.run()
    assert all(answer.tokens == answer.expected() for answer in answers)
    harness.check_idle()


def test_no_row_is_kept_for_a_tenant_that_has_gone_for_good() -> None:
    harness = Harness(rows=16, pages=4096, budget=256)
    flood(harness, 100, max_tokens=50)
    for number in range(2):
        steps_to_first_token(harness, number)
    for _ in range(10):
        harness.step()
    assert harness.scheduler.table.num_in_use == 16 - KEPT_ROWS
    harness.scheduler.now += EXPECTED_SECONDS
    for _ in range(3):
        harness.step()
    assert harness.scheduler.table.num_in_use == 16


def test_rows_are_not_taken_away_for_a_prompt_that_does_not_fit_without_them() -> None:
    """Most pages are those of a third tenant with a single row."""
    harness = Harness(rows=15, pages=64, max_model_len=256, budget=64, cache="naive")
    harness.submit([place % 90 for place in range(150)], 100, tenant=b"long", ignore_eos=True)
    for _ in range(8):
        harness.step()
    many = flood(harness, 20, max_tokens=8)
    for _ in range(4):
        harness.step()
    waiting = harness.submit([7 * place % 90 for place in range(130)], 4, tenant=b"other", ignore_eos=True)
    for _ in range(20):
        harness.step()
    assert harness.scheduler.counters.preemptions == 0
    harness.run()
    assert all(answer.tokens == answer.expected() for answer in (*many, waiting))


def test_the_next_request_of_many_tenants_is_found_without_a_look_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(rows=64, pages=4096, budget=256, max_waiting=10_000, checks=False)
    for number in range(1000):
        harness.submit([number % 90, number // 90], 2, tenant=b"%d" % number, ignore_eos=True)
    looks = 0
    key = Shares.key

    def counted(shares: Shares, request: Request) -> tuple[int, bool, int, int, int]:
        nonlocal looks
        looks += 1
        return key(shares, request)

    monkeypatch.setattr(Shares, "key", counted)
    harness.run()
    assert looks < 20 * 1000
