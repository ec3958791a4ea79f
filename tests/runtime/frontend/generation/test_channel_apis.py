"""Answers in channels, as gpt-oss writes them, through the real tokenizer worker to clients of all three APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import anthropic
import openai
import pytest

from minisgl.wire.messages import Submit
from support.frontend.chat_templates import HARMONY
from support.frontend.fake_scheduler import answer_with
from support.frontend.stack import FrontendStack
from support.parsing.channels import IDS
from support.tiny_tokenizers import byte_level

TOKENIZER: Final = byte_level(tuple(IDS), added=())
HEAD: Final = "<|start|>assistant"
CALL: Final = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bonn"}'
FIRST: Final = (
    f"<|channel|>analysis<|message|>Bonn, then.<|end|>{HEAD}<|channel|>commentary<|message|>Let me look.<|end|>"
    f"{HEAD}{CALL}<|call|>"
)
LAST: Final = f"<|channel|>analysis<|message|>Rain.<|end|>{HEAD}<|channel|>final<|message|>It rains.<|return|>"
SCHEMA: Final[dict[str, Any]] = {"type": "object", "properties": {"city": {"type": "string"}}}
HISTORY: Final = (
    "<|start|>assistant<|channel|>analysis<|message|>Bonn, then.\n\nLet me look.<|end|>"
    '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Bonn"}<|call|>'
    '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"rain"<|end|><|start|>assistant'
)
"""End of a prompt with the first answer and the result of its call."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendStack]:
    path = tmp_path_factory.mktemp("channels")
    made = FrontendStack(path, template=HARMONY, tokenizer=TOKENIZER, max_model_len=4096)
    yield made
    made.close()


def generates(stack: FrontendStack, text: str) -> None:
    """Answer with this text, whose last token ends it."""
    *tokens, end = TOKENIZER.encode(text).ids
    stack.scheduler.answer = answer_with([*tokens, -end])


def submitted(stack: FrontendStack) -> Submit:
    return stack.scheduler.received(Submit)[-1]


