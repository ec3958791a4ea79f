"""The requests of one machine while its only engine dies and restarts: dispatcher and session under a fake clock."""

from __future__ import annotations

import math
from array import array
from typing import Any

import msgspec
import pytest

from minisgl.router.dispatcher import Dispatcher
from minisgl.tokenizer.session import Session
from minisgl.tokenizer.token_bytes import TokenBytes
from minisgl.wire.messages import WIRE_VERSION, Abort, Ack, FinishReason, SamplingParams, Submit, Welcome
from minisgl.wire.text import Accepted, Cancel, Finished, Generate, ScoredToken, TextFailed, Texts
from support.frontend.fake_scheduler import STATUS, card, row
from support.frontend.scored_answers import scores
from support.tiny_tokenizers import byte_level

TOKENIZER = byte_level()
FILES = {"tokenizer.json": "a" * 64}
ENGINE = "local engine"
QUEUE_SECONDS, STALL_SECONDS = 60.0, 90.0
UNIX_MS = 1_700_000_000_000


class Machine:
    """A worker without its loop, with an engine whose messages the test makes."""

    def __init__(self) -> None:
        self.session = Session(TokenBytes(TOKENIZER))
        self.dispatcher = Dispatcher(
            QUEUE_SECONDS,
            STALL_SECONDS,
            deliver=self.session.receive,
            send=lambda _, message: self.at_engine.append(message),
            reencode=self.reencode,
            has_output=self.session.has_output,
            stale_seconds=math.inf,
        )
        self.dispatcher.set_files_in_use(FILES)
        self.dispatcher.add(ENGINE)
        self.at_engine: list[Submit | Abort] = []
        """Messages that the current start of the engine has received."""
        self.texts: dict[bytes, str] = {}
        self.ends: dict[bytes, Finished | TextFailed] = {}
        self.accepted: list[bytes] = []
        self.scored: list[ScoredToken] = []

    def reencode(self, request_id: bytes) -> None:
        if self.session.begin_reencode(request_id) is not None:
            self.session.encoded(request_id, array("i", TOKENIZER.encode("Hi").ids))

    def start_engine(self, epoch: int) -> None:
        self.at_engine = []
        model = card(tokenizer_hashes=FILES)
        self.dispatcher.welcome(ENGINE, Welcome(version=WIRE_VERSION, epoch=(1, epoch), model=model))
        self.session.open(model)

    def kill_engine(self) -> None:
        self.at_engine = []
        self.dispatcher.lost(ENGINE, "engine_unavailable", "the connection to the engine was lost")
        self.session.close()
        self.take()

    def ask(self, number: int, *, echo: bool = False, deadline_ms: int = 0, **params: Any) -> bytes:
        request_id = b"%016d" % number
        request = Generate(
            id=request_id,
            prompt="Hi",
            echo=echo,
            deadline_ms=deadline_ms,
            params=SamplingParams(max_tokens=8, **params),
        )
        assert self.session.begin(request)
        self.session.encoded(request_id, array("i", TOKENIZER.encode("Hi").ids))
        self.take()
        return request_id

    def accept(self, *numbers: int) -> None:
        """Accept the submits with these positions in `submits`."""
        for number in numbers:
            self.dispatcher.acked(ENGINE, Ack(self.submits[number].id))
        self.take()

    def give_token(self, submit: Submit, index: int, text: str, finish: FinishReason | None = None) -> None:
        self.give(submit, index, TOKENIZER.encode(text).ids[0], finish)

    def give(self, submit: Submit, index: int, token: int, finish: FinishReason | None = None) -> None:
        message = row(submit.id, index, token, finish)
        self.dispatcher.tokens(ENGINE, msgspec.structs.replace(message, logprobs={0: scores([token], 1)}))
        self.take()

    def pass_time(self, seconds: float) -> list[str]:
        self.dispatcher.replicas.now += seconds
        self.dispatcher.unix_ms += round(seconds * 1000)
        lost = self.dispatcher.tick()
        self.take()
        return lost

    @property
    def submits(self) -> list[Submit]:
        return [message for message in self.at_engine if isinstance(message, Submit)]

    def take(self) -> None:
        """Pass messages on, as the worker's loop does."""
        for request in self.session.take_to_scheduler():
            if isinstance(request, Submit):
                self.dispatcher.submit(request)
            else:
                self.dispatcher.abort(request.id)
        for message in self.session.take_to_frontend():
            match message:
                case Accepted():
                    self.accepted.append(message.id)
                case TextFailed():
                    self.ends[message.id] = message
                case Texts():
                    for request_id, text in message.rows():
                        self.texts[request_id] = self.texts.get(request_id, "") + text
                    self.scored += [one for scored in message.scored.values() for one in scored]
                    self.ends |= {end.id: end for end in message.finished}


