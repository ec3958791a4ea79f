"""Every field of chats and completions through the official client: a streamed answer is the whole one."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from support.frontend.field_values import (
    DIFFERING_CHAT,
    DIFFERING_COMPLETION,
    NEEDED,
    NEEDED_COMPLETION,
    NOT_AT_THE_SCHEDULER,
    NOT_AT_THE_SCHEDULER_CHAT,
    REFUSED_CHAT,
    REFUSED_COMPLETION,
)
from support.frontend.scored_answers import scored_answer
from support.frontend.stack import EOS, FrontendStack, ids

BODIES: dict[str, dict[str, Any]] = {
    "chat": {"model": "default", "messages": [{"role": "user", "content": "Hi"}]},
    "completion": {"model": "default", "prompt": "Hi"},
}
FORM = ("stream", "stream_options")
"""Fields that this test sets itself."""
EACH_API = pytest.mark.parametrize("api", BODIES)


@pytest.fixture
def client(agent_stack: FrontendStack) -> openai.OpenAI:
    agent_stack.scheduler.answer = scored_answer([*ids("one two"), -EOS])
    return openai.OpenAI(base_url=agent_stack.openai_url, api_key="none", max_retries=0)


def answer(client: openai.OpenAI, api: str, stream: bool, fields: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the choices by index: all that a client sees of them, joined if they are streamed."""
    endpoint: Any = client.chat.completions if api == "chat" else client.completions
    # Those in the body replace the arguments, which the client's types limit.
    made = endpoint.create(**BODIES[api], stream=stream, extra_body=fields)
    found: dict[int, dict[str, Any]] = {}
    for choice in [choice for chunk in made for choice in chunk.choices] if stream else made.choices:
        joined = found.setdefault(choice.index, {"text": "", "tokens": [], "scores": [], "reason": None})
        text = choice.text if api == "completion" else (choice.delta if stream else choice.message).content
        joined["text"] += text or ""
        joined["tokens"] += getattr(choice, "token_ids", None) or []
        if choice.logprobs is not None:
            scores = choice.logprobs.to_dict()
            joined["scores"] += scores["token_logprobs"] if api == "completion" else scores["content"]
        joined["reason"] = choice.finish_reason or joined["reason"]
    return found


@EACH_API
def test_a_streamed_answer_is_the_whole_one_with_any_field(client: openai.OpenAI, api: str) -> None:
    behind = NOT_AT_THE_SCHEDULER_CHAT if api == "chat" else NOT_AT_THE_SCHEDULER
    fields = {**(DIFFERING_CHAT if api == "chat" else DIFFERING_COMPLETION), **behind}
    needed = NEEDED if api == "chat" else NEEDED_COMPLETION
    for name in fields.keys() - FORM:
        for value in fields[name]:
            body = needed.get(name, {}) | {name: value}
            whole = answer(client, api, False, body)
            assert all(choice["reason"] for choice in whole.values()), name
            if name == "prompt_logprobs" and value is not None:
                with pytest.raises(openai.BadRequestError):
                    answer(client, api, True, body)
                continue
            assert answer(client, api, True, body) == whole, (name, value)


@EACH_API
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_possible_is_refused_by_name(client: openai.OpenAI, api: str, stream: bool) -> None:
    for name, (_, value) in (REFUSED_CHAT if api == "chat" else REFUSED_COMPLETION).items():
        with pytest.raises(openai.BadRequestError) as refused:
            answer(client, api, stream, {name: value})
        assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("stream", [False, True])
def test_documents_and_required_tools_are_refused_without_a_template_for_them(
    stack: FrontendStack, stream: bool
) -> None:
    client = openai.OpenAI(base_url=stack.openai_url, api_key="none", max_retries=0)
    required = {"tools": DIFFERING_CHAT["tools"][1], "tool_choice": "required"}
    for name, fields in (("documents", {"documents": DIFFERING_CHAT["documents"][1]}), ("tools", required)):
        with pytest.raises(openai.BadRequestError) as refused:
            answer(client, "chat", stream, fields)
        assert (refused.value.param, refused.value.code) == (name, "chat_template_error")
