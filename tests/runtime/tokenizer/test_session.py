from __future__ import annotations

from array import array
from itertools import permutations
from typing import Any

import msgspec
import numpy as np
import pytest

from minisgl.errors import PromptError
from minisgl.tokenizer.logprobs import EchoLogprobs
from minisgl.tokenizer.session import Session
from minisgl.tokenizer.token_bytes import TokenBytes
from minisgl.wire.messages import (
    Abort,
    Ack,
    Failed,
    FinishReason,
    FirstTokenWait,
    PromptLogprobs,
    SamplingParams,
    Submit,
    TokenLogprobs,
    Tokens,
)
from minisgl.wire.text import (
    NOT_TAKEN,
    Accepted,
    Cancel,
    Finished,
    Generate,
    RequestOptions,
    ScoredToken,
    TextFailed,
    Texts,
)
from support.frontend.fake_scheduler import card, row
from support.frontend.scored_answers import scores
from support.messages import generate_of, submit_of
from support.tiny_tokenizers import byte_fallback, byte_level

TOKENIZER = byte_level()
TABLE = TokenBytes(TOKENIZER)
PROMPT = array("i", TOKENIZER.encode("Hello").ids)
ID = b"a" * 16
EOS = TOKENIZER.token_to_id("<|im_end|>")


def generate(request_id: bytes = ID, options: RequestOptions | None = None, **params: Any) -> Generate:
    return Generate(id=request_id, prompt="Hello", params=SamplingParams(**params), options=options or RequestOptions())


def started(request_id: bytes = ID, session: Session | None = None, **params: Any) -> Session:
    """Return a session whose request is accepted, with no message left to send."""
    if session is None:
        session = Session(TABLE)
        session.open(card())
    assert session.begin(generate(request_id, **params))
    session.encoded(request_id, PROMPT)
    session.acked(Ack(request_id))
    session.take_to_scheduler()
    session.take_to_frontend()
    return session


def answer(session: Session, tokens: list[int], finish: FinishReason | None = None) -> tuple[str, list[Finished]]:
    """Deliver one token per step, the last with `finish`. Returns the text and the ends of the answer."""
    for index, token in enumerate(tokens):
        session.tokens(row(ID, index, token, finish if index == len(tokens) - 1 else None, cached=2))
    messages = session.take_to_frontend()
    assert all(isinstance(message, Texts) for message in messages)
    texts = [message for message in messages if isinstance(message, Texts)]
    return "".join(t for m in texts for _, t in m.rows()), [end for m in texts for end in m.finished]


def test_a_request_from_text_to_tokens() -> None:
    session = Session(TABLE)
    session.open(card(max_model_len=100))
    assert session.begin(generate(max_tokens=7, temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, seed=-5))
    assert not session.take_to_scheduler()
    session.encoded(ID, PROMPT)
    assert session.take_to_scheduler() == [
        submit_of(
            id=ID,
            prompt=PROMPT.tobytes(),
            max_tokens=7,
            temperature=0.5,
            top_k=0,
            top_p=0.9,
            min_p=0.1,
            seed=-5,
        )
    ]
    assert session.take_to_frontend() == []
    session.acked(Ack(ID))
    assert session.take_to_frontend() == [Accepted(ID, len(PROMPT))]


def submitted(max_model_len: int, **params: Any) -> Submit | TextFailed:
    session = Session(TABLE)
    session.open(card(max_model_len=max_model_len))
    session.begin(generate(**params))
    session.encoded(ID, PROMPT)
    (message,) = [*session.take_to_scheduler(), *session.take_to_frontend()]
    assert isinstance(message, Submit | TextFailed)
    return message


def test_a_request_without_seed_gets_a_random_one() -> None:
    seeds = {m.params.seed for m in (submitted(99), submitted(99)) if isinstance(m, Submit)}
    assert len(seeds) == 2
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("room", [1, 5])
def test_max_tokens_defaults_to_the_rest_of_the_context(room: int) -> None:
    message = submitted(len(PROMPT) + room)
    assert isinstance(message, Submit)
    assert message.params.max_tokens == room


@pytest.mark.parametrize(("room", "max_tokens"), [(0, None), (-2, None), (3, 4), (-1, 1)])
def test_requests_that_exceed_the_context_are_refused(room: int, max_tokens: int | None) -> None:
    message = submitted(len(PROMPT) + room, max_tokens=max_tokens)
    assert isinstance(message, TextFailed)
    assert message.code == "context_length_exceeded"
    assert f"This model's maximum context length is {len(PROMPT) + room} tokens" in message.message
    assert message.code not in message.message