def prompt_of(stack: FrontendStack) -> str:
    prompt = memoryview(submitted(stack).prompt).cast("i")
    return str(TOKENIZER.decode(list(prompt), skip_special_tokens=False))


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_works_through_chat_completions(stack: FrontendStack, stream: bool) -> None:
    client = openai.OpenAI(base_url=stack.openai_url, api_key="none", max_retries=0)
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    request: Any = {"model": "default", "tools": [tool], "messages": [{"role": "user", "content": "Weather?"}]}
    generates(stack, FIRST)
    if stream:
        deltas = [chunk.choices[0] for chunk in client.chat.completions.create(**request, stream=True) if chunk.choices]
        text = "".join(choice.delta.content or "" for choice in deltas)
        reasoning = "".join(getattr(choice.delta, "reasoning_content", None) or "" for choice in deltas)
        pieces = [call for choice in deltas for call in choice.delta.tool_calls or ()]
        name, call_id = pieces[0].function.name, pieces[0].id
        arguments = "".join(piece.function.arguments or "" for piece in pieces)
        reason = deltas[-1].finish_reason
    else:
        (choice,) = client.chat.completions.create(**request).choices
        text, reasoning = choice.message.content, choice.message.reasoning_content
        (call,) = choice.message.tool_calls
        name, call_id, arguments = call.function.name, call.id, call.function.arguments
        reason = choice.finish_reason
    assert (reasoning, text, reason) == ("Bonn, then.", "Let me look.", "tool_calls")
    assert (name, arguments) == ("weather", '{"city": "Bonn"}')
    function = {"name": name, "arguments": arguments}
    answered: Any = [
        {
            "role": "assistant",
            "content": text,
            "reasoning_content": reasoning,
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": "rain"},
    ]
    generates(stack, LAST)
    (choice,) = client.chat.completions.create(**request | {"messages": request["messages"] + answered}).choices
    assert (choice.message.content, choice.finish_reason) == ("It rains.", "stop")
    assert prompt_of(stack).endswith(HISTORY)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_works_through_the_responses_api(stack: FrontendStack, stream: bool) -> None:
    client = openai.OpenAI(base_url=stack.openai_url, api_key="none", max_retries=0)
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
    conversation: list[Any] = [{"role": "user", "content": "Weather?"}]
    request: Any = {"model": "default", "tools": [tool], "reasoning": {"effort": "low"}}
    generates(stack, FIRST)
    if stream:
        with client.responses.stream(**request, input=conversation) as events:
            response: Any = events.get_final_response()
    else:
        response = client.responses.create(**request, input=conversation)
    reasoning, message, call = response.output
    assert (reasoning.content[0].text, message.content[0].text) == ("Bonn, then.", "Let me look.")
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Bonn"})
    thought = TOKENIZER.encode("<|channel|>analysis<|message|>Bonn, then.<|end|>").ids
    assert response.usage.output_tokens_details.reasoning_tokens == len(thought)
    items = [item.to_dict() for item in response.output]
    conversation += [{key: value for key, value in item.items() if key != "parsed_arguments"} for item in items]
    conversation.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    generates(stack, LAST)
    assert client.responses.create(**request, input=conversation).output_text == "It rains."
    assert prompt_of(stack).endswith(HISTORY) and "Reasoning: low\n" in prompt_of(stack)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_works_through_the_messages_api(stack: FrontendStack, stream: bool) -> None:
    client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{stack.server.port}", api_key="none", max_retries=0)
    tool: Any = {"name": "weather", "input_schema": SCHEMA}
    conversation: list[Any] = [{"role": "user", "content": "Weather?"}]
    request: Any = {"model": "default", "tools": [tool], "max_tokens": 1000}
    generates(stack, FIRST)
    if stream:
        with client.messages.stream(**request, messages=conversation) as events:
            message: Any = events.get_final_message()
    else:
        message = client.messages.create(**request, messages=conversation)
    thinking, text, use = message.content
    assert (thinking.thinking, text.text, message.stop_reason) == ("Bonn, then.", "Let me look.", "tool_use")
    assert (use.name, use.input) == ("weather", {"city": "Bonn"})
    conversation.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
    conversation.append({"role": "user", "content": [result]})
    generates(stack, LAST)
    last = client.messages.create(**request, messages=conversation)
    assert [block.text for block in last.content if block.type == "text"] == ["It rains."]
    assert prompt_of(stack).endswith(HISTORY)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("<|channel|>thoughts<|message|>Hello<|return|>", "thoughtsHello"),
        ("<|channel|><|channel|>final to= x<|message|>Hello<|return|>", "final to= xHello"),
        ("Hello<|start|><|start|><|return|>", "Hello"),
        ("<|message|><|message|>Hello<|call|>", "Hello"),
    ],
)
def test_a_malformed_header_is_text(stack: FrontendStack, answer: str, text: str) -> None:
    generates(stack, answer)
    messages = [{"role": "user", "content": "Hi"}]
    chat = stack.http.post("/v1/chat/completions", json={"messages": messages})
    assert (chat.status_code, chat.json()["choices"][0]["message"]["content"]) == (200, text)
    response = stack.http.post("/v1/responses", json={"input": "Hi"})
    assert (response.status_code, response.json()["output"][-1]["content"][0]["text"]) == (200, text)
    message = stack.http.post("/v1/messages", json={"model": "default", "max_tokens": 99, "messages": messages})
    assert (message.status_code, message.json()["content"]) == (200, [{"type": "text", "text": text}])


TOOL: Final = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("fields", "parts", "others"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, ["analysis", "to=functions.weather"], ["final"]),
        (
            {
                "tools": [TOOL, TOOL | {"function": {"name": "now"}}],
                "tool_choice": TOOL | {"function": {"name": "now"}},
            },
            ["to=functions.now"],
            ["weather", "final"],
        ),
        ({"response_format": FORMAT}, ["analysis", "final", "city"], ["functions"]),
        ({"response_format": FORMAT, "tools": [TOOL]}, ["final", "to=functions.weather"], []),
    ],
)
def test_constrained_answers_have_a_grammar_of_channels(
    stack: FrontendStack, fields: dict[str, Any], parts: list[str], others: list[str]
) -> None:
    generates(stack, LAST)
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    assert stack.http.post("/v1/chat/completions", json=body).status_code == 200
    grammar = submitted(stack).constraint.grammar
    assert all(part in grammar for part in parts) and not any(part in grammar for part in others)


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_the_effort_is_in_the_prompt(stack: FrontendStack, effort: str) -> None:
    generates(stack, LAST)
    body = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
    assert stack.http.post("/v1/chat/completions", json=body).status_code == 200
    assert f"Reasoning: {effort}\n" in prompt_of(stack)


def test_reasoning_cannot_be_left_out(stack: FrontendStack) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "none"}
    refused = stack.http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "enable_thinking")
