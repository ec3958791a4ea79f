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
from minisgl.wire.messages import (
    FEATURES,
    WIRE_VERSION,
    Abort,
    Ack,
    Failed,
    FinishReason,
    PromptLogprobs,
    SamplingParams,
    Submit,
    Welcome,
)
from minisgl.wire.text import NOT_TAKEN, Accepted, Cancel, Continued, Finished, ScoredToken, TextFailed, Texts
from support.frontend.fake_scheduler import STATUS, card, row
from support.frontend.scored_answers import scores
from support.messages import generate_of
from support.tiny_tokenizers import byte_level

TOKENIZER = byte_level()
FILES = {"tokenizer.json": "a" * 64}
ENGINE = "local engine"
QUEUE_SECONDS, STALL_SECONDS = 60.0, 90.0
UNIX_MS = 1_700_000_000_000


class Machine:
    """A worker without its loop, with an engine whose messages the test makes."""

    def __init__(self, *, continues: bool = True, stale_seconds: float = math.inf) -> None:
        self.session = Session(TokenBytes(TOKENIZER))
        self.dispatcher = Dispatcher(
            QUEUE_SECONDS,
            STALL_SECONDS,
            deliver=self.session.receive,
            send=lambda _, message: self.at_engine.append(message),
            reencode=self.reencode,
            progress=self.session.progress,
            stale_seconds=stale_seconds,
            continues=continues,
        )
        self.dispatcher.set_files_in_use(FILES)
        self.dispatcher.add(ENGINE)
        self.at_engine: list[Submit | Abort] = []
        """Messages that the current start of the engine has received."""
        self.texts: dict[bytes, str] = {}
        self.ends: dict[bytes, Finished | TextFailed] = {}
        self.accepted: list[bytes] = []
        self.continued: list[bytes] = []
        self.scored: list[ScoredToken] = []
        self.prompt_scored: list[ScoredToken] = []

    def reencode(self, request_id: bytes) -> None:
        if self.session.begin_reencode(request_id) is not None:
            self.session.encoded(request_id, array("i", TOKENIZER.encode("Hi").ids))

    def start_engine(self, epoch: int, **changes: Any) -> None:
        self.at_engine = []
        model = card(**{"tokenizer_hashes": FILES, **changes})
        self.dispatcher.welcome(ENGINE, Welcome(version=WIRE_VERSION, epoch=(1, epoch), model=model, features=FEATURES))
        self.session.open(model)

    def kill_engine(self) -> None:
        self.at_engine = []
        self.dispatcher.lost(ENGINE, "engine_unavailable", "the connection to the engine was lost")
        self.session.close()
        self.take()

    def ask(
        self,
        number: int,
        *,
        echo: bool = False,
        deadline_ms: int = 0,
        priority: int = 0,
        prediction: str = "",
        **params: Any,
    ) -> bytes:
        request_id = b"%016d" % number
        request = generate_of(
            id=request_id,
            prompt="Hi",
            echo=echo,
            deadline_ms=deadline_ms,
            priority=priority,
            params=SamplingParams(**{"max_tokens": 8, **params}),
        )
        assert self.session.begin(request)
        predicted = array("i", TOKENIZER.encode(prediction).ids)
        self.session.encoded(request_id, array("i", TOKENIZER.encode("Hi").ids), prediction=predicted)
        self.take()
        return request_id

    def accept(self, *numbers: int) -> None:
        """Accept the submits with these positions in `submits`."""
        for number in numbers:
            self.dispatcher.acked(ENGINE, Ack(self.submits[number].id))
        self.take()

    def give_token(
        self, submit: Submit, index: int, text: str, finish: FinishReason | None = None, cached: int = 0
    ) -> None:
        self.give(submit, index, TOKENIZER.encode(text).ids[0], finish, cached)

    def give(
        self,
        submit: Submit,
        index: int,
        token: int,
        finish: FinishReason | None = None,
        cached: int = 0,
        predicted: tuple[int, int] = (0, 0),
    ) -> None:
        message = row(submit.id, index, token, finish, cached)
        more: dict[str, Any] = {"logprobs": {0: scores([token], 1)}, "predicted": {0: predicted}}
        self.dispatcher.tokens(ENGINE, msgspec.structs.replace(message, **more))
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
                self.dispatcher.submit(request, self.session.deadline_ms(request.id))
            else:
                self.dispatcher.abort(request.id)
        for message in self.session.take_to_frontend():
            match message:
                case Accepted():
                    self.accepted.append(message.id)
                case Continued():
                    self.continued.append(message.id)
                case TextFailed():
                    self.ends[message.id] = message
                case Texts():
                    for request_id, text in message.rows():
                        self.texts[request_id] = self.texts.get(request_id, "") + text
                    self.scored += [one for scored in message.scored.values() for one in scored]
                    self.prompt_scored += [one for scored in message.prompt_scored.values() for one in scored]
                    self.ends |= {end.id: end for end in message.finished}