@pytest.mark.parametrize(
    ("room", "max_tokens", "most"), [(3, 2, 2), (3, 4, 3), (1, 99, 1), (0, 4, None), (-1, 4, None)]
)
def test_soft_limits_generate_what_the_context_leaves(room: int, max_tokens: int, most: int | None) -> None:
    session = Session(TABLE)
    session.open(card(max_model_len=len(PROMPT) + room))
    session.begin(generate(max_tokens=max_tokens, options=RequestOptions(soft_limits=True)))
    session.encoded(ID, PROMPT)
    (message,) = [*session.take_to_scheduler(), *session.take_to_frontend()]
    if most is None:
        assert isinstance(message, TextFailed) and "at least 1 more" in message.message
    else:
        assert isinstance(message, Submit) and message.params.max_tokens == most


@pytest.mark.parametrize(
    ("keep", "max_tokens", "kept"),
    [(None, 1, 5), (3, 1, 3), (99, 1, 5), (-1, 4, 4), (-1, None, 5), (-1, 1, 5), (-1, 7, 1)],
)
def test_a_prompt_keeps_its_last_tokens(keep: int | None, max_tokens: int | None, kept: int) -> None:
    session = Session(TABLE)
    session.open(card(max_model_len=8))
    prompt = array("i", [1, 2, 3, 4, 5])
    options = RequestOptions(truncate_prompt_tokens=keep, echo=True)
    session.begin(generate(max_tokens=max_tokens, options=options))
    session.encoded(ID, prompt)
    (submit,) = session.take_to_scheduler()
    assert isinstance(submit, Submit)
    assert np.frombuffer(submit.prompt, "<i4").tolist() == prompt[-kept:].tolist()
    session.acked(Ack(ID))
    accepted, echo = session.take_to_frontend()
    assert isinstance(accepted, Accepted) and isinstance(echo, Texts)
    assert accepted.prompt_tokens == kept
    assert echo.texts == ["Hello" if keep is None else TOKENIZER.decode(prompt[-kept:].tolist())]


@pytest.mark.parametrize(("keep", "max_tokens", "kept"), [(3, 1, 3), (99, 1, 5), (-1, 4, 4)])
def test_a_prompt_keeps_its_first_tokens_where_the_right_side_is_cut(keep: int, max_tokens: int, kept: int) -> None:
    session = Session(TABLE)
    session.open(card(max_model_len=8))
    prompt = array("i", [1, 2, 3, 4, 5])
    options = RequestOptions(truncate_prompt_tokens=keep, truncation_side="right")
    session.begin(generate(max_tokens=max_tokens, options=options))
    session.encoded(ID, prompt)
    (submit, *_) = session.take_to_scheduler()
    assert isinstance(submit, Submit)
    assert np.frombuffer(submit.prompt, "<i4").tolist() == prompt[:kept].tolist()


def test_stop_tokens_that_the_model_does_not_have_are_left_out() -> None:
    message = submitted(64, stop_token_ids=(4, 512, 3, 2**31 - 1))
    assert isinstance(message, Submit) and message.params.stop_token_ids == (4, 3)


def test_a_truncated_prompt_leaves_room_for_the_answer_or_is_refused() -> None:
    session = Session(TABLE)
    session.open(card(max_model_len=8))
    session.begin(generate(max_tokens=8, options=RequestOptions(truncate_prompt_tokens=-1)))
    session.encoded(ID, PROMPT)
    (failed,) = session.take_to_frontend()
    assert isinstance(failed, TextFailed)
    assert failed.code == "context_length_exceeded"


@pytest.mark.parametrize("bad", [-1, 512])
def test_tokens_outside_the_vocabulary_are_refused(bad: int) -> None:
    session = Session(TABLE)
    session.open(card(vocab_size=512))
    session.begin(generate())
    session.encoded(ID, array("i", [1, bad]))
    (failed,) = session.take_to_frontend()
    assert isinstance(failed, TextFailed)
    assert (failed.code, failed.param) == ("invalid_token", "prompt")
    assert str(bad) in failed.message
    assert not len(session)


