"""Calls and reasoning of families with formats of their own, in all APIs: whole, streamed, required and in history."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest
from tokenizers import Tokenizer

from minisgl.wire.messages import Submit
from support.frontend import stack as stack_module
from support.frontend.fake_scheduler import answer_with
from support.frontend.family_templates import FAMILIES
from support.frontend.stack import FrontendStack
from support.tiny_tokenizers import byte_level

ARGUMENTS: Final = {"city": 'Köln "x"\n', "days": 2}
PARAMETERS: Final = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTION: Final = {"name": "weather", "parameters": PARAMETERS}
ANSWERS: Final = {
    "gemma4": "<|channel>thought\nhm<channel|>Look."
    '<|tool_call>call:weather{city:<|"|>Köln "x"\n<|"|>,days:2}<tool_call|>',
    "glm45": "\n<think>hm</think>\nLook.\n<tool_call>weather\n<arg_key>city</arg_key>\n"
    '<arg_value>Köln "x"\n</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>',
    "minimax-m2": 'hm\n</think>\n\nLook.\n<minimax:tool_call>\n<invoke name="weather">\n'
    '<parameter name="city">Köln "x"\n</parameter>\n<parameter name="days">2</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "magistral": '[THINK]hm[/THINK]Look.[TOOL_CALLS]weather[ARGS]{"city": "Köln \\"x\\"\\n", "days": 2}',
}
"""What the model writes."""
HISTORY: Final = {
    "gemma4": '<|tool_call>call:weather{city:<|"|>Köln "x"\n<|"|>,days:2}<tool_call|><|tool_response>response:weather{',
    "glm45": "<think>hm</think>\nLook.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln",
    "minimax-m2": "<think>\nhm\n</think>\n\nLook.\n<minimax:tool_call>\n"
    '<invoke name="weather">\n<parameter name="city">Köln',
    "magistral": '[THINK]hm[/THINK]Look.[TOOL_CALLS]weather[ARGS]{"city": "Köln',
}
"""The answer in the next prompt, as the template writes it."""
SPECIAL: Final = ("gemma4", "magistral")
"""Families whose markers are special tokens, which have no text."""
REQUIRED: Final[dict[str, Any]] = {"chat/completions": "required", "responses": "required", "messages": {"type": "any"}}
EACH_API = pytest.mark.parametrize("path", REQUIRED)


@pytest.fixture(scope="module", params=ANSWERS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of a family, its tokenizer and a server."""
    known = FAMILIES[request.param]
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    if request.param in SPECIAL:
        tokenizer = byte_level(special=(*special, *known.tokens), added=())
    else:
        tokenizer = byte_level(special=special, added=known.tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack_module, "TOKENIZER", tokenizer)
        stack = FrontendStack(tmp_path_factory.mktemp("family"), template=known.template, max_model_len=4096)
        yield request.param, tokenizer, stack
        stack.close()