def serving(requests: int, *, continues: bool = True) -> tuple[Machine, list[bytes]]:
    machine = Machine(continues=continues)
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


def test_an_echoed_prompt_with_tokens_stays_at_a_draining_engine() -> None:
    machine, _ = serving(0)
    echoed = machine.ask(0, echo=True)
    machine.accept(0)
    (submit,) = machine.submits
    # The first byte of a character has no text yet.
    machine.give(submit, 0, TOKENIZER.encode("é").ids[0])
    machine.dispatcher.add("other")
    model = card(tokenizer_hashes=FILES)
    other = Welcome(version=WIRE_VERSION, epoch=(1, 1), model=model, replica="other", features=FEATURES)
    machine.dispatcher.welcome("other", other)
    machine.dispatcher.status(ENGINE, msgspec.structs.replace(STATUS, draining=True))
    machine.take()
    assert machine.submits == [submit], "it is not moved"
    assert echoed not in machine.ends


def test_requests_without_output_are_answered_by_the_next_epoch() -> None:
    machine, (prefilling, queued, not_accepted, streaming) = serving(4, continues=False)
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
@pytest.mark.parametrize("continues", [True, False])
def test_tokens_without_text_outlive_their_engine(params: dict[str, Any], continues: bool) -> None:
    machine, _ = serving(0, continues=continues)
    request_id = machine.ask(1, **params)
    machine.accept(0)
    # The first byte of a character, and with stop strings also the beginning of one.
    given = TOKENIZER.encode("yé" if params else "é").ids[:-1]
    for index, token in enumerate(given):
        machine.give(machine.submits[0], index, token)
    assert machine.texts == {}
    machine.kill_engine()
    assert not machine.ends
    machine.start_engine(2)
    (again,) = machine.submits
    assert again.output == array("i", given).tobytes()
    machine.give(again, len(given), TOKENIZER.encode("é").ids[1])
    machine.give_token(again, len(given) + 1, "b", "length")
    end = machine.ends[request_id]
    assert isinstance(end, Finished)
    whole = "yéb" if params else "éb"
    assert (machine.texts[request_id], end.completion_tokens) == (whole, len(given) + 2)
    assert [one.offset for one in machine.scored] == ([0, 1, 1, 2] if "logprobs" in params else [])


def test_tokens_without_text_do_not_survive_a_change_of_the_tokenizer() -> None:
    machine, _ = serving(0)
    request_id = machine.ask(1)
    machine.give(machine.submits[0], 0, TOKENIZER.encode("é").ids[0])
    machine.kill_engine()
    others = {"tokenizer.json": "b" * 64}
    machine.dispatcher.set_files_in_use(others)
    machine.start_engine(2, tokenizer_hashes=others)
    machine.take()
    (again,) = machine.submits
    assert again.output == b""
    machine.give_token(again, 0, "a", "length")
    assert machine.texts == {request_id: "a"}