@pytest.mark.parametrize("n", range(1, 6))
def test_an_answer_has_max_tokens(n: int) -> None:
    tokens = TOKENIZER.encode(" answer" + "abcdef").ids[:n]
    session = started(max_tokens=n)
    text, (end,) = answer(session, tokens, "length")
    assert text == TOKENIZER.decode(tokens)
    assert (end.reason, end.completion_tokens, end.cached_tokens) == ("length", n, 2)
    assert end.prompt_tokens == len(PROMPT)
    assert not len(session)


@pytest.mark.parametrize("k", range(1, 6))
def test_eos_at_token_k_gives_the_text_of_k_minus_1(k: int) -> None:
    tokens = TOKENIZER.encode("abcdef").ids[: k - 1]
    session = started()
    text, (end,) = answer(session, [*tokens, EOS], "stop")
    assert text == "abcdef"[: k - 1]
    assert (end.reason, end.completion_tokens) == ("stop", k)
    assert session.take_to_scheduler() == []


def test_a_stop_token_that_has_text_is_not_in_the_text() -> None:
    text, (end,) = answer(started(), TOKENIZER.encode("ab").ids, "stop")
    assert text == "a"
    assert end.completion_tokens == 2


def test_eos_in_the_middle_has_no_text() -> None:
    a, b = TOKENIZER.encode("ab").ids
    text, (end,) = answer(started(ignore_eos=True), [a, EOS, b], "length")
    assert text == "ab"
    assert end.completion_tokens == 3


def test_a_stop_string_ends_the_answer() -> None:
    session = started(stop=("lo w",))
    tokens = TOKENIZER.encode("hello world").ids
    text, (end,) = answer(session, tokens)
    assert text == "hel"
    assert end.reason == "stop"
    assert TOKENIZER.decode(tokens[: end.completion_tokens]).startswith("hello w")
    assert "lo w" not in TOKENIZER.decode(tokens[: end.completion_tokens - 1])
    assert session.take_to_scheduler() == [Abort(ID)]
    assert not len(session)


def test_a_stop_string_in_the_last_token_needs_no_abort() -> None:
    session = started(stop=("c",))
    text, (end,) = answer(session, TOKENIZER.encode("abc").ids, "length")
    assert (text, end.reason, end.completion_tokens) == ("ab", "stop", 3)
    assert session.take_to_scheduler() == []


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_text_held_back_for_a_stop_string_comes_at_the_end(finish: FinishReason) -> None:
    tokens = TOKENIZER.encode("ab").ids + ([EOS] if finish == "stop" else [])
    text, (end,) = answer(started(stop=("bc",)), tokens, finish)
    assert (text, end.reason) == ("ab", finish)


def test_a_character_cut_by_max_tokens_becomes_a_replacement_character() -> None:
    text, _ = answer(started(), TOKENIZER.encode("ok 🙂").ids[:-1], "length")
    assert text == "ok �"


def test_late_tokens_are_ignored() -> None:
    session = started(stop=("b",))
    answer(session, TOKENIZER.encode("ab").ids)
    session.tokens(row(ID, 2, TOKENIZER.encode("c").ids[0]))
    session.acked(Ack(ID))
    session.failed(Failed(ID, "deadline_exceeded", "too late"))
    assert session.take_to_frontend() == []


def test_one_message_for_all_requests_of_a_step() -> None:
    other, gone = b"b" * 16, b"c" * 16
    session = started()
    started(other, session)
    a, b = TOKENIZER.encode("ab").ids
    step = Tokens(
        ids=ID + gone + other,
        index=np.zeros(3, "<i4").tobytes(),
        token=np.array([a, b, b], "<i4").tobytes(),
        finish=np.array([0, 0, 2], np.uint8).tobytes(),
        cached=np.zeros(3, "<i4").tobytes(),
    )
    session.tokens(step)
    (texts,) = session.take_to_frontend()
    assert isinstance(texts, Texts)
    assert texts.rows() == [(ID, "a"), (other, "b")]
    assert [end.id for end in texts.finished] == [other]
    assert len(session) == 1


def test_a_repeated_token_counts_once() -> None:
    session = started()
    token = TOKENIZER.encode("a").ids[0]
    for index in (0, 0, 1):
        session.tokens(row(ID, index, token))
    assert len(session.take_to_frontend()) == 2


