"""Predicted outputs of chats: from the text to token ids at the engine, and from its counts to the usage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import openai
import pytest

from minisgl.wire.messages import FromScheduler, Submit, Tokens
from support.frontend.fake_scheduler import answer_with
from support.frontend.stack import EOS, TOKENIZER, FrontendStack, ids

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "Hi"}]}
SPECULATED = [*ids("one two"), -EOS]


def speculated(*reports: tuple[int, int]) -> Callable[[Submit], list[FromScheduler]]:
    """Return a reply of an engine that counts accepted and rejected tokens so far, in the last rows of an answer."""
    plain = answer_with(SPECULATED)

    def answer(submit: Submit) -> list[FromScheduler]:
        messages = plain(submit)
        for number, counts in enumerate(reports, len(messages) - len(reports)):
            message = messages[number]
            assert isinstance(message, Tokens)
            messages[number] = msgspec.structs.replace(message, predicted={0: counts})
        return messages

    return answer


@pytest.fixture
def client(stack: FrontendStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.openai_url, api_key="none", max_retries=0)


def content(text: Any) -> dict[str, Any]:
    return {"type": "content", "content": text}


def predicted_at_the_engine(stack: FrontendStack, **fields: Any) -> list[list[int]]:
    """Return the prediction of each choice."""
    stack.scheduler.reset()
    stack.scheduler.answer = answer_with(SPECULATED)
    response = stack.http.post(PATH, json=CHAT | fields)
    assert response.status_code == 200, response.text
    assert "x-ignored-params" not in response.headers
    return [np.frombuffer(submit.prediction, "<i4").tolist() for submit in stack.scheduler.received(Submit)]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("one two", "one two"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
        ("a<|im_end|>", "a<|im_end|>"),
        ("", ""),
        ([], ""),
    ],
)
def test_a_prediction_reaches_the_engine_as_token_ids(stack: FrontendStack, given: Any, text: str) -> None:
    assert predicted_at_the_engine(stack, prediction=content(given)) == [ids(text)]


def test_each_choice_has_the_prediction(stack: FrontendStack) -> None:
    assert predicted_at_the_engine(stack, prediction=content("one two"), n=3) == [ids("one two")] * 3
    assert predicted_at_the_engine(stack, n=2) == [[], []]


def test_a_prediction_is_cut_to_its_first_tokens(stack: FrontendStack) -> None:
    text = "é🙂 " * 20_000
    (predicted,) = predicted_at_the_engine(stack, prediction=content(text))
    assert len(predicted) == 16_384
    assert text.startswith(TOKENIZER.decode(predicted).rstrip("\N{REPLACEMENT CHARACTER}"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_the_usage_counts_accepted_and_rejected_tokens(
    stack: FrontendStack, client: openai.OpenAI, n: int, stream: bool
) -> None:
    stack.scheduler.answer = speculated((1, 5), (4, 7))
    prediction: Any = content("one two")
    arguments: dict[str, Any] = CHAT | {"n": n, "prediction": prediction}
    if stream:
        *_, last = client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
        usage = last.usage
    else:
        usage = client.chat.completions.create(**arguments).usage
    assert usage is not None and usage.completion_tokens == n * len(SPECULATED)
    details = usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4 * n, 7 * n)


def test_an_engine_that_does_not_speculate_accepts_and_rejects_nothing(
    stack: FrontendStack, client: openai.OpenAI
) -> None:
    stack.scheduler.answer = answer_with(SPECULATED)
    for given in ("one two", ""):
        answer = client.chat.completions.create(**CHAT, prediction=content(given))  # type: ignore[arg-type]
        assert answer.choices[0].message.content == "one two"
        assert answer.usage is not None and answer.usage.completion_tokens_details is not None
        details = answer.usage.completion_tokens_details
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


def test_a_stop_string_keeps_the_counts_that_were_reported_before(stack: FrontendStack) -> None:
    stack.scheduler.answer = speculated(*[(number, 2) for number in range(len(SPECULATED))])
    body = CHAT | {"prediction": content("one two"), "stop": "o"}
    details = stack.http.post(PATH, json=body).json()["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (0, 2)


def test_without_a_prediction_the_usage_has_no_such_counts(stack: FrontendStack) -> None:
    stack.scheduler.answer = speculated((4, 7))
    for fields in ({}, {"prediction": None}):
        details = stack.http.post(PATH, json=CHAT | fields).json()["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": 0}


def test_unknown_fields_of_a_prediction_are_named(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with(SPECULATED)
    part = {"type": "text", "text": "a", "cache_control": {}}
    response = stack.http.post(PATH, json=CHAT | {"prediction": content([part]) | {"weight": 1}})
    assert response.headers["x-ignored-params"] == "prediction.content[0].cache_control, prediction.weight"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"{PATH}/batch", {"messages": [CHAT["messages"]]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"max_tokens": 5, "messages": CHAT["messages"]}),
    ],
)
def test_other_apis_refuse_predictions_by_name(stack: FrontendStack, path: str, body: dict[str, Any]) -> None:
    response = stack.http.post(path, json=body | {"prediction": content("Hi")})
    assert response.status_code == 400
    assert "prediction" in response.json()["error"]["message"]
    assert not stack.scheduler.received(Submit)
