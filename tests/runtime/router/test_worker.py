"""The worker between a fake frontend and a fake scheduler, on the wire."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from minisgl.errors import TokenizerError
from minisgl.grammar.build import build
from minisgl.parsing.answer_grammar import answer_grammar
from minisgl.router.config import LocalEngine, TokenizerConfig
from minisgl.router.worker import ENCODER_BYTES, Worker, run
from minisgl.tokenizer import answer_constraints
from minisgl.tokenizer.file_hashes import hash_tokenizer_files
from minisgl.tokenizer.prompt_encoder import PromptEncoder
from minisgl.wire.messages import (
    FEATURES,
    WIRE_VERSION,
    Abort,
    Ack,
    Failed,
    Flush,
    Flushed,
    Hello,
    ModelCard,
    SamplingParams,
    Submit,
    TokenLogprobs,
    Tokens,
    Welcome,
)
from minisgl.wire.text import (
    NOT_TAKEN,
    Accepted,
    Cancel,
    ChatMessage,
    RequestsWait,
    StructuredOutput,
    TextFailed,
    Texts,
    WorkerState,
)
from support.frontend.fake_frontend import FakeFrontend
from support.frontend.fake_scheduler import WAIT_SECONDS, FakeScheduler, answer_with, card, row
from support.frontend.served import eventually
from support.tiny_tokenizers import CHATML, byte_level, write_directory

M = TypeVar("M", bound=msgspec.Struct)

TOKENIZER = byte_level()
TEMPLATE = "{% if messages[0].content == 'bad' %}{{ raise_exception('bad message') }}{% endif %}" + CHATML


class Stack:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.scheduler_address = f"ipc://{path}/scheduler"
        self.frontend_address = f"ipc://{path}/frontend"
        self.scheduler = self.start_scheduler()
        self.frontend = FakeFrontend(self.frontend_address)

    def card(self, name: str = "tiny") -> ModelCard:
        return card(name, tokenizer_hashes=hash_tokenizer_files(self.path / "model"))

    def start_scheduler(self, name: str = "tiny", epoch: tuple[int, int] = (1, 1), **options: Any) -> FakeScheduler:
        answer = answer_with(TOKENIZER.encode("xyz").ids)
        return FakeScheduler(self.scheduler_address, self.card(name), answer, epoch=epoch, **options)

    def config(self, **changes: Any) -> TokenizerConfig:
        return TokenizerConfig(
            engines=LocalEngine(scheduler_address=self.scheduler_address, model=str(self.path / "model")),
            frontend_address=self.frontend_address,
            **changes,
        )

    def wait_until_served(self) -> WorkerState:
        return self.frontend.wait_for(WorkerState, lambda state: state.model is not None)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    write_directory(tmp_path / "model", TOKENIZER, chat_template=TEMPLATE, generation_config={"top_p": 0.5})
    made = Stack(tmp_path)
    yield made
    made.frontend.close()
    made.scheduler.close()


@contextlib.contextmanager
def running(worker: Worker) -> Iterator[Worker]:
    thread = threading.Thread(target=worker.serve)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join()


@pytest.fixture
def worker(stack: Stack) -> Iterator[Worker]:
    with running(Worker(stack.config())) as made:
        yield made


def test_a_process_serves_until_sigterm(stack: Stack) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=run, args=(stack.config(), ready.set))
    process.start()
    assert ready.wait(WAIT_SECONDS)
    state = stack.wait_until_served()
    assert state.model is not None
    assert state.model.card == stack.card()
    assert state.model.defaults.top_p == 0.5
    request = stack.frontend.generate(1)
    text, end = stack.frontend.wait_for_end(request)
    assert (text, end.reason, end.completion_tokens) == ("xyz", "length", 3)
    process.terminate()
    process.join(WAIT_SECONDS)
    assert process.exitcode == 0


def test_requests_follow_the_hello_in_order(stack: Stack, worker: Worker) -> None:
    stack.wait_until_served()
    (hello,) = stack.scheduler.received(Hello)
    assert hello == Hello(WIRE_VERSION, "tokenizer0")
    requests = [stack.frontend.generate(n, params=SamplingParams(max_tokens=1)) for n in range(200)]
    submits = stack.scheduler.wait_for(Submit, 200)
    assert [submit.id for submit in submits] == requests
    assert stack.frontend.wait_for_end(requests[-1])[0] == "x"


@pytest.mark.parametrize("size", ENCODER_BYTES[:-1])
def test_a_long_prompt_does_not_delay_other_requests(
    stack: Stack, worker: Worker, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    stack.wait_until_served()
    assert worker._router.tokenizer is not None
    # The length of a prompt proves nothing: it is encoded in any case.
    monkeypatch.setattr(worker._router.tokenizer.encoder, "longest_token", 0)
    goes_on = threading.Event()
    encode_texts = PromptEncoder._encode_texts
    encoded: list[list[str]] = []

    def slow_for_long_ones(encoder: PromptEncoder, texts: list[str]) -> Any:
        encoded.append(texts)
        assert max(map(len, texts)) < size or goes_on.wait(WAIT_SECONDS)
        return encode_texts(encoder, texts)

    monkeypatch.setattr(PromptEncoder, "_encode_texts", slow_for_long_ones)
    long = "x" * (size + 1)
    first, *others = [stack.frontend.generate(n, long) for n in range(1, 9)]
    another = stack.frontend.generate(9, long + "y")
    # Not alone, so that no loop encodes them at once.
    shorter = stack.frontend.generate(10, "x" * (size - 1000)), stack.frontend.generate(11)
    ends = stack.frontend.wait_for_ends(*shorter)
    assert [ends[one][0] for one in shorter] == ["", "xyz"]
    goes_on.set()
    ends = stack.frontend.wait_for_ends(first, *others, another)
    assert {end.code for _, end in ends.values()} == {"context_length_exceeded"}
    texts = [text for together in encoded for text in together]
    assert texts.count(long + "y") == 1
    assert texts.count(long) <= 2, "once, and once more for those that came later"


def test_a_grammar_that_takes_long_to_build_does_not_delay_running_answers(
    stack: Stack, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = TOKENIZER.encode("xy").ids
    stack.scheduler.answer = lambda submit: [Ack(submit.id), row(submit.id, 0, x)]
    stack.wait_until_served()
    running = stack.frontend.generate(1, params=SamplingParams())
    stack.frontend.wait_for(Texts)
    begun, goes_on = threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> str:
        begun.set()
        assert goes_on.wait(WAIT_SECONDS)
        return answer_grammar(*arguments, **options)

    monkeypatch.setattr(answer_constraints, "answer_grammar", slow)
    constraint = StructuredOutput("regex", "[0-9]+")
    constrained = stack.frontend.generate(2, structured_output=constraint)
    assert begun.wait(WAIT_SECONDS)
    stack.scheduler.send(row(running, 1, y))
    assert [text for _, text in stack.frontend.wait_for(Texts).rows()] == ["y"]
    goes_on.set()
    stack.frontend.wait_for(Accepted, lambda accepted: accepted.id == constrained)
    assert [submit.constraint.grammar for submit in stack.scheduler.wait_for(Submit, 2)] == ["", build(constraint)]


def test_an_error_fails_only_its_request(stack: Stack, worker: Worker) -> None:
    stack.wait_until_served()
    bad = stack.frontend.generate(1, None, messages=(ChatMessage("user", "bad"),))
    long = stack.frontend.generate(2, "x" * 1000)
    good = stack.frontend.generate(3, None, messages=(ChatMessage("user", "good"),))
    failed = {m.id: m.code for m in (stack.frontend.wait_for(TextFailed), stack.frontend.wait_for(TextFailed))}
    assert failed == {bad: "chat_template_error", long: "context_length_exceeded"}
    assert stack.frontend.wait_for_end(good)[0] == "xyz"


def test_a_cancelled_request_is_aborted_and_forgotten(stack: Stack, worker: Worker) -> None:
    stack.scheduler.answer = lambda submit: [Ack(submit.id), row(submit.id, 0, TOKENIZER.encode("x").ids[0])]
    stack.wait_until_served()
    request = stack.frontend.generate(1, params=SamplingParams())
    stack.frontend.wait_for(Texts)
    stack.frontend.send(Cancel(request))
    assert stack.scheduler.wait_for(Abort) == [Abort(request)]
    # Messages sent before the abort arrived, and a request that shows that they have been read.
    stack.scheduler.send(row(request, 1, 5), Failed(request, "deadline_exceeded", "late"))
    stack.scheduler.answer = answer_with(TOKENIZER.encode("ok").ids)
    after = stack.frontend.generate(2, params=SamplingParams(max_tokens=2))
    assert stack.frontend.wait_for_end(after)[0] == "ok"
    assert len(worker._session) == 0


def lose_the_engine(stack: Stack) -> tuple[bytes, bytes]:
    """Lose an engine that has two requests. Returns the one without output, and the one whose first token is "x"."""
    stack.scheduler.answer = lambda submit: [Ack(submit.id)]
    stack.wait_until_served()
    waiting, streaming = stack.frontend.generate(1), stack.frontend.generate(2)
    stack.scheduler.wait_for(Submit, 2)
    stack.scheduler.send(row(streaming, 0, TOKENIZER.encode("x").ids[0]))
    stack.frontend.wait_for(Texts)
    stack.scheduler.close()
    return waiting, streaming


def test_when_the_engine_dies_all_requests_wait_for_the_next_epoch(stack: Stack, worker: Worker) -> None:
    waiting, streaming = lose_the_engine(stack)
    assert stack.frontend.wait_for(WorkerState, lambda state: state.model is None).reason
    during_the_restart = stack.frontend.generate(3)
    assert stack.frontend.wait_for_end(during_the_restart)[1].code == NOT_TAKEN
    stack.scheduler = stack.start_scheduler("next", (1, 2))
    ends = stack.frontend.wait_for_ends(waiting, streaming)
    text, end = ends[waiting]
    assert (text, end.completion_tokens) == ("xyz", 3)
    text, end = ends[streaming]
    assert (text, end.completion_tokens, end.continued) == ("yz", 3, 1), "it goes on behind its first token"
    assert waiting not in stack.frontend.accepted, "it is accepted once"
    submits = stack.scheduler.received(Submit)
    assert [len(submit.output) // 4 for submit in submits] == [1, 0], "the one with tokens goes first"
    assert not {submit.id for submit in submits} & {waiting, streaming}
    state = stack.frontend.wait_for(WorkerState, lambda state: state.retried > 1)
    assert (state.retried, state.model and state.model.epoch) == (2, (1, 2))


def test_without_continuation_only_requests_without_output_wait_for_the_next_epoch(stack: Stack) -> None:
    with running(Worker(stack.config(continues=False))):
        waiting, streaming = lose_the_engine(stack)
        _, failed = stack.frontend.wait_for_end(streaming)
        assert (failed.code, failed.message) == ("engine_unavailable", "the connection to the engine was lost")
        stack.scheduler = stack.start_scheduler("next", (1, 2))
        assert stack.frontend.wait_for_end(waiting)[0] == "xyz"


def test_a_request_waits_for_a_restart_no_longer_than_the_queue_timeout(stack: Stack) -> None:
    with running(Worker(stack.config(queue_seconds=0.2))):
        stack.scheduler.answer = lambda submit: [Ack(submit.id)]
        stack.wait_until_served()
        request = stack.frontend.generate(1)
        stack.frontend.wait_for(Accepted)
        stack.scheduler.close()
        _, failed = stack.frontend.wait_for_end(request)
        assert failed.code == "engine_unavailable"
        assert failed.message == "no engine could take the request for 0.2 s; retry"


def test_a_cancelled_request_does_not_wait_for_the_restart(stack: Stack, worker: Worker) -> None:
    stack.scheduler.answer = lambda submit: [Ack(submit.id)]
    stack.wait_until_served()
    request = stack.frontend.generate(1)
    stack.frontend.wait_for(Accepted)
    stack.scheduler.close()
    stack.frontend.wait_for(WorkerState, lambda state: state.model is None)
    stack.frontend.send(Cancel(request))
    # Messages of a frontend are read in order, but those of a scheduler may be read before them.
    stack.frontend.send(RequestsWait(True))
    eventually(lambda: worker._router._dispatcher.requests_wait)
    stack.scheduler = stack.start_scheduler(epoch=(1, 2))
    stack.wait_until_served()
    after = stack.frontend.generate(2)
    assert stack.frontend.wait_for_end(after)[0] == "xyz"
    assert [submit.id for submit in stack.scheduler.received(Submit)] == [after]


def test_a_silent_engine_gets_requests_and_its_state_is_not_reported_again(
    stack: Stack, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.router.replicas.STALE_SECONDS", 0.0)
    stack.scheduler.sends_status = False
    assert stack.wait_until_served().status is None
    assert stack.frontend.wait_for_end(stack.frontend.generate(1))[0] == "xyz"
    stack.frontend.send(Flush(b"f" * 16))
    stack.scheduler.wait_for(Flush)
    stack.scheduler.send(Flushed(b"f" * 16, 3))
    message: Any = stack.frontend.wait_for(msgspec.Struct, lambda message: not isinstance(message, Texts))
    assert message == Flushed(b"f" * 16, 3), "no state was reported meanwhile"


def test_a_frontend_that_ends_without_requests_is_not_reported(
    stack: Stack, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    stack.wait_until_served()
    stack.frontend.send(RequestsWait(True))
    eventually(lambda: worker._router._dispatcher.requests_wait)
    stack.frontend.close()
    eventually(lambda: not worker._router._dispatcher.requests_wait)
    stack.frontend = FakeFrontend(stack.frontend_address)
    stack.wait_until_served()
    assert "the frontend was lost" not in caplog.text


def test_all_requests_are_aborted_when_the_frontend_dies(
    stack: Stack, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    stack.scheduler.answer = lambda submit: [Ack(submit.id)]
    stack.wait_until_served()
    requests = [stack.frontend.generate(n) for n in range(3)]
    stack.scheduler.wait_for(Submit, 3)
    stack.frontend.send(RequestsWait(True))
    eventually(lambda: worker._router._dispatcher.requests_wait)
    stack.frontend.close()
    assert {abort.id for abort in stack.scheduler.wait_for(Abort, 3)} == set(requests)
    assert not worker._router._dispatcher.requests_wait
    assert "the frontend was lost; 3 requests end" in caplog.text
    stack.frontend = FakeFrontend(stack.frontend_address)
    stack.wait_until_served()


def test_an_engine_with_other_tokenizer_files_gets_no_requests(stack: Stack, worker: Worker) -> None:
    stack.wait_until_served()
    agreeing = msgspec.structs.replace(stack.scheduler.welcome, epoch=(1, 2))
    stack.scheduler.send(agreeing)
    state = stack.frontend.wait_for(WorkerState, lambda state: state.model is not None and state.model.epoch == (1, 2))
    assert state.model is not None
    assert state.model.card == stack.card()
    other = card(tokenizer_hashes={"tokenizer.json": "00"})
    stack.scheduler.send(msgspec.structs.replace(agreeing, model=other))
    state = stack.frontend.wait_for(WorkerState, lambda state: "restart the server" in state.reason)
    assert state.model is None
    assert "tokenizer.json" in state.reason
    assert stack.frontend.wait_for_end(stack.frontend.generate(1))[1].code == NOT_TAKEN


@pytest.mark.parametrize(
    "message",
    [
        Failed(b"", "wire_version", "wire version 1 is not understood"),
        Welcome(version=WIRE_VERSION + 5, epoch=(1, 1), model=card(), features=FEATURES),
    ],
)
def test_an_engine_of_another_version_is_reported(stack: Stack, worker: Worker, message: Any) -> None:
    stack.wait_until_served()
    stack.scheduler.send(message)
    assert "version" in stack.frontend.wait_for(WorkerState, lambda state: state.model is None).reason


def test_an_engine_of_the_version_before_is_greeted_in_its_version(stack: Stack, worker: Worker) -> None:
    stack.wait_until_served()
    stack.scheduler.close()
    stack.frontend.wait_for(WorkerState, lambda state: state.model is None)
    stack.scheduler = stack.start_scheduler("older", (1, 2), newest_version=WIRE_VERSION - 1)
    stack.frontend.wait_for(WorkerState, lambda state: state.model is not None)
    assert [hello.version for hello in stack.scheduler.wait_for(Hello, 2)][-2:] == [WIRE_VERSION, WIRE_VERSION - 1]


def test_an_engine_that_refuses_both_versions_is_not_asked_again(stack: Stack, worker: Worker) -> None:
    stack.wait_until_served()
    stack.scheduler.close()
    stack.frontend.wait_for(WorkerState, lambda state: state.model is None)
    stack.scheduler = stack.start_scheduler("newer", (1, 2), newest_version=WIRE_VERSION - 2)
    stack.frontend.wait_for(WorkerState, lambda state: "wire version 0 is not supported" in state.reason)
    assert [hello.version for hello in stack.scheduler.received(Hello)][-2:] == [WIRE_VERSION, WIRE_VERSION - 1]


def test_a_broken_tokens_message_fails_the_answers(stack: Stack, worker: Worker) -> None:
    stack.scheduler.answer = lambda submit: [
        Ack(submit.id),
        Tokens(ids=submit.id, index=b"", token=b"", finish=b"\0", cached=b""),
    ]
    stack.wait_until_served()
    _, failed = stack.frontend.wait_for_end(stack.frontend.generate(1))
    assert failed.code == "engine_error"


def test_an_answer_goes_on_behind_a_broken_tokens_message(stack: Stack, worker: Worker) -> None:
    x = TOKENIZER.encode("x").ids[0]
    rest = stack.scheduler.answer
    broken = Tokens(ids=b"", index=b"", token=b"", finish=b"\0", cached=b"")
    stack.scheduler.answer = lambda submit: (
        rest(submit) if submit.output else [Ack(submit.id), row(submit.id, 0, x), broken]
    )
    stack.wait_until_served()
    text, end = stack.frontend.wait_for_end(stack.frontend.generate(1))
    assert (text, end.completion_tokens, end.continued) == ("xyz", 3, 1)


def test_an_engine_that_sent_broken_scores_keeps_its_other_requests(stack: Stack, worker: Worker) -> None:
    stack.scheduler.answer = lambda submit: [Ack(submit.id)]
    stack.wait_until_served()
    plain = stack.frontend.generate(1)
    scored = stack.frontend.generate(2, params=SamplingParams(max_tokens=3, logprobs=0))
    finished = stack.frontend.generate(3, params=SamplingParams(max_tokens=1))
    stack.scheduler.wait_for(Submit, 3)
    tokens = TOKENIZER.encode("xyz").ids
    rows = [row(plain, 0, tokens[0]), row(scored, 0, tokens[1]), row(finished, 0, tokens[2], "length")]
    columns = ("ids", "index", "token", "finish", "cached")
    stack.scheduler.send(
        Tokens(
            **{name: b"".join(getattr(each, name) for each in rows) for name in columns},
            logprobs={1: TokenLogprobs(b"", b"", b"")},
        ),
        row(plain, 1, tokens[1], "length"),
    )
    ends = stack.frontend.wait_for_ends(plain, scored, finished)
    assert (ends[plain][0], ends[plain][1].completion_tokens) == ("xy", 2)
    assert (ends[finished][0], ends[finished][1].reason) == ("z", "length")
    assert ends[scored][1].code == "engine_error"
    assert stack.scheduler.wait_for(Abort) == [Abort(scored)]
    assert len(stack.scheduler.received(Hello)) == 1, "the connection stays"


def test_stopping_a_worker_that_has_ended_is_not_an_error(stack: Stack) -> None:
    worker = Worker(stack.config())
    worker.stop()
    worker.serve()
    worker.stop()


def test_a_missing_tokenizer_is_an_error_at_once(tmp_path: Path) -> None:
    engine = LocalEngine(scheduler_address="ipc:///nowhere", model=str(tmp_path))
    config = TokenizerConfig(engines=engine, frontend_address="ipc:///nowhere")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        run(config)