def test_a_missing_token_fails_the_request() -> None:
    session = started()
    session.tokens(row(ID, 1, 5))
    (failed,) = session.take_to_frontend()
    assert isinstance(failed, TextFailed)
    assert failed.code == "tokens_lost"
    assert session.take_to_scheduler() == [Abort(ID)]


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_end_without_a_finish_reason_fails_the_request(reason: FinishReason) -> None:
    session = started()
    session.tokens(row(ID, 0, -1, reason))
    (failed,) = session.take_to_frontend()
    assert isinstance(failed, TextFailed)
    assert failed.code == "engine_error"
    assert not len(session)


def test_failures_of_scheduler_and_encoder_reach_the_frontend() -> None:
    session = started()
    session.failed(Failed(ID, "queue_full", "later"))
    assert session.take_to_frontend() == [TextFailed(id=ID, code="queue_full", message="later")]
    session.begin(generate())
    session.encoded(ID, PromptError("chat_template_error", "no", "messages"))
    failed = TextFailed(id=ID, code="chat_template_error", message="no", param="messages")
    assert session.take_to_frontend() == [failed]
    assert not len(session)


def test_cancelled_while_it_is_encoded() -> None:
    session = Session(TABLE)
    session.open(card())
    session.begin(generate())
    session.cancel(Cancel(ID))
    session.encoded(ID, PROMPT)
    assert session.take_to_scheduler() == []
    assert session.take_to_frontend() == []
    assert ID not in session


def test_cancelled_while_it_waits_or_runs() -> None:
    session = started()
    session.cancel(Cancel(ID))
    session.cancel(Cancel(ID))
    assert session.take_to_scheduler() == [Abort(ID)]
    assert session.take_to_frontend() == []


def test_requests_are_refused_before_an_engine_is_connected() -> None:
    session = Session(TABLE)
    assert not session.begin(generate())
    (failed,) = session.take_to_frontend()
    assert isinstance(failed, TextFailed)
    assert failed.code == NOT_TAKEN


def test_a_repeated_identifier_is_refused() -> None:
    session = started()
    assert not session.begin(generate())
    (failed,) = session.take_to_frontend()
    assert isinstance(failed, TextFailed)
    assert failed.code == "duplicate_request"
    assert len(session) == 1


def test_all_requests_are_aborted_when_the_frontend_is_lost() -> None:
    session = started()
    session.begin(generate(b"b" * 16))
    session.abort_all()
    assert session.take_to_scheduler() == [Abort(ID)]
    assert session.take_to_frontend() == []
    assert not len(session)


# Log-probabilities, echo, and parameters that the session itself applies


def scored_row(index: int, token: int, finish: FinishReason | None = None, top: int = 1) -> Tokens:
    return msgspec.structs.replace(row(ID, index, token, finish), logprobs={0: scores([token], top)})


def scored_texts(session: Session) -> list[tuple[str, list[ScoredToken]]]:
    messages = [message for message in session.take_to_frontend() if isinstance(message, Texts)]
    return [(text, m.scored.get(n, [])) for m in messages for n, (_, text) in enumerate(m.rows())]


def test_every_parameter_reaches_the_scheduler() -> None:
    params = {
        "stop_token_ids": (3, 4),
        "min_tokens": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {7: 2.0},
        "logprobs": 3,
        "prompt_logprobs": 4,
    }
    message = submitted(99, **params)
    assert isinstance(message, Submit)
    assert {name: getattr(message.params, name) for name in params} == params


@pytest.mark.parametrize(
    ("params", "param"), [({"logit_bias": {512: 1.0}}, "logit_bias"), ({"stop_token_ids": (-1,)}, "stop_token_ids")]
)
def test_ids_outside_the_vocabulary_name_their_field(params: dict[str, Any], param: str) -> None:
    message = submitted(99, **params)
    assert isinstance(message, TextFailed)
    assert (message.code, message.param) == ("invalid_token", param)


def test_scores_come_with_their_text() -> None:
    session = started(logprobs=1, stop=("lo world",))
    tokens = TOKENIZER.encode("Hello there").ids
    for index, token in enumerate(tokens):
        session.tokens(scored_row(index, token, "length" if index == len(tokens) - 1 else None))
    parts = scored_texts(session)
    given = ""
    for text, scored in parts:
        given += text
        assert all(token.offset < len(given) for token in scored), "no token is ahead of its text"
    scored = [token for _, some in parts for token in some]
    assert given == "Hello there"
    assert b"".join(token.text for token in scored) == b"Hello there"
    assert [token.logprob for token in scored] == [-token / 8 for token in tokens]
    assert scored[0].top == [(b"a", -1.0)]