def test_the_seed_and_the_order_of_resubmitted_requests_stay() -> None:
    machine, _ = serving(3)
    before = [(submit.params.seed, submit.prompt) for submit in machine.submits]
    machine.kill_engine()
    machine.start_engine(2)
    assert [(submit.params.seed, submit.prompt) for submit in machine.submits] == before


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
    assert failure(machine, request_id) == ("engine_unavailable", "no engine could take the request for 60 s; retry")
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
    late = generate_of(id=b"l" * 16, prompt="Hi", params=SamplingParams())
    assert not machine.session.begin(late)
    machine.take()
    assert failure(machine, late.id)[0] == NOT_TAKEN, "the frontend holds them"


def test_a_prompt_that_is_encoded_during_the_restart_waits_for_it() -> None:
    machine, _ = serving(0)
    request = generate_of(id=b"l" * 16, prompt="Hi", params=SamplingParams())
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
    machine.start_engine(1)
    assert len(machine.submits) == 3 and not machine.ends.keys() & {streaming, silent}


def give_text(machine: Machine, submit: Submit, text: str, finish: FinishReason | None = None) -> None:
    """Give the tokens of an ASCII text behind those that the request has."""
    first = len(submit.output) // 4
    for index, character in enumerate(text, first):
        machine.give_token(submit, index, character, finish if index == first + len(text) - 1 else None, cached=index)


def test_a_stream_goes_on_where_its_engine_died() -> None:
    machine, (request_id,) = serving(1)
    machine.accept(0)
    (first,) = machine.submits
    give_text(machine, first, "abc")
    machine.kill_engine()
    assert not machine.ends
    machine.start_engine(2)
    (again,) = machine.submits
    assert again == msgspec.structs.replace(
        first, id=again.id, output=array("i", TOKENIZER.encode("abc").ids).tobytes()
    )
    assert again.id != first.id
    machine.accept(0)
    give_text(machine, first, "xyz", "stop")
    give_text(machine, again, "de", "length")
    end = machine.ends[request_id]
    assert isinstance(end, Finished)
    assert (machine.texts[request_id], end.completion_tokens, end.continued) == ("abcde", 5, 1)
    assert end.cached_tokens == 0, "as the first engine has found them"
    assert (machine.accepted, machine.continued) == ([request_id], [request_id])


def test_a_prediction_goes_on_and_its_counts_are_added() -> None:
    machine, _ = serving(0)
    predicted = TOKENIZER.encode("abcd").ids
    request_id = machine.ask(0, prediction="abcd")
    machine.accept(0)
    (first,) = machine.submits
    machine.give(first, 0, predicted[0], predicted=(0, 1))
    machine.give(first, 1, predicted[1], predicted=(2, 3))
    machine.kill_engine()
    machine.start_engine(2)
    machine.accept(0)
    (again,) = machine.submits
    assert first.prediction == again.prediction == array("i", predicted).tobytes()
    machine.give(again, 2, predicted[2], predicted=(1, 0))
    machine.give(again, 3, predicted[3], "length", predicted=(1, 4))
    end = machine.ends[request_id]
    assert isinstance(end, Finished)
    assert (machine.texts[request_id], end.completion_tokens) == ("abcd", 4)
    assert (end.accepted_prediction_tokens, end.rejected_prediction_tokens) == (3, 7)


def test_without_continuation_a_stream_ends_in_an_error() -> None:
    machine, (request_id,) = serving(1, continues=False)
    give_text(machine, machine.submits[0], "abc")
    machine.kill_engine()
    assert failure(machine, request_id) == ("engine_unavailable", "the connection to the engine was lost")


def test_held_back_text_and_stop_strings_reach_over_a_loss() -> None:
    machine, _ = serving(0)
    request_id = machine.ask(1, stop=("halt",))
    give_text(machine, machine.submits[0], "ok ha")
    assert machine.texts[request_id] == "ok "
    machine.kill_engine()
    machine.start_engine(2)
    give_text(machine, machine.submits[0], "lt")
    end = machine.ends[request_id]
    assert isinstance(end, Finished)
    assert (machine.texts[request_id], end.matched_stop) == ("ok ", "halt")


