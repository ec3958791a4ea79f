"""Generated tokens with reasoning and calls, through the real tokenizer worker to clients of both agent APIs."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from minisgl.wire.messages import Submit
from support.frontend.fake_scheduler import answer_with
from support.frontend.stack import EOS, TOKENIZER, FrontendStack, ids

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
ANSWER = f"<think>\nBonn, then.\n</think>\n\nLet me look.\n{CALL}\n{CALL}"
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}


def generates(stack: FrontendStack, text: str) -> None:
    stack.scheduler.answer = answer_with([*ids(text), -EOS], cached=2)


def prompt_of(stack: FrontendStack) -> str:
    submit = stack.scheduler.received(Submit)[-1]
    return TOKENIZER.decode(list(memoryview(submit.prompt).cast("i")), skip_special_tokens=False)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_works_through_the_responses_api(agent_stack: FrontendStack, stream: bool) -> None:
    generates(agent_stack, ANSWER)
    client = openai.OpenAI(base_url=agent_stack.openai_url, api_key="none", max_retries=0)
    tool: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}
    conversation: list[Any] = [{"role": "user", "content": "Weather?"}]
    request: Any = {"model": "default", "tools": [tool], "instructions": "Be brief."}
    if stream:
        with client.responses.stream(**request, input=conversation) as events:
            response: Any = events.get_final_response()
    else:
        response = client.responses.create(**request, input=conversation)
    reasoning, message, *calls = response.output
    assert (reasoning.content[0].text.strip(), message.content[0].text.strip()) == ("Bonn, then.", "Let me look.")
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("get_weather", {"city": "Bonn"})] * 2
    assert response.status == "completed"
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    conversation += [item.to_dict() for item in response.output]
    conversation += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    generates(agent_stack, "<think>\n</think>\n\nIt rains.")
    request["input"] = [_without_parsed(item) for item in conversation]
    last = client.responses.create(**request)
    assert last.output_text.strip() == "It rains."
    assert last.usage is not None
    assert client.responses.input_tokens.count(**request).input_tokens == last.usage.input_tokens
    prompt = prompt_of(agent_stack)
    assert prompt.count("<tool_call>") >= 2 and prompt.count("rain") == 2 and "Let me look." in prompt
    assert "Be brief." in prompt


def _without_parsed(item: dict[str, Any]) -> dict[str, Any]:
    """Leave out what the streaming helper adds."""
    return {name: value for name, value in item.items() if name != "parsed_arguments"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_works_through_the_messages_api(agent_stack: FrontendStack, stream: bool) -> None:
    generates(agent_stack, ANSWER)
    client = anthropic.Anthropic(base_url=agent_stack.openai_url.removesuffix("/v1"), api_key="none", max_retries=0)
    conversation: list[Any] = [{"role": "user", "content": "Weather?"}]
    request: Any = {
        "model": "default",
        "max_tokens": 20_000,
        "system": "Be brief.",
        "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
        "thinking": {"type": "enabled", "budget_tokens": 5000},
    }
    if stream:
        with client.messages.stream(**request, messages=conversation) as events:
            message: Any = events.get_final_message()
    else:
        message = client.messages.create(**request, messages=conversation)
    thinking, text, *uses = message.content
    assert (thinking.thinking.strip(), text.text.strip()) == ("Bonn, then.", "Let me look.")
    assert [(use.name, use.input) for use in uses] == [("get_weather", {"city": "Bonn"})] * 2
    assert message.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "rain"} for use in uses]
    conversation += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    generates(agent_stack, "<think>\n</think>\n\nIt rains.")
    count = client.messages.count_tokens(
        model="default", messages=conversation, **{name: request[name] for name in ("system", "tools", "thinking")}
    )
    last: Any = client.messages.create(**request, messages=conversation)
    assert last.content[-1].text.strip() == "It rains."
    assert last.usage.input_tokens + last.usage.cache_read_input_tokens == count.input_tokens
    prompt = prompt_of(agent_stack)
    assert prompt.count("<tool_call>") >= 2 and prompt.count("rain") == 2 and "Be brief." in prompt


def test_a_stop_sequence_is_reported_through_the_messages_api(agent_stack: FrontendStack) -> None:
    generates(agent_stack, "one two three")
    client = anthropic.Anthropic(base_url=agent_stack.openai_url.removesuffix("/v1"), api_key="none", max_retries=0)
    message: Any = client.messages.create(
        model="default", max_tokens=99, messages=[{"role": "user", "content": "Count."}], stop_sequences=[" thr"]
    )
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("one two", "stop_sequence", " thr")


def test_a_conversation_that_fills_the_context_ends_there(agent_stack: FrontendStack) -> None:
    agent_stack.scheduler.answer = answer_with(ids("a"))
    client = anthropic.Anthropic(base_url=agent_stack.openai_url.removesuffix("/v1"), api_key="none", max_retries=0)
    user: Any = [{"role": "user", "content": "Go on."}]
    message = client.messages.create(model="default", max_tokens=20_000, messages=user)
    assert message.stop_reason == "model_context_window_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
        client.messages.create(model="default", max_tokens=9, messages=[{"role": "user", "content": "é " * 5000}])


STRICT: Any = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/responses",
            {"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": STRICT, "strict": True}]},
            "tools[0].parameters",
        ),
        (
            "/v1/responses",
            {
                "input": "Hi",
                "tools": [
                    {
                        "type": "custom",
                        "name": "f",
                        "format": {"type": "grammar", "syntax": "regex", "definition": "(?=a)b"},
                    }
                ],
            },
            "tools[0].format",
        ),
        (
            "/v1/responses",
            {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "s", "schema": STRICT}}},
            "text.format.schema",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [{"role": "user", "content": "Hi"}],
                "tools": [{"name": "f", "input_schema": STRICT, "strict": True}],
            },
            "tools[0].input_schema",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [{"role": "user", "content": "Hi"}],
                "output_config": {"format": {"type": "json_schema", "schema": STRICT}},
            },
            "output_config.format.schema",
        ),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(
    agent_stack: FrontendStack, path: str, body: dict[str, Any], param: str
) -> None:
    response = agent_stack.http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param), response.text


def arguments_of(stack: FrontendStack, api: str, stream: bool) -> list[Any]:
    """Return the arguments of the calls in the next answer, as clients of an API read them."""
    user: Any = [{"role": "user", "content": "Weather?"}]
    function: Any = {"name": "get_weather", "parameters": SCHEMA}
    if api == "messages":
        claude = anthropic.Anthropic(base_url=stack.openai_url.removesuffix("/v1"), api_key="none", max_retries=0)
        tool: Any = {"name": "get_weather", "input_schema": SCHEMA}
        request: Any = {"model": "default", "max_tokens": 9000, "messages": user, "tools": [tool]}
        if stream:
            with claude.messages.stream(**request) as events:
                content: Any = events.get_final_message().content
        else:
            content = claude.messages.create(**request).content
        return [block.input for block in content if block.type == "tool_use"]
    client = openai.OpenAI(base_url=stack.openai_url, api_key="none", max_retries=0)
    if api == "responses":
        request = {"model": "default", "input": user, "tools": [{"type": "function", "strict": False} | function]}
        if stream:
            with client.responses.stream(**request) as updates:
                output: Any = updates.get_final_response().output
        else:
            output = client.responses.create(**request).output
        return [json.loads(item.arguments) for item in output if item.type == "function_call"]
    request = {"model": "default", "messages": user, "tools": [{"type": "function", "function": function}]}
    if stream:
        with client.chat.completions.stream(**request) as chunks:
            message: Any = chunks.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**request).choices[0].message
    return [json.loads(call.function.arguments) for call in message.tool_calls or ()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chats", "responses", "messages"])
def test_arguments_that_are_not_quite_json_reach_clients_of_all_apis_repaired(
    agent_stack: FrontendStack, api: str, stream: bool
) -> None:
    written = ("{'city': 'Bonn',}", '{"city": "Bonn\n", "now": True}', '{"city": "Bonn", "days": [1, 2,],}')
    calls = [f'<tool_call>\n{{"name": "get_weather", "arguments": {one}}}\n</tool_call>' for one in written]
    generates(agent_stack, "\n".join(calls))
    meant = [{"city": "Bonn"}, {"city": "Bonn\n", "now": True}, {"city": "Bonn", "days": [1, 2]}]
    assert arguments_of(agent_stack, api, stream) == meant