def test_tokens_behind_a_stop_string_are_not_scored() -> None:
    session = started(logprobs=0, stop=("lo",))
    for index, token in enumerate(TOKENIZER.encode("Hello").ids):
        session.tokens(scored_row(index, token, top=0))
    parts = scored_texts(session)
    assert "".join(text for text, _ in parts) == "Hel"
    assert b"".join(token.text for _, scored in parts for token in scored).startswith(b"Hel")
    assert all(token.offset < 3 for _, scored in parts for token in scored)


def test_the_token_that_ends_an_answer_is_not_scored() -> None:
    session = started(logprobs=0)
    session.tokens(scored_row(0, TOKENIZER.encode("a").ids[0]))
    session.tokens(scored_row(1, EOS, "stop"))
    assert [token.text for _, scored in scored_texts(session) for token in scored] == [b"a"]


NO_SCORES = TokenLogprobs(b"", b"", b"")


def ends_in_engine_error(session: Session) -> bool:
    """Return whether the only request has failed, here and at its engine, and nothing else was sent since."""
    (failed,) = session.take_to_frontend()
    assert isinstance(failed, TextFailed)
    return failed.code == "engine_error" and session.take_to_scheduler() == [Abort(ID)] and not len(session)


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {0: NO_SCORES},
        {0: TokenLogprobs(b"1234", b"12", b"")},
        {0: TokenLogprobs(b"12", b"", b"")},
        {0: TokenLogprobs(b"1234", b"123", b"123")},
    ],
)
def test_missing_or_broken_scores_fail_the_request(broken: dict[int, TokenLogprobs]) -> None:
    session = started(logprobs=1)
    session.tokens(msgspec.structs.replace(row(ID, 0, 5), logprobs=broken))
    assert ends_in_engine_error(session)


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_broken_scores_of_one_request_change_no_other_answer(order: tuple[int, ...]) -> None:
    plain, broken, finished = ids = [b"a" * 16, b"b" * 16, b"c" * 16]
    session = started(plain)
    started(broken, session, logprobs=0)
    started(finished, session)
    tokens = TOKENIZER.encode("abc").ids
    session.tokens(
        Tokens(
            ids=b"".join(ids[at] for at in order),
            index=np.zeros(3, "<i4").tobytes(),
            token=np.array([tokens[at] for at in order], "<i4").tobytes(),
            finish=np.array([(0, 0, 1)[at] for at in order], np.uint8).tobytes(),
            cached=np.zeros(3, "<i4").tobytes(),
            logprobs={order.index(1): NO_SCORES},
        )
    )
    failed, texts = session.take_to_frontend()
    assert isinstance(failed, TextFailed) and isinstance(texts, Texts)
    assert (failed.id, failed.code) == (broken, "engine_error")
    assert texts.rows() == [(plain, "a")]
    assert [end.id for end in texts.finished] == [finished]
    assert session.take_to_scheduler() == [Abort(broken)]
    session.tokens(row(plain, 1, tokens[1]))
    (texts,) = session.take_to_frontend()
    assert isinstance(texts, Texts) and texts.rows() == [(plain, "b")], "the answer goes on behind its text"


def test_columns_of_unequal_length_change_nothing() -> None:
    session = started()
    message = row(ID, 0, TOKENIZER.encode("a").ids[0], "length")
    with pytest.raises(msgspec.ValidationError):
        session.tokens(msgspec.structs.replace(message, cached=b""))
    assert session.progress(ID) == (b"", False)
    assert not session.take_to_frontend() and not session.take_to_scheduler()


def test_figures_of_rows_that_do_not_exist_are_ignored() -> None:
    session = started()
    wait = FirstTokenWait(1.0, 1.0)
    message = row(ID, 0, TOKENIZER.encode("a").ids[0])
    nowhere: dict[str, Any] = {"preemptions": {-2: 1, 1: 1}, "predicted": {-2: (1, 1), 1: (1, 1)}}
    session.tokens(msgspec.structs.replace(message, waits={-2: wait, 1: wait}, **nowhere))
    (texts,) = session.take_to_frontend()
    assert isinstance(texts, Texts) and texts.rows() == [(ID, "a")]


def test_a_prediction_outside_of_the_vocabulary_is_dropped() -> None:
    session = Session(TABLE)
    session.open(card())
    session.begin(generate())
    session.encoded(ID, PROMPT, prediction=array("i", [1, 512]))
    (submit,) = session.take_to_scheduler()
    assert isinstance(submit, Submit) and not submit.prediction