def serving(requests: int) -> tuple[Machine, list[bytes]]:
    machine = Machine()
    machine.start_engine(1)
    return machine, [machine.ask(number) for number in range(requests)]


def failure(machine: Machine, request_id: bytes) -> tuple[str, str]:
    end = machine.ends[request_id]
    assert isinstance(end, TextFailed)
    return end.code, end.message


def test_a_deadline_ends_a_request_that_waits_for_an_engine() -> None:
    machine, _ = serving(0)
    machine.dispatcher.unix_ms = UNIX_MS
    deadline_ms = UNIX_MS + 5000
    timed, patient = machine.ask(0, deadline_ms=deadline_ms), machine.ask(1)
    machine.kill_engine()
    machine.pass_time(4)
    assert not machine.ends
    machine.pass_time(1)
    assert failure(machine, timed)[0] == "deadline_exceeded"
    assert patient not in machine.ends


def test_every_attempt_has_the_time_that_is_left_until_the_deadline() -> None:
    machine, _ = serving(0)
    machine.dispatcher.unix_ms = UNIX_MS
    machine.ask(0, deadline_ms=UNIX_MS + 5000)
    machine.ask(1)
    assert [submit.remaining_ms for submit in machine.submits] == [5000, 0]
    machine.kill_engine()
    machine.pass_time(2)
    machine.dispatcher.unix_ms += 3600_000
    machine.start_engine(2)
    assert [submit.remaining_ms for submit in machine.submits] == [3000, 0]
    assert [submit.deadline_ms for submit in machine.submits] == [UNIX_MS + 5000, 0]


def test_an_echoed_prompt_with_tokens_stays_at_a_draining_engine() -> None:
    machine, _ = serving(0)
    echoed = machine.ask(0, echo=True)
    machine.accept(0)
    (submit,) = machine.submits
    # The first byte of a character has no text yet.
    machine.give(submit, 0, TOKENIZER.encode("é").ids[0])
    machine.dispatcher.add("other")
    model = card(tokenizer_hashes=FILES)
    machine.dispatcher.welcome("other", Welcome(version=WIRE_VERSION, epoch=(1, 1), model=model, replica="other"))
    machine.dispatcher.status(ENGINE, msgspec.structs.replace(STATUS, draining=True))
    machine.take()
    assert machine.submits == [submit], "it is not moved"
    assert echoed not in machine.ends


def test_requests_without_output_are_answered_by_the_next_epoch() -> None:
    machine, (prefilling, queued, not_accepted, streaming) = serving(4)
    machine.accept(0, 1, 3)
    machine.give_token(machine.submits[3], 0, "x")
    first = [submit.id for submit in machine.submits]
    machine.kill_engine()
    assert failure(machine, streaming) == ("engine_unavailable", "the connection to the engine was lost")
    machine.pass_time(QUEUE_SECONDS - 1)
    assert list(machine.ends) == [streaming], "the others wait"
    machine.start_engine(2)
    assert len(machine.submits) == 3
    assert not {submit.id for submit in machine.submits} & set(first)
    machine.accept(0, 1, 2)
    assert sorted(machine.accepted) == sorted([prefilling, queued, not_accepted, streaming]), "each is accepted once"
    for submit in machine.submits:
        machine.give_token(submit, 0, "y")
        machine.give_token(submit, 1, "z", "length")
    for request_id in (prefilling, queued, not_accepted):
        end = machine.ends[request_id]
        assert isinstance(end, Finished)
        assert (machine.texts[request_id], end.completion_tokens) == ("yz", 2)
    assert machine.texts[streaming] == "x"
    assert machine.dispatcher.resubmitted == 3


@pytest.mark.parametrize(
    "params", [{}, {"stop": ("yes",)}, {"stop": ("yes",), "logprobs": 1}], ids=["plain", "stop", "logprobs"]
)
def test_tokens_without_text_are_no_output_and_are_forgotten(params: dict[str, Any]) -> None:
    machine, _ = serving(0)
    request_id = machine.ask(1, **params)
    machine.accept(0)
    # The first byte of a character, and with stop strings also the beginning of one.
    if params:
        machine.give_token(machine.submits[0], 0, "y")
    machine.give(machine.submits[0], len(params and [1]), TOKENIZER.encode("é").ids[0])
    assert machine.texts == {}
    machine.kill_engine()
    assert not machine.ends
    machine.start_engine(2)
    for index, text in enumerate("ab"):
        machine.give_token(machine.submits[0], index, text, "length" if text == "b" else None)
    end = machine.ends[request_id]
    assert isinstance(end, Finished)
    assert (machine.texts[request_id], end.completion_tokens) == ("ab", 2)
    assert [one.offset for one in machine.scored] == ([0, 1] if "logprobs" in params else [])


