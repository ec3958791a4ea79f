"""Fields that end an answer or limit its tokens, through the official client, streamed and not."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from minisgl.wire.messages import Submit
from support.frontend.fake_scheduler import answer_with
from support.frontend.stack import EOS, FrontendStack, ids

TOKENS = ids("one two")
EACH_API = pytest.mark.parametrize("api", ["chat", "completion"])
EACH_FORM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture
def client(stack: FrontendStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.openai_url, api_key="none", max_retries=0)


def answer(client: openai.OpenAI, api: str, stream: bool, **extra: Any) -> tuple[str, str]:
    """Return text and finish reason."""
    endpoint: Any = client.chat.completions if api == "chat" else client.completions
    request: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]} if api == "chat" else {"prompt": "Hi"}
    response = endpoint.create(model="org/tiny", stream=stream, extra_body=extra, **request)
    choices = [chunk.choices[0] for chunk in response] if stream else response.choices
    if api == "completion":
        parts = [choice.text for choice in choices]
    else:
        parts = [(choice.delta if stream else choice.message).content or "" for choice in choices]
    return "".join(parts), choices[-1].finish_reason


@EACH_API
@EACH_FORM
@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"stop_regex": r"\s\w"}, "one"),
        ({"stop_regex": [r"\d", r"o.?n"], "include_stop_str_in_output": True}, "on"),
        ({"stop_regex": r"e\st", "stop": "tw"}, "on"),
        ({"skip_special_tokens": False}, "one<|im_start|> two"),
        ({}, "one two"),
    ],
    ids=["expression", "included", "expression before string", "special tokens", "plain"],
)
def test_the_text_of_an_answer(
    client: openai.OpenAI, stack: FrontendStack, api: str, stream: bool, extra: dict[str, Any], expected: str
) -> None:
    special = ids("<|im_start|>")
    stack.scheduler.answer = answer_with([*ids("one"), *special, *ids(" two"), -EOS])
    assert answer(client, api, stream, **extra) == (expected, "stop")


@EACH_API
@EACH_FORM
def test_limits_of_tokens_reach_the_scheduler(
    client: openai.OpenAI, stack: FrontendStack, api: str, stream: bool
) -> None:
    stack.scheduler.answer = answer_with([*TOKENS, -EOS])
    assert answer(client, api, stream, allowed_token_ids=[5, 6], bad_words=["one"]) == ("one two", "stop")
    (submit,) = stack.scheduler.received(Submit)
    assert submit.params.allowed_token_ids == (5, 6)
    assert set(submit.constraint.bad_words) == {tuple(ids("one")), tuple(ids(" one"))}


@EACH_API
@EACH_FORM
def test_expressions_that_cannot_be_searched_for_are_named(client: openai.OpenAI, api: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="lookaround") as caught:
        answer(client, api, stream, stop_regex=["a", "(?=b)"])
    assert caught.value.param == "stop_regex[1]"
