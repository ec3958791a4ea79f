"""Generated tokens with reasoning and calls, through the real tokenizer worker to the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from minisgl.wire.messages import Submit
from support.frontend.fake_scheduler import answer_with
from support.frontend.scored_answers import scored_answer
from support.frontend.stack import EOS, TOKENIZER, FrontendStack, ids

USER: Any = [{"role": "user", "content": "Weather in Bonn?"}]
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn", "days": [1, 2]}}\n</tool_call>'
THOUGHT = "<think>\nBonn, then.\n</think>\n\n"


@pytest.fixture
def client(agent_stack: FrontendStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=agent_stack.openai_url, api_key="none", max_retries=0)


def generates(stack: FrontendStack, text: str) -> int:
    """Let the engine generate a text and its end. Returns the number of tokens."""
    tokens = [*ids(text), -EOS]
    stack.scheduler.answer = answer_with(tokens)
    return len(tokens)


def ask(client: openai.OpenAI, stream: bool, **options: Any) -> tuple[dict[str, str], list[dict[str, str]], str, Any]:
    """Return content and reasoning, the calls, the finish reason and the usage."""
    texts = {"content": "", "reasoning": "", "reasoning_content": ""}
    calls: list[dict[str, str]] = []
    if not stream:
        answer = client.chat.completions.create(model="default", messages=USER, **options)
        message = answer.choices[0].message.to_dict()
        for call in message.get("tool_calls", ()):
            calls.append({"id": call["id"], **call["function"]})
        return texts | {k: message.get(k) or "" for k in texts}, calls, answer.choices[0].finish_reason, answer.usage
    reason, usage = "", None
    options["stream_options"] = {"include_usage": True}
    for chunk in client.chat.completions.create(model="default", messages=USER, stream=True, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            delta = choice.delta.to_dict()
            texts = {name: text + (delta.get(name) or "") for name, text in texts.items()}
            for piece in delta.get("tool_calls", ()):
                if piece["index"] == len(calls):
                    calls.append({"id": piece["id"], "name": piece["function"]["name"], "arguments": ""})
                calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    return texts, calls, reason, usage


STREAM = pytest.mark.parametrize("stream", [False, True])


@STREAM
def test_a_call_behind_reasoning_and_text(agent_stack: FrontendStack, client: openai.OpenAI, stream: bool) -> None:
    count = generates(agent_stack, THOUGHT + "Let me look." + "\n" + CALL)
    texts, calls, reason, usage = ask(client, stream, tools=[TOOL])
    assert texts["reasoning"].strip() == texts["reasoning_content"].strip() == "Bonn, then."
    assert texts["content"].strip() == "Let me look."
    (call,) = calls
    assert call["id"] and call["name"] == "get_weather"
    assert json.loads(call["arguments"]) == {"city": "Bonn", "days": [1, 2]}
    assert reason == "tool_calls"
    assert usage.completion_tokens == count
    assert 0 < usage.completion_tokens_details.reasoning_tokens < count
    assert usage.reasoning_tokens == usage.completion_tokens_details.reasoning_tokens


def test_log_probabilities_have_all_tokens_of_the_answer(agent_stack: FrontendStack, client: openai.OpenAI) -> None:
    text = THOUGHT + "Let me look." + "\n" + CALL
    agent_stack.scheduler.answer = scored_answer([*ids(text), -EOS])
    answer = client.chat.completions.create(model="default", messages=USER, tools=[TOOL], logprobs=True)
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    joined = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
    assert (joined.decode(), choice.message.content) == (text, "Let me look.")


@STREAM
def test_parallel_calls(agent_stack: FrontendStack, client: openai.OpenAI, stream: bool) -> None:
    generates(agent_stack, CALL + "\n" + CALL.replace("Bonn", "Köln"))
    texts, calls, reason, _ = ask(client, stream, tools=[TOOL])
    assert [json.loads(call["arguments"])["city"] for call in calls] == ["Bonn", "Köln"]
    assert len({call["id"] for call in calls}) == 2
    assert (texts["content"].strip(), reason) == ("", "tool_calls")


@STREAM
@pytest.mark.parametrize(
    ("stop", "arguments", "reason"),
    [
        ({"stop": ['Bonn"']}, '{"city": "', "stop"),
        ({"stop": ['Bonn"'], "tool_choice": "required"}, '{"city": "', "stop"),
        ({"stop": ['Bonn"'], "extra_body": {"include_stop_str_in_output": True}}, '{"city": "Bonn"', "stop"),
        ({"extra_body": {"stop_regex": "B[a-z]+"}}, '{"city": "', "stop"),
        ({"stop": [', "arg']}, "", "stop"),
        ({"stop": ["</tool_call>"]}, '{"city": "Bonn", "days": [1, 2]}', "tool_calls"),
        ({"stop": ["never"]}, '{"city": "Bonn", "days": [1, 2]}', "tool_calls"),
    ],
)
def test_a_call_that_a_stop_string_cuts_off_is_none_to_make(
    agent_stack: FrontendStack,
    client: openai.OpenAI,
    stream: bool,
    stop: dict[str, Any],
    arguments: str,
    reason: str,
) -> None:
    generates(agent_stack, CALL)
    _, (call,), finish_reason, _ = ask(client, stream, tools=[TOOL], **stop)
    assert (call["arguments"], finish_reason) == (arguments, reason)


@STREAM
def test_the_last_call_is_the_one_that_was_cut_off(
    agent_stack: FrontendStack, client: openai.OpenAI, stream: bool
) -> None:
    generates(agent_stack, CALL + "\n" + CALL.replace("Bonn", "Köln"))
    _, calls, reason, _ = ask(client, stream, tools=[TOOL], stop=["öln"])
    assert [call["arguments"] for call in calls] == ['{"city": "Bonn", "days": [1, 2]}', '{"city": "K']
    assert reason == "stop"


@STREAM
def test_a_call_that_a_stop_token_cuts_off_is_none_to_make(
    agent_stack: FrontendStack, client: openai.OpenAI, stream: bool
) -> None:
    tokens = ids(CALL[: CALL.index("Bonn")])
    agent_stack.scheduler.answer = answer_with([*tokens[:-1], -tokens[-1]])
    _, (call,), reason, _ = ask(client, stream, tools=[TOOL], extra_body={"stop_token_ids": [tokens[-1]]})
    assert (call["name"], reason) == ("get_weather", "stop")
    agent_stack.scheduler.answer = answer_with([*ids(CALL), -EOS])
    _, _, reason, _ = ask(client, stream, tools=[TOOL], extra_body={"stop_token_ids": [EOS]})
    assert reason == "tool_calls"


@STREAM
@pytest.mark.parametrize("options", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_without_tools_a_call_is_text(
    agent_stack: FrontendStack, client: openai.OpenAI, stream: bool, options: dict[str, Any]
) -> None:
    generates(agent_stack, CALL)
    texts, calls, reason, _ = ask(client, stream, **options)
    assert (texts["content"], calls, reason) == (CALL, [], "stop")


@STREAM
def test_reasoning_that_is_not_separated_is_content(
    agent_stack: FrontendStack, client: openai.OpenAI, stream: bool
) -> None:
    generates(agent_stack, THOUGHT + "Sun.")
    texts, *_ = ask(client, stream, extra_body={"separate_reasoning": False})
    assert texts == {"content": THOUGHT + "Sun.", "reasoning": "", "reasoning_content": ""}


@STREAM
def test_an_answer_that_continues_a_message(agent_stack: FrontendStack, client: openai.OpenAI, stream: bool) -> None:
    generates(agent_stack, " a time")
    messages: Any = [*USER, {"role": "assistant", "content": "Once upon"}]
    made: Any = client.chat.completions.create(
        model="default", messages=messages, stream=stream, extra_body={"continue_final_message": True, "echo": True}
    )
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in made)
    else:
        text = made.choices[0].message.content
    assert text == "Once upon a time"
    (submit,) = agent_stack.scheduler.received(Submit)
    prompt = TOKENIZER.decode(list(memoryview(submit.prompt).cast("i")), skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nOnce upon")
