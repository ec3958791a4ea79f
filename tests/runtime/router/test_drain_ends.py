"""When a replica is told to end its drain, and what becomes of its requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from minisgl.router.dispatcher import Dispatcher
from minisgl.router.drain_ends import END_DRAIN_SECONDS, DrainEnds
from minisgl.router.replicas import Replicas
from minisgl.tokenizer.session import Progress
from minisgl.wire.messages import (
    FEATURES,
    WIRE_VERSION,
    EndDrain,
    Failed,
    Status,
    Welcome,
)
from support.frontend.fake_scheduler import STATUS, card, row
from support.messages import submit_of

FILES = {"tokenizer.json": "0" * 64}
OTHER_FILES = {"tokenizer.json": "1" * 64}
DRAINING = msgspec.structs.replace(STATUS, draining=True)
QUEUE_SECONDS, DRAIN_SECONDS = 60.0, 300.0
SHORT = END_DRAIN_SECONDS / 2


def welcome(name: str, files: dict[str, str] = FILES, features: tuple[str, ...] = FEATURES) -> Welcome:
    model = card(tokenizer_hashes=files)
    return Welcome(version=WIRE_VERSION, epoch=(1, 1), model=model, replica=name, features=features)


def replicas(**statuses: Status) -> Replicas:
    """Replicas by name, which is also the address, with their last status."""
    made = Replicas()
    made.set_files_in_use(FILES)
    for name, status in statuses.items():
        made.add(name)
        made.welcome(name, welcome(name))
        made.status(name, status)
    return made


class Ends:
    """Names of the replicas that end their drains."""

    def __init__(self, known: Replicas, drain_seconds: float = 0.0) -> None:
        self._ends = DrainEnds(QUEUE_SECONDS, drain_seconds)
        self._replicas = known

    def after(self, seconds: float, requests_wait: bool = True) -> str:
        self._replicas.now += seconds
        replica = self._ends.next_replica(self._replicas, requests_wait=requests_wait)
        if replica is None:
            return ""
        replica.ends_drain = True
        return replica.name


def test_the_only_replica_ends_its_drain_once_when_requests_wait_for_a_while() -> None:
    ends = Ends(replicas(a=DRAINING))
    assert [ends.after(SHORT) for _ in range(6)] == ["", "", "a", "", "", ""]


def test_no_drain_ends_while_no_request_waits() -> None:
    ends = Ends(replicas(a=DRAINING))
    assert [ends.after(SHORT, waits) for waits in (True, True, False, True, True, True)] == ["", "", "", "", "", "a"]


def test_no_drain_ends_beside_a_replica_that_can_take_requests() -> None:
    known = replicas(a=DRAINING, b=STATUS)
    ends = Ends(known)
    for _ in range(4):
        # Otherwise it is silent.
        known.status("b", STATUS)
        assert ends.after(SHORT) == ""
    known.lost("b", "lost")
    assert [ends.after(SHORT) for _ in range(3)] == ["", "", "a"]


def test_no_drain_ends_beside_a_replica_whose_tokenizer_files_are_loaded_next() -> None:
    known = replicas(a=DRAINING)
    known.add("b")
    known.welcome("b", welcome("b", OTHER_FILES))
    ends = Ends(known)
    for _ in range(4):
        known.status("b", STATUS)
        assert ends.after(SHORT) == ""


@pytest.mark.parametrize("status", [STATUS, None])
def test_a_replica_that_does_not_drain_is_not_told(status: Status | None) -> None:
    known = replicas(a=STATUS)
    # It hangs, or its connection was lost.
    known.now += 100
    if status is None:
        known.lost("a", "lost")
    ends = Ends(known)
    assert not any(ends.after(SHORT) for _ in range(6))


def test_an_engine_that_does_not_know_the_message_is_not_told() -> None:
    known = replicas(a=DRAINING)
    known.welcome("a", welcome("a", features=()))
    known.status("a", DRAINING)
    ends = Ends(known)
    assert not any(ends.after(SHORT) for _ in range(6))


def test_of_two_drains_the_one_with_fewer_requests_ends_first() -> None:
    busy = msgspec.structs.replace(DRAINING, running=3, waiting=2)
    idle = msgspec.structs.replace(DRAINING, running=4)
    ends = Ends(replicas(a=busy, b=idle))
    assert [ends.after(SHORT) for _ in range(6)] == ["", "", "b", "", "a", ""]


@pytest.mark.parametrize(("start", "is_told"), [(29.0, True), (31.0, False)])
def test_a_drain_does_not_end_if_the_next_start_takes_too_long_for_its_answers(start: float, is_told: bool) -> None:
    phases = {"imports": 10.0, "load": start - 10.0}
    ends = Ends(replicas(a=msgspec.structs.replace(DRAINING, start_seconds=phases)))
    assert any(ends.after(SHORT) for _ in range(6)) == is_told


@pytest.mark.parametrize(("start", "is_told"), [(50.0, True), (70.0, False)])
def test_the_time_for_a_start_is_that_which_is_left_of_the_drain(start: float, is_told: bool) -> None:
    ends = Ends(replicas(a=msgspec.structs.replace(DRAINING, start_seconds={"load": start})), DRAIN_SECONDS)
    assert ends.after(DRAIN_SECONDS - 135, requests_wait=False) == ""
    # 120 to 130 s are left.
    assert any(ends.after(SHORT) for _ in range(6)) == is_told


def test_the_next_drain_does_not_end_while_the_successor_of_one_comes() -> None:
    """Another worker has ended that of `a`."""
    known = replicas(a=DRAINING, b=DRAINING)
    ends = Ends(known)
    assert [ends.after(SHORT) for _ in range(2)] == ["", ""]
    known.lost("a", "lost")
    assert [ends.after(SHORT) for _ in range(3)] == ["", "", "b"]


class Model:
    """A dispatcher, and what it sends and delivers."""

    def __init__(self, **options: Any) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.given: list[Any] = []
        self.dispatcher = Dispatcher(
            QUEUE_SECONDS,
            1e6,
            deliver=self.given.append,
            send=lambda address, message: self.sent.append((address, message)),
            reencode=lambda _: None,
            progress=lambda _: Progress(b"\5\0\0\0", True),
            stale_seconds=1e6,
            drain_seconds=DRAIN_SECONDS,
            **options,
        )
        self.dispatcher.set_files_in_use(FILES)

    def start(self, name: str) -> None:
        self.dispatcher.add(name)
        self.dispatcher.welcome(name, welcome(name))

    def submit(self, number: int) -> bytes:
        request_id = b"%016d" % number
        self.dispatcher.submit(submit_of(id=request_id, prompt=b"\0" * 16, max_tokens=8, seed=1))
        return request_id

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds * 2)):
            self.dispatcher.replicas.now += 0.5
            self.dispatcher.tick()

    def told(self) -> list[str]:
        return [address for address, message in self.sent if isinstance(message, EndDrain)]

    def failures(self) -> list[str]:
        return [message.message for message in self.given if isinstance(message, Failed)]


def draining_with_an_answer(**options: Any) -> Model:
    """The only replica drains, and has an answer with tokens."""
    model = Model(**options)
    model.start("a")
    model.dispatcher.tokens("a", row(model.submit(1), 0, 5))
    model.dispatcher.status("a", DRAINING)
    return model


def test_an_answer_goes_on_before_new_requests_and_counts_no_loss() -> None:
    model = draining_with_an_answer()
    model.pass_time(60)
    assert not model.told(), "no request waits"
    model.dispatcher.requests_wait = True
    model.pass_time(60)
    assert model.told() == ["a"]
    # Drains count as no losses, however often they end.
    for before, after in (("a", "b"), ("b", "c"), ("c", "d")):
        model.dispatcher.lost(before, "engine_unavailable", "lost")
        new = model.submit(ord(after))
        del model.sent[:]
        model.start(after)
        submits = [message for _, message in model.sent]
        assert submits[0].output == b"\5\0\0\0" and submits[-1].id == new
        model.dispatcher.status(after, DRAINING)
    assert not model.failures()


def test_without_continuation_no_drain_ends_early() -> None:
    model = draining_with_an_answer(continues=False)
    model.dispatcher.requests_wait = True
    model.pass_time(60)
    assert not model.told()


def test_requests_of_a_drain_that_ended_early_wait_for_the_rest_of_it() -> None:
    model = draining_with_an_answer()
    model.pass_time(20)
    model.dispatcher.lost("a", "engine_unavailable", "lost")
    new = model.submit(2)
    model.pass_time(QUEUE_SECONDS + 1)
    assert [(failed.id, failed.message) for failed in model.given if isinstance(failed, Failed)] == [
        (new, "no engine could take the request for 60 s; retry")
    ]
    model.pass_time(DRAIN_SECONDS - 20 - QUEUE_SECONDS - 3)
    assert len(model.failures()) == 1
    model.pass_time(4)
    assert model.failures()[1:] == ["no engine could take the request for 280 s; retry"]


def test_requests_of_a_whole_drain_wait_for_the_queue_timeout() -> None:
    model = draining_with_an_answer()
    model.pass_time(DRAIN_SECONDS)
    model.dispatcher.lost("a", "engine_unavailable", "lost")
    model.pass_time(QUEUE_SECONDS - 1)
    assert not model.failures()
    model.pass_time(2)
    assert model.failures() == ["no engine could take the request for 60 s; retry"]
