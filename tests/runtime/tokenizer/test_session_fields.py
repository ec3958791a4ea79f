"""Fields of a request that the tokenizer worker applies: token ids, stop expressions, special tokens, scores of the
prompt and bad words."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from minisgl.tokenizer.prompt_encoder import token_sequences
from minisgl.tokenizer.session import Session
from minisgl.tokenizer.token_bytes import TokenBytes
from minisgl.wire.messages import Abort, Ack, FinishReason, PromptLogprobs, SamplingParams, Submit
from minisgl.wire.text import Accepted, Finished, FromTokenizer, ScoredToken, TextFailed, Texts
from support.frontend.fake_scheduler import card, row
from support.frontend.scored_answers import scores
from support.messages import generate_of
from support.tiny_tokenizers import byte_fallback, byte_level

TOKENIZER = byte_level()
TABLE = TokenBytes(TOKENIZER)
PROMPT = array("i", TOKENIZER.encode("Hello").ids)
ID = b"a" * 16
EOS = TOKENIZER.token_to_id("<|im_end|>")


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def started(params: SamplingParams | None = None, **fields: Any) -> Session:
    session = Session(TABLE)
    session.open(card())
    assert session.begin(generate_of(id=ID, prompt="Hello", params=params or SamplingParams(), **fields))
    session.encoded(ID, PROMPT)
    session.acked(Ack(ID))
    return session


def step(session: Session, index: int, token: int, finish: FinishReason | None = None, scored: int = -1) -> None:
    message = row(ID, index, token, finish)
    if scored >= 0:
        message = msgspec.structs.replace(message, logprobs={0: scores([token], scored)})
    session.tokens(message)


def answer(session: Session, tokens: list[int], finish: FinishReason | None = None) -> list[FromTokenizer]:
    for index, token in enumerate(tokens):
        step(session, index, token, finish if index == len(tokens) - 1 else None)
    return [*session.take_to_frontend()]


def text_of(messages: list[FromTokenizer]) -> str:
    return "".join(text for message in messages if isinstance(message, Texts) for _, text in message.rows())


def end_of(messages: list[FromTokenizer]) -> Finished:
    (end,) = [end for message in messages if isinstance(message, Texts) for end in message.finished]
    return end


def test_token_ids_of_prompt_and_answer_are_reported() -> None:
    tokens = [*ids("a stop and"), EOS]
    messages = answer(started(SamplingParams(stop=("stop here",)), return_token_ids=True), tokens, "stop")
    assert messages[0] == Accepted(ID, len(PROMPT), PROMPT.tobytes())
    parts = [message.token_ids[0] for message in messages[1:] if isinstance(message, Texts)]
    assert array("i", b"".join(parts)).tolist() == tokens
    assert len(parts) == len(tokens), "each token is reported at once, also while its text is held back"
    assert text_of(messages) == "a stop and"
    plain = answer(started(), tokens, "stop")
    assert plain[0] == Accepted(ID, len(PROMPT))
    assert not any(message.token_ids for message in plain if isinstance(message, Texts))


def test_an_answer_ends_before_the_match_of_an_expression() -> None:
    session = started(SamplingParams(stop=("never",)), stop_regex=(r"\n+(User|Human):",))
    messages = answer(session, ids("Hi.\n\nHuman: more"))
    assert text_of(messages) == "Hi."
    end = end_of(messages)
    assert (end.reason, end.matched_stop) == ("stop", r"\n+(User|Human):")
    assert session.take_to_scheduler()[-1] == Abort(ID)


def test_an_expression_that_cannot_be_searched_for_is_refused() -> None:
    session = started(stop_regex=("(a)\\1",))
    (failed,) = session.take_to_frontend()
    assert isinstance(failed, TextFailed)
    assert (failed.code, failed.param) == ("invalid_request", "stop_regex")
    assert not session.take_to_scheduler()


@pytest.mark.parametrize(
    ("params", "tokens", "finish", "matched"),
    [
        ({"stop": ("b",)}, ids("ab"), None, "b"),
        ({"stop_token_ids": (7,)}, [*ids("a"), 7], "stop", 7),
        ({"stop_token_ids": (7,)}, [*ids("a"), EOS], "stop", None),
        ({"stop": ("c",)}, ids("ab"), "length", None),
        ({}, [*ids("a"), EOS], "stop", None),
    ],
    ids=["string", "token", "eos", "length", "nothing"],
)
def test_what_ended_the_answer_is_reported(
    params: dict[str, Any], tokens: list[int], finish: FinishReason | None, matched: str | int | None
) -> None:
    assert end_of(answer(started(SamplingParams(**params)), tokens, finish)).matched_stop == matched


def test_special_tokens_are_part_of_the_text_on_request() -> None:
    tokens = [*ids("a"), EOS, *ids("b"), EOS]
    shown = answer(started(skip_special_tokens=False), tokens, "stop")
    assert text_of(shown) == "a<|im_end|>b", "but not the one that ended the answer"
    assert text_of(answer(started(), tokens, "stop")) == "ab"


def test_text_with_special_tokens_equals_a_full_decode() -> None:
    tokenizer = byte_fallback()
    tokens = tokenizer.encode("Hello é", add_special_tokens=True).ids
    session = Session(TokenBytes(tokenizer))
    session.open(card())
    session.begin(generate_of(id=ID, prompt="a", params=SamplingParams(), skip_special_tokens=False))
    prompt = tokenizer.encode("a").ids
    session.encoded(ID, array("i", prompt))
    session.acked(Ack(ID))
    whole = tokenizer.decode([*prompt, *tokens], skip_special_tokens=False)
    before = tokenizer.decode(prompt, skip_special_tokens=False)
    assert before + text_of(answer(session, tokens, "length")) == whole


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scores_of_the_prompt_come_with_the_first_token(max_tokens: int) -> None:
    session = started(SamplingParams(prompt_logprobs=2, max_tokens=max_tokens))
    (accepted,) = session.take_to_frontend()
    assert isinstance(accepted, Accepted)
    session.prompt_scored(PromptLogprobs(ID, 1, scores(PROMPT[1:2].tolist(), 2)))
    session.prompt_scored(PromptLogprobs(ID, 2, scores(PROMPT[2:].tolist(), 2)))
    assert not session.take_to_frontend(), "so that another engine can begin again"
    assert session.progress(ID) == (b"", False)
    step(session, 0, 5, "length")
    first, *_ = session.take_to_frontend()
    assert isinstance(first, Texts)
    scored: list[ScoredToken] = first.prompt_scored[0]
    assert [token.token_id for token in scored] == PROMPT.tolist()
    assert [token.logprob for token in scored] == [None, *(-token / 8 for token in PROMPT[1:])]
    assert [token.top_ids for token in scored] == [[], *[[64, 65]] * (len(PROMPT) - 1)]


def test_scores_of_a_long_prompt_come_in_several_messages() -> None:
    prompt = array("i", ids("a") * 5000)
    session = Session(TABLE)
    session.open(card(max_model_len=6000))
    session.begin(generate_of(id=ID, tokens=prompt.tobytes(), params=SamplingParams(prompt_logprobs=0)))
    session.encoded(ID, prompt)
    session.acked(Ack(ID))
    session.prompt_scored(PromptLogprobs(ID, 1, scores(prompt[1:].tolist(), 0)))
    session.take_to_frontend()
    step(session, 0, 5, "length")
    parts = [message.prompt_scored.get(0, []) for message in session.take_to_frontend() if isinstance(message, Texts)]
    assert [len(part) for part in parts if part] == [2048, 2048, 5000 - 4096]
    assert [token.token_id for part in parts for token in part] == prompt.tolist()


def test_an_answer_without_the_scores_of_its_prompt_fails() -> None:
    session = started(SamplingParams(prompt_logprobs=0))
    session.take_to_frontend()
    step(session, 0, 5)
    (failed,) = session.take_to_frontend()
    assert isinstance(failed, TextFailed)
    assert failed.code == "engine_error"


def test_scored_tokens_have_their_ids() -> None:
    session = started(SamplingParams(logprobs=2))
    session.take_to_frontend()
    step(session, 0, ids("a")[0], scored=2)
    (message,) = session.take_to_frontend()
    assert isinstance(message, Texts)
    assert [(token.token_id, token.top_ids) for token in message.scored[0]] == [(ids("a")[0], [64, 65])]


def test_bad_words_and_allowed_tokens_reach_the_scheduler() -> None:
    session = Session(TABLE)
    session.open(card(vocab_size=300))
    session.begin(generate_of(id=ID, prompt="Hello", params=SamplingParams(allowed_token_ids=(5, 6)), bad_words=("x",)))
    session.encoded(ID, PROMPT, ((1, 2), (3, 300)))
    (submit,) = session.take_to_scheduler()
    assert isinstance(submit, Submit)
    assert submit.params.allowed_token_ids == (5, 6)
    assert submit.constraint.bad_words == ((1, 2),), "the other one cannot be generated"


def test_allowed_tokens_outside_the_vocabulary_are_refused() -> None:
    session = started(SamplingParams(allowed_token_ids=(5, 512)))
    (failed,) = session.take_to_frontend()
    assert isinstance(failed, TextFailed)
    assert (failed.code, failed.param) == ("invalid_token", "allowed_token_ids")


def test_a_bad_word_has_tokens_at_the_beginning_and_behind_a_space() -> None:
    found = token_sequences(TOKENIZER, ["Hello", " Hello", "  ", "é"])
    assert set(found) == {tuple(ids(text)) for text in ("Hello", " Hello", "  ", "   ", "é", " é")}
    assert len(found) == len(set(found))
    assert token_sequences(TOKENIZER, []) == ()