def test_a_stop_string_before_min_tokens_is_text_also_behind_a_loss() -> None:
    machine, _ = serving(0)
    request_id = machine.ask(1, stop=("b",), min_tokens=4)
    give_text(machine, machine.submits[0], "ab")
    machine.kill_engine()
    machine.start_engine(2)
    give_text(machine, machine.submits[0], "bb")
    end = machine.ends[request_id]
    assert isinstance(end, Finished)
    assert (machine.texts[request_id], end.matched_stop, end.completion_tokens) == ("abb", "b", 4)


def test_every_choice_of_a_request_moves_alone() -> None:
    machine, (one, two, three) = serving(3)
    give_text(machine, machine.submits[0], "ab")
    give_text(machine, machine.submits[1], "c")
    give_text(machine, machine.submits[2], "d", "length")
    machine.kill_engine()
    machine.start_engine(2)
    assert [len(submit.output) // 4 for submit in machine.submits] == [2, 1]
    assert list(machine.ends) == [three]
    for submit, text in zip(machine.submits, ("x", "yz"), strict=True):
        give_text(machine, submit, text, "length")
    assert [machine.texts[request_id] for request_id in (one, two, three)] == ["abx", "cyz", "d"]


def test_a_loss_behind_sixteen_tokens_does_not_count() -> None:
    machine, _ = serving(0)
    request_id = machine.ask(1, max_tokens=200)
    for epoch in range(2, 6):
        give_text(machine, machine.submits[0], "x" * 16)
        machine.kill_engine()
        machine.start_engine(epoch)
    give_text(machine, machine.submits[0], "x" * 15)
    machine.kill_engine()
    machine.start_engine(7)
    assert not machine.ends
    machine.kill_engine()
    assert "second engine to be lost" in failure(machine, request_id)[1]


def test_the_end_of_a_drain_does_not_count_as_a_loss() -> None:
    machine, (request_id,) = serving(1)
    for epoch in range(2, 6):
        machine.dispatcher.status(ENGINE, msgspec.structs.replace(STATUS, draining=True))
        machine.kill_engine()
        machine.start_engine(epoch)
    give_text(machine, machine.submits[0], "x", "length")
    assert machine.texts == {request_id: "x"}


def test_deadline_and_priority_hold_for_a_continued_request() -> None:
    machine, _ = serving(0)
    machine.dispatcher.unix_ms = UNIX_MS
    timed = machine.ask(0, deadline_ms=UNIX_MS + 5000, priority=3, max_tokens=99)
    give_text(machine, machine.submits[0], "a")
    machine.kill_engine()
    machine.pass_time(2)
    machine.start_engine(2)
    assert [(submit.remaining_ms, submit.priority) for submit in machine.submits] == [(3000, 3)]
    give_text(machine, machine.submits[0], "a" * 16)
    machine.kill_engine()
    machine.pass_time(3)
    assert failure(machine, timed)[0] == "deadline_exceeded"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer_hashes": {"tokenizer.json": "b" * 64}}, "tokenizer files changed (tokenizer.json)"),
        ({"revision": "r2"}, "revision changed from r1 to r2"),
        ({"vocab_size": 600}, "vocabulary changed from 512 to 600"),
        ({"max_model_len": 9}, "may need 10 tokens, and max_model_len is 9 now"),
    ],
)
def test_another_model_does_not_continue_an_answer(changes: dict[str, Any], reason: str) -> None:
    machine, (request_id,) = serving(1)
    give_text(machine, machine.submits[0], "a")
    machine.kill_engine()
    assert not machine.ends, "its own model may come back"
    machine.start_engine(2, **changes)
    machine.take()
    code, message = failure(machine, request_id)
    assert code == "model_changed" and reason in message


