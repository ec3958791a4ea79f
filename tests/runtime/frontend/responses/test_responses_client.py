"""POST /v1/responses through the official client."""

from __future__ import annotations

import itertools
import json
from typing import Any

import openai
import pydantic
import pytest

from minisgl.wire.text import ChatMessage, Generate
from support.frontend.scripted import ScriptedStack, answer, calls, says, thinks

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def client(scripted: ScriptedStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)


class City(pydantic.BaseModel):
    name: str
    inhabitants: int


def test_a_text_is_one_message(scripted: ScriptedStack, client: openai.OpenAI) -> None:
    scripted.script = answer(says("Hel"), says("lo"))
    response = client.responses.create(model="default", instructions="Be kind.", input="Hi", max_output_tokens=9)
    assert response.output_text == "Hello"
    (message,) = response.output
    assert (message.type, message.status, message.id) == ("message", "completed", f"msg_{response.id[5:]}_0")
    assert (response.status, response.object, response.model) == ("completed", "response", "default")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (3, 3, 6)
    assert response.usage.input_tokens_details.cached_tokens == 2
    assert (response.instructions, response.max_output_tokens, response.temperature) == ("Be kind.", 9, 0.6)
    assert response.to_dict()["store"] is False
    sent = scripted.last(Generate)
    assert sent.messages == (ChatMessage("system", "Be kind."), ChatMessage("user", "Hi"))
    assert (sent.params.max_tokens, sent.options.stream) == (9, False)


def test_a_streamed_answer_is_the_same_response(scripted: ScriptedStack, client: openai.OpenAI) -> None:
    scripted.script = answer(
        *(thinks("Let me "), thinks("see."), says("I will "), says("look.")),
        calls(0, "get_weather", '{"city":', '"Bonn"}'),
    )
    with client.responses.stream(model="default", input="Weather?", tools=[WEATHER]) as stream:
        # Output that arrives together is one delta.
        kinds = [kind for kind, _ in itertools.groupby(event.type for event in stream)]
        final = stream.get_final_response()
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    reasoning, _, call = final.output
    assert reasoning.type == "reasoning" and reasoning.content
    assert reasoning.content[0].text == "Let me see."
    assert final.output_text == "I will look."
    assert call.type == "function_call"
    assert (call.name, call.call_id, call.arguments) == ("get_weather", "call_0", '{"city":"Bonn"}')
    whole = client.responses.create(model="default", input="Weather?", tools=[WEATHER])
    assert _without_ids(whole.to_dict()) == _without_ids(_unparsed(final.to_dict()))


def _unparsed(value: Any) -> Any:
    """Leave out what the client adds to a response."""
    if isinstance(value, dict):
        return {name: _unparsed(item) for name, item in value.items() if name not in ("parsed", "parsed_arguments")}
    return [_unparsed(item) for item in value] if isinstance(value, list) else value


def _without_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [{**item, "id": None} for item in response["output"]]
    return {**response, "id": None, "output": output, "created_at": None, "completed_at": None}


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_in_a_schema_is_parsed(scripted: ScriptedStack, client: openai.OpenAI, streamed: bool) -> None:
    scripted.script = answer(says('{"name":"Bonn",'), says('"inhabitants":330000}'))
    if streamed:
        with client.responses.stream(model="default", input="A city", text_format=City) as stream:
            response = stream.get_final_response()
    else:
        response = client.responses.parse(model="default", input="A city", text_format=City)
    assert response.output_parsed == City(name="Bonn", inhabitants=330000)
    constraint = scripted.last(Generate).options.structured_output
    assert constraint is not None and constraint.kind == "json"
    assert json.loads(constraint.value)["required"] == ["name", "inhabitants"]


def test_a_conversation_with_calls_and_reasoning_returns_to_the_template(
    scripted: ScriptedStack, client: openai.OpenAI
) -> None:
    scripted.script = answer(thinks("Hm."), calls(0, "get_weather", '{"city": "Bonn"}'))
    first = client.responses.create(model="default", input="Weather?", tools=[WEATHER])
    conversation: Any = [
        {"role": "user", "content": "Weather?"},
        *first.output,
        {"type": "function_call_output", "call_id": "call_0", "output": [{"type": "input_text", "text": "rain"}]},
    ]
    scripted.script = answer(says("It rains."))
    client.responses.create(model="default", input=conversation, tools=[WEATHER])
    call = {"id": "call_0", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Bonn"}}}
    assert scripted.last(Generate).messages == (
        ChatMessage("user", "Weather?"),
        ChatMessage("assistant", None, tool_calls=[call], reasoning="Hm."),
        ChatMessage("tool", "rain", tool_call_id="call_0"),
    )