def test_an_answer_that_ends_with_a_repeated_token_fails() -> None:
    session = started()
    session.tokens(row(ID, 0, 5))
    session.take_to_frontend()
    session.tokens(row(ID, 0, 5, "length"))
    assert ends_in_engine_error(session)


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize(
    ("start", "broken"),
    [(2, scores([1], 0)), (1, scores([1] * 100, 0)), (1, TokenLogprobs(b"123456", b"", b"")), (1, NO_SCORES)],
)
def test_scores_of_a_prompt_must_be_complete_and_in_order(echo: bool, start: int, broken: TokenLogprobs) -> None:
    session = Session(TABLE)
    session.open(card())
    params = SamplingParams(logprobs=0, prompt_logprobs=0)
    session.begin(generate_of(id=ID, prompt="Hello", echo=echo, params=params))
    session.encoded(ID, PROMPT)
    session.acked(Ack(ID))
    session.take_to_scheduler()
    session.prompt_scored(PromptLogprobs(ID, start, broken))
    session.tokens(scored_row(0, 5, top=0))
    assert isinstance(session.take_to_frontend()[-1], TextFailed)
    assert session.take_to_scheduler() == [Abort(ID)]


def test_an_echo_equals_the_text_of_the_prompt() -> None:
    """The BOS that the tokenizer adds is among the scored tokens, without text."""
    tokenizer = byte_fallback()
    table = TokenBytes(tokenizer)
    prompt = array("i", tokenizer.encode("Hello é").ids)
    for text, echoed in (("Hello é", "Hello é"), (None, "<s> Hello é")):
        echo = EchoLogprobs(table, prompt, text)
        assert echo.text == echoed
        scored = echo.first() + echo.scored(1, scores(prompt[1:].tolist(), 0))
        assert echo.missing == 0
        assert scored[0].logprob is None
        assert b"".join(token.text for token in scored).decode() == echo.text
        assert [token.offset for token in scored] == sorted(token.offset for token in scored)


def test_max_tokens_0_returns_no_token() -> None:
    session = started(max_tokens=0)
    text, (end,) = answer(session, [5], "length")
    assert (text, end.reason, end.completion_tokens) == ("", "length", 0)


def test_min_tokens_that_do_not_fit_are_refused() -> None:
    message = submitted(len(PROMPT) + 3, min_tokens=4)
    assert isinstance(message, TextFailed)
    assert message.code == "context_length_exceeded"


def submitted_again() -> Session:
    """Return a session whose accepted request is to be encoded with another tokenizer."""
    session = started()
    assert session.begin_reencode(ID) == generate()
    return session


def test_a_reencoded_prompt_is_submitted_again() -> None:
    session = submitted_again()
    session.encoded(ID, PROMPT[:1])
    (submit,) = session.take_to_scheduler()
    assert isinstance(submit, Submit)
    assert submit.prompt == PROMPT[:1].tobytes()


def test_a_request_that_fails_to_reencode_is_aborted() -> None:
    session = submitted_again()
    session.encoded(ID, PromptError("chat_template_error", "no"))
    assert session.take_to_scheduler() == [Abort(ID)]
    session = submitted_again()
    session.cancel(Cancel(ID))
    assert session.take_to_scheduler() == [Abort(ID)]
    assert session.begin_reencode(ID) is None


def test_a_request_with_a_sent_echo_is_not_reencoded() -> None:
    session = Session(TABLE)
    session.open(card())
    session.begin(generate_of(id=ID, prompt="Hello", echo=True, params=SamplingParams()))
    session.encoded(ID, PROMPT)
    session.acked(Ack(ID))
    session.take_to_scheduler()
    session.take_to_frontend()
    assert session.begin_reencode(ID) is None
    assert session.take_to_scheduler() == [Abort(ID)]
    (failed,) = session.take_to_frontend()
    assert isinstance(failed, TextFailed)
    assert failed.code == "engine_unavailable"


def test_a_closed_session_continues_its_requests() -> None:
    session = started()
    session.close()
    assert not session.begin(generate(b"b" * 16))
    (failed,) = session.take_to_frontend()
    assert isinstance(failed, TextFailed)
    assert failed.code == NOT_TAKEN
    assert answer(session, [*PROMPT], "stop")[1]