def test_tokens_without_text_do_not_survive_a_change_of_the_tokenizer() -> None:
    machine, _ = serving(0)
    request_id = machine.ask(1)
    machine.give(machine.submits[0], 0, TOKENIZER.encode("é").ids[0])
    machine.dispatcher.set_files_in_use({"tokenizer.json": "b" * 64})
    machine.kill_engine()
    machine.dispatcher.set_files_in_use(FILES)
    machine.take()
    machine.start_engine(2)
    machine.give_token(machine.submits[0], 0, "a", "length")
    assert machine.texts == {request_id: "a"}


def test_the_seed_and_the_order_of_resubmitted_requests_stay() -> None:
    machine, _ = serving(3)
    before = [(submit.seed, submit.prompt) for submit in machine.submits]
    machine.kill_engine()
    machine.start_engine(2)
    assert [(submit.seed, submit.prompt) for submit in machine.submits] == before


def test_late_tokens_of_the_dead_engine_are_ignored() -> None:
    machine, (request_id,) = serving(1)
    (submit,) = machine.submits
    machine.kill_engine()
    machine.give_token(submit, 0, "x", "stop")
    machine.start_engine(2)
    machine.give_token(submit, 0, "x", "stop")
    assert not machine.ends
    machine.give_token(machine.submits[0], 0, "y", "length")
    assert machine.texts == {request_id: "y"}


def test_a_wait_ends_at_the_queue_timeout() -> None:
    machine, (request_id,) = serving(1)
    machine.accept(0)
    machine.kill_engine()
    machine.pass_time(QUEUE_SECONDS)
    assert failure(machine, request_id) == ("engine_unavailable", "no engine could take the request for 60 s")
    machine.start_engine(2)
    assert machine.at_engine == []
    assert not machine.session


def test_a_second_wait_is_as_long_as_the_first_and_a_second_loss_is_the_last() -> None:
    machine, (request_id,) = serving(1)
    machine.kill_engine()
    machine.pass_time(QUEUE_SECONDS - 1)
    machine.start_engine(2)
    machine.accept(0)
    machine.pass_time(QUEUE_SECONDS - 1)
    assert not machine.ends
    machine.kill_engine()
    assert "second engine to be lost" in failure(machine, request_id)[1]


def test_waiting_requests_are_forgotten_at_once_when_the_frontend_ends_them() -> None:
    # It does so when the launcher gives up, and when its connection to the worker is lost.
    machine, requests = serving(3)
    machine.kill_engine()
    machine.session.cancel(Cancel(requests[0]))
    machine.take()
    machine.session.abort_all()
    machine.take()
    machine.start_engine(2)
    assert machine.at_engine == []
    assert not machine.session and not machine.ends


def test_requests_that_arrive_during_the_restart_are_refused() -> None:
    machine, _ = serving(0)
    machine.kill_engine()
    late = Generate(id=b"l" * 16, prompt="Hi", params=SamplingParams())
    assert not machine.session.begin(late)
    machine.take()
    assert failure(machine, late.id)[0] == "engine_unavailable"


def test_a_prompt_that_is_encoded_during_the_restart_waits_for_it() -> None:
    machine, _ = serving(0)
    request = Generate(id=b"l" * 16, prompt="Hi", params=SamplingParams())
    assert machine.session.begin(request)
    machine.kill_engine()
    machine.session.encoded(request.id, array("i", TOKENIZER.encode("Hi").ids))
    machine.take()
    machine.start_engine(2)
    assert [submit.id for submit in machine.submits] == [request.id]
    assert machine.dispatcher.resubmitted == 0


def test_a_silent_engine_gets_requests_until_it_counts_as_stalled() -> None:
    machine, (streaming, silent) = serving(2)
    machine.give_token(machine.submits[0], 0, "x")
    assert machine.pass_time(STALL_SECONDS) == []
    machine.ask(9)
    assert len(machine.submits) == 3
    assert machine.pass_time(1) == [ENGINE]
    assert failure(machine, streaming)[0] == "engine_stalled"
    machine.start_engine(1)
    assert len(machine.submits) == 2 and silent not in machine.ends
