"""New requests wait in turns of their tenants for an engine to answer those before."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.router.dispatcher import MAX_UNANSWERED, SHARED_SECONDS, UNANSWERED_OF_ONE, Dispatcher
from minisgl.router.turns import Turns
from minisgl.tokenizer.session import Progress
from minisgl.wire.messages import FEATURES, WIRE_VERSION, Abort, Ack, Failed, Pool, Submit, Welcome
from support.frontend.fake_scheduler import card, row
from support.messages import submit_of

ENGINE = "10.0.0.1"
FILES = {"tokenizer.json": "a" * 64}


class Engine:
    """A dispatcher, and what it has sent to its one engine."""

    def __init__(self) -> None:
        self.sent: list[Submit | Pool] = []
        self.aborted: list[bytes] = []
        self.given: list[Any] = []
        self.dispatcher = Dispatcher(
            10.0,
            60.0,
            deliver=self.given.append,
            send=self._on_sent,
            reencode=lambda _: None,
            progress=lambda _: Progress(b"", False),
        )
        self.dispatcher.set_files_in_use(FILES)
        self.dispatcher.add(ENGINE)
        self.welcome()
        # Several tenants are here.
        for tenant in ("early", "earlier"):
            self.answer(Ack(self.submit(tenant, 0)))
        self.sent.clear()
        self.given.clear()

    def welcome(self) -> None:
        model = card(tokenizer_hashes=FILES, revision="r1")
        welcome = Welcome(version=WIRE_VERSION, epoch=(1, 0), model=model, replica="r0", features=FEATURES)
        self.dispatcher.welcome(ENGINE, welcome)

    def submit(self, tenant: str, number: int, **fields: Any) -> bytes:
        request_id = f"{tenant} {number}".encode().ljust(16)
        fields = {"prompt": bytes(4), "max_tokens": 8, "seed": 1} | fields
        self.dispatcher.submit(submit_of(id=request_id, tenant=tenant.encode(), **fields))
        return request_id

    def answer(self, message: Ack | Failed) -> None:
        if isinstance(message, Ack):
            self.dispatcher.acked(ENGINE, message)
        else:
            self.dispatcher.failed(ENGINE, message)
        self.dispatcher.send_waiting()

    def _on_sent(self, address: str, message: Any) -> None:
        match message:
            case Submit() | Pool():
                self.sent.append(message)
            case Abort():
                self.aborted.append(message.id)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_tenant_waits_for_a_few_requests_of_another_that_has_a_thousand(engine: Engine) -> None:
    for number in range(1000):
        engine.submit("flood", number)
    assert len(engine.sent) == MAX_UNANSWERED
    other = engine.submit("other", 0)
    for number in range(2):
        engine.answer(Ack(engine.sent[number].id))
    assert other in [submit.id for submit in engine.sent[MAX_UNANSWERED:]]


def test_one_tenant_alone_waits_for_hundreds_of_its_own(engine: Engine) -> None:
    engine.dispatcher.replicas.now += SHARED_SECONDS + 1
    for number in range(1, 1000):
        engine.submit("earlier", number)
    assert len(engine.sent) == UNANSWERED_OF_ONE


def test_texts_that_are_pooled_do_not_wait(engine: Engine) -> None:
    for number in range(1000):
        engine.dispatcher.submit(Pool(id=number.to_bytes(16), tenant=b"early", prompt=bytes(4)))
    assert len(engine.sent) == 1000


def test_every_kind_of_answer_makes_room(engine: Engine) -> None:
    for number in range(3 * MAX_UNANSWERED):
        engine.submit("a", number)
    engine.answer(Ack(engine.sent[0].id))
    engine.answer(Failed(engine.sent[1].id, "too_long", "no"))
    engine.dispatcher.abort(engine.sent[2].id)
    engine.dispatcher.send_waiting()
    assert len(engine.sent) == MAX_UNANSWERED + 3
    # Tokens of a request that was answered are no further answer.
    engine.dispatcher.tokens(ENGINE, row(engine.sent[0].id, 0, 5))
    engine.answer(Ack(engine.sent[0].id))
    assert len(engine.sent) == MAX_UNANSWERED + 3


def test_an_engine_that_comes_again_gets_those_that_it_had_and_those_that_wait(engine: Engine) -> None:
    ids = {engine.submit("a", number) for number in range(2 * MAX_UNANSWERED)}
    engine.welcome()
    answered = 0
    while answered < len(engine.sent):
        engine.answer(Ack(engine.sent[answered].id))
        answered += 1
    assert {message.id for message in engine.given} == ids


def test_a_request_that_ends_before_it_is_sent_is_never_sent(engine: Engine) -> None:
    for number in range(MAX_UNANSWERED):
        engine.submit("a", number)
    ended = engine.submit("a", MAX_UNANSWERED)
    engine.dispatcher.abort(ended)
    engine.answer(Ack(engine.sent[0].id))
    assert len(engine.sent) == MAX_UNANSWERED
    assert not engine.aborted


def test_grammars_that_are_compiled_keep_no_other_request_waiting(engine: Engine) -> None:
    for number in range(MAX_UNANSWERED):
        engine.submit("a", number, grammar="{}")
    other = engine.submit("b", 0)
    assert engine.sent[-1].id == other


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.booleans()), max_size=60))
def test_nothing_is_lost_and_tenants_take_turns(added: list[tuple[bytes, bool]]) -> None:
    turns: Turns[int] = Turns()
    expected: dict[bytes, list[int]] = {}
    for number, (tenant, stays) in enumerate(added):
        turns.add(tenant, b"%d" % number, number)
        if stays:
            expected.setdefault(tenant, []).append(number)
    for number, (tenant, stays) in enumerate(added):
        if not stays:
            turns.remove(tenant, b"%d" % number)
    of = {number: tenant for number, (tenant, _) in enumerate(added)}
    taken = [turns.take() for _ in range(len(turns))]
    assert not turns
    assert {tenant: [n for n in taken if of[n] == tenant] for tenant in expected} == expected
    # No tenant is two ahead of one that still has something.
    for tenant, numbers in expected.items():
        last = taken.index(numbers[-1])
        for other in expected.keys() - {tenant}:
            assert sum(of[n] == other for n in taken[:last]) <= len(numbers)
