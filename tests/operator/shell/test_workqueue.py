from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any

import uvloop
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl_operator.shell.workqueue import BUSY_AT_ONCE, NORMAL_AT_ONCE, SLOW_SECONDS, WorkQueue


class ManualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock changes only when it is set."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__()

    def time(self) -> float:
        return self.now

    def turn(self, seconds: float = 0.0) -> None:
        self.now += seconds
        for _ in range(3):
            self.run_until_complete(asyncio.sleep(0))

    def call(self, step: Coroutine[Any, Any, Any]) -> Any:
        return self.run_until_complete(step)


KEYS = st.sampled_from("abcdefg")


class QueueMachine(RuleBasedStateMachine):
    """The queue beside a model of client-go's documented semantics with two priorities."""

    @initialize(busy=st.booleans())
    def start(self, busy: bool) -> None:
        self.loop = ManualLoop()
        self.busy = busy
        self.queue: WorkQueue[str] = WorkQueue(lambda: busy)
        self.waiting: dict[str, bool] = {}
        self.running: dict[str, bool] = {}
        self.since: dict[str, float] = {}
        self.worker: asyncio.Task[str] | None = None
        self.again: dict[str, bool] = {}
        self.due: dict[str, float] = {}

    def _added(self, key: str, urgent: bool = False) -> None:
        lanes = self.again if key in self.running else self.waiting
        lanes[key] = urgent or lanes.get(key, False)

    async def _do(self, method: str, *args: Any) -> None:
        getattr(self.queue, method)(*args)

    @rule(key=KEYS, urgent=st.booleans())
    def add(self, key: str, urgent: bool) -> None:
        self.loop.call(self._do("add", key, urgent))
        self._added(key, urgent)

    @rule(key=KEYS, seconds=st.sampled_from((1.0, 5.0, 30.0)))
    def add_after(self, key: str, seconds: float) -> None:
        self.loop.call(self._do("add_after", key, seconds))
        self.due[key] = min(self.due.get(key, float("inf")), self.loop.now + seconds)

    @rule(seconds=st.sampled_from((0.5, 4.0, 31.0)))
    def wait(self, seconds: float) -> None:
        self.loop.turn(seconds)
        for key in list(self.due):
            if self.due[key] <= self.loop.now:
                del self.due[key]
                self._added(key)

    @precondition(lambda self: self.worker is None)
    @rule()
    def get(self) -> None:
        self.worker = self.loop.create_task(self.queue.get())
        self.loop.turn()

    def _taken(self) -> None:
        """The key that the waiting worker has got, if any."""
        if self.worker is None:
            return
        counted = [urgent for key, urgent in self.running.items() if self.since[key] + SLOW_SECONDS > self.loop.now]
        limit = BUSY_AT_ONCE if self.busy else NORMAL_AT_ONCE
        held_back = counted.count(False) >= (limit // 2 if any(counted) else limit)
        assert self.worker.done() == (any(self.waiting.values()) or (bool(self.waiting) and not held_back))
        if not self.worker.done():
            return
        key = self.worker.result()
        self.worker = None
        assert key in self.waiting
        assert key not in self.running, "one key at two workers"
        urgent = self.waiting.pop(key)
        assert urgent or not any(self.waiting.values()), "an urgent key was overtaken"
        self.running[key] = urgent
        self.since[key] = self.loop.now

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.running)))
        self.loop.call(self._do("done", key))
        del self.running[key]
        if key in self.again:
            self.waiting[key] = self.again.pop(key)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "queue"):
            self.loop.turn()
            self._taken()
            assert self.queue.depth == len(self.waiting)
            assert self.queue.idle == (not self.waiting and not self.running)

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            if self.worker is not None:
                self.worker.cancel()
                self.loop.turn()
            self.queue.close()
            self.loop.close()


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_keys_of_one_priority_are_processed_in_order() -> None:
    loop, queue = ManualLoop(), WorkQueue[str]()

    async def order() -> list[str]:
        for key in "cab":
            queue.add(key)
        for key in "zy":
            queue.add(key, urgent=True)
        queue.add("b", urgent=True)
        keys = []
        for _ in range(5):
            keys.append(await queue.get())
            queue.done(keys[-1])
        return keys

    assert loop.call(order()) == ["z", "y", "b", "c", "a"]
    loop.close()


