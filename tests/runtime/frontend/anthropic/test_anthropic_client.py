"""POST /v1/messages through the official client."""

from __future__ import annotations

import itertools
import json
from typing import Any

import anthropic
import pydantic
import pytest

from minisgl.wire.text import ChatMessage, Encode, Generate
from support.frontend.scripted import ScriptedStack, answer, calls, says, thinks

USER: Any = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


class City(pydantic.BaseModel):
    name: str
    inhabitants: int


@pytest.fixture
def client(scripted: ScriptedStack) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0)


def test_a_text_is_one_block(scripted: ScriptedStack, client: anthropic.Anthropic) -> None:
    scripted.script = answer(says("Hel"), says("lo"))
    message = client.messages.create(model="default", max_tokens=9, system="Be kind.", messages=USER)
    (block,) = message.content
    assert block.type == "text" and block.text == "Hello"
    assert (message.role, message.type, message.model) == ("assistant", "message", "default")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (1, 2, 3)
    assert message.id.startswith("msg_") and message._request_id
    sent = scripted.last(Generate)
    assert sent.messages == (ChatMessage("system", "Be kind."), ChatMessage("user", "Hi"))
    assert (sent.params.max_tokens, sent.options.soft_limits, sent.options.stream) == (9, True, False)


def test_a_streamed_answer_is_the_same_message(scripted: ScriptedStack, client: anthropic.Anthropic) -> None:
    scripted.script = answer(
        *(thinks("Let me "), thinks("see."), says("I will "), says("look.")),
        calls(0, "get_weather", '{"city":', '"Bonn"}', call_id="toolu_1"),
        calls(1, "get_weather", '{"city":"Ulm"}', call_id="toolu_2"),
    )
    request: Any = {"model": "default", "max_tokens": 99, "messages": USER, "tools": [WEATHER]}
    request["thinking"] = {"type": "enabled", "budget_tokens": 50}
    with client.messages.stream(**request) as stream:
        events = list(stream)
        final = stream.get_final_message()
    raw = [event.type for event in events if event.type.startswith(("message", "content"))]
    assert [kind for kind, _ in itertools.groupby(raw)] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 4,
        "message_delta",
        "message_stop",
    ]
    thinking, text, first, second = final.content
    assert thinking.type == "thinking" and thinking.thinking == "Let me see." and thinking.signature
    assert text.type == "text" and text.text == "I will look."
    assert first.type == "tool_use" and (first.id, first.name, first.input) == (
        "toolu_1",
        "get_weather",
        {"city": "Bonn"},
    )
    assert second.type == "tool_use" and second.input == {"city": "Ulm"}
    assert final.stop_reason == "tool_use"
    whole = client.messages.create(**request)
    assert {**whole.to_dict(), "id": None} == {**final.to_dict(), "id": None}
    assert scripted.last(Generate).options.thinking_budget == 50


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_in_a_schema_is_parsed(scripted: ScriptedStack, client: anthropic.Anthropic, streamed: bool) -> None:
    scripted.script = answer(says('{"name":"Bonn",'), says('"inhabitants":330000}'))
    request: Any = {"model": "default", "max_tokens": 99, "messages": USER, "output_format": City}
    if streamed:
        with client.messages.stream(**request) as stream:
            message: Any = stream.get_final_message()
    else:
        message = client.messages.parse(**request)
    assert message.parsed_output == City(name="Bonn", inhabitants=330000)
    constraint = scripted.last(Generate).options.structured_output
    assert constraint is not None and set(json.loads(constraint.value)["required"]) == {"name", "inhabitants"}


def test_a_conversation_with_tools_and_thinking_returns_to_the_template(
    scripted: ScriptedStack, client: anthropic.Anthropic
) -> None:
    scripted.script = answer(thinks("Hm."), calls(0, "get_weather", '{"city":"Bonn"}'))
    request: Any = {"model": "default", "max_tokens": 99, "tools": [WEATHER]}
    first = client.messages.create(**request, messages=USER)
    result = {"type": "tool_result", "tool_use_id": "call_0", "content": [{"type": "text", "text": "rain"}]}
    conversation: Any = [
        *USER,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    scripted.script = answer(says("It rains."))
    client.messages.create(**request, messages=conversation)
    call = {"id": "call_0", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Bonn"}}}
    assert scripted.last(Generate).messages == (
        ChatMessage("user", "Hi"),
        ChatMessage("assistant", None, tool_calls=[call], reasoning="Hm."),
        ChatMessage("tool", "rain", tool_call_id="call_0"),
        ChatMessage("user", "So?"),
    )


def test_tokens_of_a_prompt_are_counted(scripted: ScriptedStack, client: anthropic.Anthropic) -> None:
    count = client.messages.count_tokens(
        model="default", system="Be very kind.", messages=[{"role": "user", "content": "Hi you"}], tools=[WEATHER]
    )
    assert count.input_tokens == 5
    assert scripted.last(Encode).messages == (ChatMessage("system", "Be very kind."), ChatMessage("user", "Hi you"))