def ending(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of an answer and its end."""
    *tokens, end = tokenizer.encode(f"{text}<|im_end|>").ids
    return [*tokens, -end]


def body(path: str, messages: list[Any], **fields: Any) -> dict[str, Any]:
    match path:
        case "chat/completions":
            tools: list[Any] = [{"type": "function", "function": FUNCTION}]
            return {"messages": messages, "tools": tools, "max_tokens": 500, "enable_thinking": True} | fields
        case "responses":
            tools = [{"type": "function", **FUNCTION}]
            own = {"input": messages, "tools": tools, "max_output_tokens": 500, "reasoning": {"effort": "high"}}
            return own | fields
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    return {"messages": messages, "tools": tools, "max_tokens": 500, "thinking": {"type": "enabled"}} | fields


def parts(path: str, text: str, *, stream: bool) -> tuple[str, str, list[tuple[str, str]]]:
    """Return reasoning, text and calls of a response."""
    reasoning, content, calls = "", "", list[list[str]]()
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    events: list[Any] = [json.loads(line) for line in lines] if stream else [json.loads(text)]
    if path == "responses":
        whole = events[-1]["response"] if stream else events[0]
        for item in whole["output"]:
            match item["type"]:
                case "reasoning":
                    reasoning += "".join(one["text"] for one in item["content"])
                case "message":
                    content += "".join(one["text"] for one in item["content"])
                case "function_call":
                    calls.append([item["name"], item["arguments"]])
    elif path == "messages" and not stream:
        for block in events[0]["content"]:
            reasoning += block.get("thinking", "")
            content += block.get("text", "")
            if block["type"] == "tool_use":
                calls.append([block["name"], json.dumps(block["input"])])
    elif path == "messages":
        for event in events:
            if (block := event.get("content_block")) is not None and block["type"] == "tool_use":
                calls.append([block["name"], ""])
            delta = event.get("delta", {})
            reasoning += delta.get("thinking", "")
            content += delta.get("text", "")
            if "partial_json" in delta:
                calls[-1][1] += delta["partial_json"]
    else:
        for event in events:
            for choice in event["choices"]:
                message = choice["delta" if stream else "message"]
                reasoning += message.get("reasoning") or ""
                content += message.get("content") or ""
                for call in message.get("tool_calls") or ():
                    if "name" in call["function"]:
                        calls.append([call["function"]["name"], ""])
                    calls[-1][1] += call["function"]["arguments"]
    return reasoning, content, [(name, arguments) for name, arguments in calls]


@EACH_API
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_is_taken_apart(family: tuple[str, Tokenizer, FrontendStack], path: str, stream: bool) -> None:
    name, tokenizer, stack = family
    stack.scheduler.reset()
    stack.scheduler.answer = answer_with(ending(tokenizer, ANSWERS[name]))
    response = stack.http.post(f"/v1/{path}", json=body(path, [{"role": "user", "content": "Hi"}], stream=stream))
    assert response.status_code == 200, response.text
    reasoning, text, calls = parts(path, response.text, stream=stream)
    assert (reasoning, text) == ("hm", "Look.")
    assert [(called, json.loads(arguments)) for called, arguments in calls] == [("weather", ARGUMENTS)]


@EACH_API
def test_a_required_call_has_the_grammar_of_the_family(family: tuple[str, Tokenizer, FrontendStack], path: str) -> None:
    name, tokenizer, stack = family
    stack.scheduler.reset()
    stack.scheduler.answer = answer_with(ending(tokenizer, ""))
    fields = {"tool_choice": REQUIRED[path]}
    assert stack.http.post(f"/v1/{path}", json=body(path, [{"role": "user", "content": "Hi"}], **fields)).is_success
    (submit,) = stack.scheduler.received(Submit)
    thinking, start = submit.constraint.thinking, FAMILIES[name].tokens[0]
    assert f"<[{tokenizer.token_to_id(start)}]>" in submit.constraint.grammar
    assert thinking is not None and thinking.is_open == (name == "minimax-m2")
    # Reasoning may come first, as the model begins it.
    begins = {"gemma4": "<|channel>", "magistral": "[THINK]", "glm45": "\n<think>", "minimax-m2": "<think>"}
    assert [*thinking.start] == tokenizer.encode(begins[name]).ids


@EACH_API
def test_the_next_prompt_has_the_answer_as_the_model_wrote_it(
    family: tuple[str, Tokenizer, FrontendStack], path: str
) -> None:
    name, tokenizer, stack = family
    stack.scheduler.reset()
    stack.scheduler.answer = answer_with(ending(tokenizer, ""))
    messages: dict[str, list[Any]] = {
        "chat/completions": [
            {
                "role": "assistant",
                "content": "Look.",
                "reasoning_content": "hm",
                "tool_calls": [
                    {
                        "id": "abcdefghi",
                        "type": "function",
                        "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "blue"},
        ],
        "responses": [
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Look."}]},
            {"type": "function_call", "call_id": "abcdefghi", "name": "weather", "arguments": json.dumps(ARGUMENTS)},
            {"type": "function_call_output", "call_id": "abcdefghi", "output": "blue"},
        ],
        "messages": [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "Look."},
                    {"type": "tool_use", "id": "abcdefghi", "name": "weather", "input": ARGUMENTS},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "abcdefghi", "content": "blue"}]},
        ],
    }
    loop = [{"role": "user", "content": "Hi <|tool_call>"}, *messages[path]]
    assert stack.http.post(f"/v1/{path}", json=body(path, loop)).status_code == 200
    (submit,) = stack.scheduler.received(Submit)
    prompt = np.frombuffer(submit.prompt, "<i4").tolist()
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    assert HISTORY[name] in text
    assert "blue" in text.partition(HISTORY[name])[2]
    if name == "gemma4":
        assert prompt.count(tokenizer.token_to_id("<|tool_call>")) == 1, "a text of the client is no marker"