def test_few_normal_keys_are_processed_beside_an_urgent_one() -> None:
    loop, queue = ManualLoop(), WorkQueue[str]()
    others = [f"other-{number}" for number in range(NORMAL_AT_ONCE // 2 + 3)]

    async def add() -> None:
        for key in others:
            queue.add(key)
        queue.add("edited", urgent=True)

    loop.call(add())
    workers = [loop.create_task(queue.get()) for _ in range(1 + len(others))]
    loop.turn()
    taken = [worker.result() for worker in workers if worker.done()]
    assert taken == ["edited", *others[:NORMAL_AT_ONCE // 2]]
    # The next normal key follows when one of them is done, or at the latest when the urgent one is.
    loop.call(_done(queue, others[0]))
    loop.turn()
    assert sum(worker.done() for worker in workers) == 2 + NORMAL_AT_ONCE // 2
    loop.call(_done(queue, "edited"))
    loop.turn()
    assert all(worker.done() for worker in workers)
    loop.close()


def test_a_key_without_a_delay_is_added_once_on_the_event_loop_of_the_operator() -> None:
    async def keys() -> list[str]:
        queue = WorkQueue[str]()
        for seconds in (0.0, 5.0, 0.0, -1.0):
            queue.add_after("a", seconds)
        found = [await queue.get()]
        queue.done("a")
        queue.add("b")
        found.append(await queue.get())
        queue.close()
        return found

    assert uvloop.run(keys()) == ["a", "b"]


def test_slow_keys_hold_no_others_back() -> None:
    loop, queue = ManualLoop(), WorkQueue[str]()

    async def add() -> None:
        for number in range(NORMAL_AT_ONCE + 1):
            queue.add(f"{number}")

    loop.call(add())
    workers = [loop.create_task(queue.get()) for _ in range(NORMAL_AT_ONCE + 1)]
    loop.turn(SLOW_SECONDS / 2)
    assert sum(worker.done() for worker in workers) == NORMAL_AT_ONCE
    loop.turn(SLOW_SECONDS)
    assert all(worker.done() for worker in workers)
    loop.close()


async def _done(queue: WorkQueue[str], key: str) -> None:
    queue.done(key)


def _delay(loop: ManualLoop, queue: WorkQueue[str]) -> float:
    """Fail once more, and wait until the key is back."""

    async def fail() -> None:
        key = await queue.get()
        queue.retry(key)
        queue.done(key)

    loop.call(fail())
    before = loop.now
    while not queue.depth:
        loop.turn(0.05)
    return loop.now - before


def test_each_failure_of_a_key_doubles_its_delay_up_to_a_minute_and_success_resets_it() -> None:
    loop, queue = ManualLoop(), WorkQueue[str]()

    async def add() -> None:
        queue.add("a")

    loop.call(add())
    delays = [_delay(loop, queue) for _ in range(12)]
    assert 0.4 <= delays[0] <= 0.7
    assert all(later > 1.2 * earlier for earlier, later in pairwise(delays[:7]))
    assert all(45 <= delay <= 75 for delay in delays[8:])
    queue.forget("a")
    assert _delay(loop, queue) <= 0.7
    queue.close()
    loop.close()


def test_the_age_of_the_oldest_running_key_is_measured() -> None:
    loop, queue = ManualLoop(), WorkQueue[str]()

    async def hand_out() -> None:
        queue.add("a")
        await queue.get()

    async def age() -> float:
        return queue.longest_running()

    loop.call(hand_out())
    loop.turn(7)
    assert loop.call(age()) == 7
    loop.close()