@pytest.mark.parametrize(("before", "now"), [("", ""), ("", "r1"), ("r1", "")])
def test_an_answer_does_not_go_on_between_weights_of_which_one_is_unknown(before: str, now: str) -> None:
    machine = Machine()
    machine.start_engine(1, revision=before)
    request_id, unseen = machine.ask(0), machine.ask(1)
    give_text(machine, machine.submits[0], "a" * 16)
    machine.kill_engine()
    machine.start_engine(2, revision=now)
    machine.take()
    code, message = failure(machine, request_id)
    assert code == "model_changed" and "could not determine its model's revision" in message
    give_text(machine, machine.submits[0], "b", "length")
    assert machine.texts[unseen] == "b", "nothing of it was generated before"


def test_a_model_with_another_name_and_the_same_weights_continues_an_answer() -> None:
    machine, (request_id,) = serving(1)
    give_text(machine, machine.submits[0], "a")
    machine.kill_engine()
    machine.start_engine(2, name="other")
    give_text(machine, machine.submits[0], "b", "length")
    assert machine.texts == {request_id: "ab"}


def test_an_answer_that_nobody_has_seen_begins_again_with_another_model() -> None:
    machine, (request_id,) = serving(1)
    machine.give(machine.submits[0], 0, TOKENIZER.encode("é").ids[0])
    machine.kill_engine()
    machine.start_engine(2, revision="r2")
    machine.take()
    (again,) = machine.submits
    assert again.output == b""
    give_text(machine, again, "b", "length")
    assert machine.texts == {request_id: "b"}


def test_prompt_scores_never_come_twice() -> None:
    machine, _ = serving(0)
    request_id = machine.ask(1, prompt_logprobs=0)
    machine.accept(0)
    prompt = TOKENIZER.encode("Hi").ids
    machine.dispatcher.prompt_scored(ENGINE, PromptLogprobs(machine.submits[0].id, 1, scores(prompt[1:], 0)))
    machine.kill_engine()
    machine.start_engine(2)
    (again,) = machine.submits
    machine.dispatcher.prompt_scored(ENGINE, PromptLogprobs(again.id, 1, scores(prompt[1:], 0)))
    machine.give_token(again, 0, "a")
    machine.give_token(again, 1, "b", "length")
    assert [one.token_id for one in machine.prompt_scored] == prompt
    assert machine.texts == {request_id: "ab"}


def full(machine: Machine, submit: Submit) -> None:
    machine.dispatcher.failed(ENGINE, Failed(submit.id, "queue_full", "full"))
    machine.take()


def test_a_continued_request_that_is_refused_waits_ahead_of_new_ones() -> None:
    machine, (request_id,) = serving(1)
    give_text(machine, machine.submits[0], "a")
    machine.kill_engine()
    machine.start_engine(2)
    full(machine, machine.submits[0])
    assert not machine.ends
    new = machine.ask(5)
    assert len(machine.submits) == 1, "it waits behind the continued one"
    machine.pass_time(0.5)
    _, again, newer = machine.submits
    assert (bool(again.output), bool(newer.output)) == (True, False)
    full(machine, again)
    full(machine, newer)
    assert failure(machine, new)[0] == "queue_full"
    machine.pass_time(0.5)
    give_text(machine, machine.submits[-1], "b", "length")
    assert machine.texts == {request_id: "ab"}


def test_a_silent_replica_loses_its_streams_to_another_one() -> None:
    machine = Machine(stale_seconds=5.0)
    machine.start_engine(1)
    request_id = machine.ask(0)
    give_text(machine, machine.submits[0], "ab")
    machine.dispatcher.add("other")
    model = card(tokenizer_hashes=FILES)
    machine.dispatcher.replicas.now += 6
    other = Welcome(version=WIRE_VERSION, epoch=(1, 1), model=model, replica="other", features=FEATURES)
    machine.dispatcher.welcome("other", other)
    machine.pass_time(0)
    first, aborted, again = machine.at_engine
    assert aborted == Abort(first.id) and isinstance(again, Submit) and len(again.output) == 8
    assert request_id not in machine.ends
