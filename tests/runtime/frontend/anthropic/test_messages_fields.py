"""Fields of POST /v1/messages: what they mean, and errors in Anthropic's form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest

from minisgl.frontend.config import Access
from minisgl.frontend.server import auth
from minisgl.wire.text import ChatMessage, Encode, Generate, TextFailed
from support.frontend.scripted import ScriptedStack, answer, calls, says, thinks

BODY: Any = {"model": "default", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
TOOL: Any = {"name": "f", "input_schema": {"type": "object"}}
CLEAR = "clear_thinking_20251015"


def post(stack: ScriptedStack, **fields: Any) -> Any:
    return stack.http.post("/v1/messages", json=BODY | fields, headers={"anthropic-version": "2023-06-01"})


def messages(stack: ScriptedStack, *given: Any, **fields: Any) -> tuple[ChatMessage, ...]:
    """Return the messages that the template gets."""
    answered = post(stack, messages=list(given), **fields)
    assert answered.status_code == 200, answered.text
    sent = stack.last(Generate).messages
    assert sent is not None
    return sent


def test_a_request_of_claude_code_is_answered(scripted: ScriptedStack) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    scripted.script = answer(says("Hello"))
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37; cch=fa690;"},
        {"type": "text", "text": "You are a coding agent.", **cached},
        {"type": "text", "text": "The directory is /work.", **cached},
    ]
    user = [
        {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
        {"type": "text", "text": "hey", **cached},
    ]
    body = {
        "model": "default",
        "max_tokens": 32000,
        "system": system,
        "messages": [{"role": "user", "content": user}],
        "tools": [
            {"name": "Read", "description": "Read a file.", "input_schema": {"type": "object", "properties": {}}},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "metadata": {"user_id": "user_1"},
        "temperature": 1,
        "stream": True,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    response = scripted.http.post("/v1/messages?beta=true", json=body, headers={"anthropic-beta": "x"})
    assert response.status_code == 200
    assert response.headers["x-ignored-params"] == "tools[1]"
    assert response.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
    sent = scripted.last(Generate)
    assert sent.messages == (
        ChatMessage("system", "You are a coding agent.\n\nThe directory is /work."),
        ChatMessage("user", "<system-reminder>Be brief.</system-reminder>\nhey"),
    )
    tools = sent.options.tools
    assert tools is not None and [tool["function"]["name"] for tool in tools.definitions] == ["Read"]
    assert (sent.options.thinking_budget, sent.options.rendering.template_variables["enable_thinking"]) == (31999, True)


def test_blocks_become_messages(scripted: ScriptedStack) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert messages(
        scripted,
        {"role": "system", "content": "Mind the gap."},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "?"},
                {"type": "thinking", "thinking": "hm", "signature": "?"},
                {"type": "text", "text": "b"},
                use,
                {"type": "text", "text": "c"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "before"},
                {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "no"},
                {"type": "tool_result", "tool_use_id": "t2"},
            ],
        },
        {"role": "user", "content": []},
    ) == (
        ChatMessage("system", "Mind the gap."),
        ChatMessage("user", "a"),
        ChatMessage("assistant", "b", tool_calls=[call], reasoning="hm"),
        ChatMessage("assistant", "c"),
        ChatMessage("user", "before"),
        ChatMessage("tool", "Error: no", tool_call_id="t1"),
        ChatMessage("tool", "", tool_call_id="t2"),
        ChatMessage("user", ""),
    )


def test_a_last_message_of_the_assistant_is_continued(scripted: ScriptedStack) -> None:
    sent = messages(scripted, {"role": "user", "content": "A?"}, {"role": "assistant", "content": "The answer is"})
    assert sent[-1] == ChatMessage("assistant", "The answer is")
    generate = scripted.last(Generate)
    rendering = generate.options.rendering
    assert (rendering.continue_final_message, rendering.add_generation_prompt) == (True, False)
    messages(scripted, {"role": "user", "content": "A?"})
    generate = scripted.last(Generate)
    rendering = generate.options.rendering
    assert (rendering.continue_final_message, rendering.add_generation_prompt) == (False, True)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", "", True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", "", False)),
        ({"type": "any"}, ("required", "", True)),
        ({"type": "tool", "name": "f"}, ("named", "f", True)),
        ({"type": "none"}, ("none", "", True)),
    ],
)
def test_the_choice_of_tools(scripted: ScriptedStack, choice: Any, expected: tuple[str, str, bool]) -> None:
    assert post(scripted, tools=[TOOL], tool_choice=choice).status_code == 200
    tools = scripted.last(Generate).options.tools
    assert tools is not None
    assert (tools.choice, tools.name, tools.parallel) == expected


@pytest.mark.parametrize(
    ("thinking", "thinks_by_template", "budget"),
    [
        (None, False, None),
        ({"type": "disabled"}, False, None),
        ({"type": "enabled"}, True, None),
        ({"type": "enabled", "budget_tokens": 5}, True, 5),
        ({"type": "adaptive", "display": "summarized"}, True, None),
    ],
)
def test_thinking_is_off_unless_it_is_asked_for(
    scripted: ScriptedStack, thinking: Any, thinks_by_template: bool, budget: int | None
) -> None:
    assert post(scripted, thinking=thinking, output_config={"effort": "high"}).status_code == 200
    sent = scripted.last(Generate)
    variables = {"enable_thinking": thinks_by_template, "thinking": thinks_by_template, "reasoning_effort": "high"}
    variables |= {} if budget is None else {"thinking_budget": budget}
    assert (sent.options.rendering.template_variables, sent.options.thinking_budget) == (variables, budget)


def test_omitted_thinking_returns_from_its_signature(scripted: ScriptedStack) -> None:
    scripted.script = answer(thinks("secret"), says("Hello"))
    omitted = {"type": "adaptive", "display": "omitted"}
    streamed = post(scripted, thinking=omitted, stream=True).text
    content = post(scripted, thinking=omitted).json()["content"]
    assert "secret" not in streamed and '"thinking_delta"' not in streamed
    assert content[0]["thinking"] == "" and content[0]["signature"] in streamed
    turn = {"role": "assistant", "content": content}
    sent = messages(scripted, *BODY["messages"], turn, *BODY["messages"])
    assert sent[1] == ChatMessage("assistant", "Hello", reasoning="secret")
    content[0]["signature"] = "minisgl1.?"
    sent = messages(scripted, *BODY["messages"], turn, *BODY["messages"])
    assert sent[1] == ChatMessage("assistant", "Hello")


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ({}, [None, None, "c", "d"]),
        ({"keep": {"type": "thinking_turns", "value": 1}}, [None, None, "c", "d"]),
        ({"keep": {"type": "thinking_turns", "value": 2}}, [None, "b", "c", "d"]),
        ({"keep": {"type": "thinking_turns", "value": 9}}, ["a", "b", "c", "d"]),
        ({"keep": {"type": "all"}}, ["a", "b", "c", "d"]),
        ({"keep": "all"}, ["a", "b", "c", "d"]),
    ],
)
def test_thinking_of_earlier_turns_is_cleared(
    scripted: ScriptedStack, keep: dict[str, Any], expected: list[str | None]
) -> None:
    """The results of tools continue a turn."""

    def turn(thought: str, *blocks: Any) -> Any:
        thinking = [{"type": "redacted_thinking", "data": "?"}, {"type": "thinking", "thinking": thought}]
        return {"role": "assistant", "content": [*thinking, {"type": "text", "text": "ok"}, *blocks]}

    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}, {"type": "text", "text": "go"}]}
    (user,) = BODY["messages"]
    given = [user, turn("a"), user, turn("b"), user, {"role": "assistant", "content": "ok"}, user, turn("c", use)]
    edits = {"edits": [{"type": CLEAR, **keep}]}
    response = post(scripted, messages=[*given, result, turn("d"), user], context_management=edits)
    assert response.status_code == 200
    sent = scripted.last(Generate).messages
    assert sent is not None
    thinking = [message.reasoning for message in sent if message.role == "assistant"]
    assert [thinking[at] for at in (0, 1, 3, 4)] == expected


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ({"reason": "stop"}, ("end_turn", None)),
        ({"reason": "stop", "matched_stop": "###"}, ("stop_sequence", "###")),
        ({"reason": "stop", "matched_stop": 7}, ("end_turn", None)),
        ({"reason": "length", "completion_tokens": 9}, ("max_tokens", None)),
        ({"reason": "length", "completion_tokens": 8}, ("model_context_window_exceeded", None)),
    ],
)
def test_the_reason_of_the_end(scripted: ScriptedStack, end: Any, expected: tuple[str, str | None]) -> None:
    scripted.script = answer(says("a"), **end)
    message = post(scripted, stop_sequences=["###"]).json()
    assert (message["stop_reason"], message["stop_sequence"]) == expected
    assert scripted.last(Generate).params.stop == ("###",)
    assert f'"stop_reason":"{expected[0]}"' in post(scripted, stream=True).text


OTHER: Any = {"type": "container_upload", "file_id": "f"}
IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [OTHER]}]}
                ]
            },
            "messages[0].content[0].content[0].type",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference"}]}
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0].tool_name",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].id"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
                ]
            },
            "messages[0].content",
        ),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f g", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"prediction": {"type": "content", "content": "a"}}, "prediction"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"compaction": {"type": "auto"}}, "compaction"),
        ({"thread": {"id": "t"}}, "thread"),
        ({"fallbacks": ["other"]}, "fallbacks"),
        ({"truncation_side": "right"}, "truncation_side"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0].type"),
        ({"context_management": {"edits": [{"type": CLEAR, "keep": 1}]}}, "context_management.edits[0].keep"),
        ({"container": "c"}, "container"),
        ({"stop": "a"}, "stop"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"model": "claude"}, "model"),
    ],
)
def test_invalid_fields_are_named(scripted: ScriptedStack, fields: Any, param: str) -> None:
    response = post(scripted, **fields)
    assert response.status_code == (404 if param == "model" else 400)
    body = response.json()
    assert (body["type"], body["error"]["param"]) == ("error", param)
    assert body["error"]["type"] == ("not_found_error" if param == "model" else "invalid_request_error")
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]


def streamed(stack: ScriptedStack, **fields: Any) -> Any:
    """Return the message that a client makes of a stream."""
    client = anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0)
    with client.messages.stream(**BODY, **fields) as stream:
        return json.loads(stream.get_final_message().to_json())


def same(message: Any, other: Any) -> bool:
    """Return whether two messages are equal but for their identifiers."""
    names = ("content", "stop_reason", "stop_sequence", "usage")
    return [message[name] for name in names] == [other[name] for name in names]


@pytest.mark.parametrize("end", [{"reason": "length"}, {"matched_stop": "###"}], ids=str)
@pytest.mark.parametrize("arguments", ["", '{"path": "/', '{"path": [1, 2'])
def test_a_call_that_a_limit_or_a_stop_string_cuts_off_is_left_out(
    scripted: ScriptedStack, arguments: str, end: Any
) -> None:
    scripted.script = answer(says("Yes."), calls(0, "f", arguments), completion_tokens=9, **end)
    message = post(scripted, tools=[TOOL]).json()
    assert message["content"] == [{"type": "text", "text": "Yes."}]
    assert message["stop_reason"] == ("max_tokens" if "reason" in end else "stop_sequence")
    assert same(streamed(scripted, tools=[TOOL]), message)


def test_a_whole_call_counts_though_the_answer_reached_its_limit(scripted: ScriptedStack) -> None:
    scripted.script = answer(calls(0, "f", '{"a"', ": 1}"), reason="length", completion_tokens=9)
    message = post(scripted, tools=[TOOL]).json()
    assert message["content"] == [{"type": "tool_use", "id": "call_0", "name": "f", "input": {"a": 1}}]
    assert same(streamed(scripted, tools=[TOOL]), message)


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        '{"a": foo}',
        '{"a": NaN}',
        '{"a": 1e999}',
        "[1]",
        '"s"',
        "null",
        '{"a": "\\ud83d"}',
        '{"a": "\\q"}',
        '{"a": 1',
    ],
)
def test_arguments_that_are_no_object_of_json_are_text(scripted: ScriptedStack, arguments: str) -> None:
    """Clients run a tool without arguments, or with some of them, where they cannot read them all."""
    scripted.script = answer(calls(0, "f", *arguments), calls(1, "f", '{"a": 1}'))
    message = post(scripted, tools=[TOOL]).json()
    broken, call = message["content"]
    assert broken == {"type": "text", "text": f'{{"name": "f", "arguments": {arguments}}}'}
    assert (call["input"], message["stop_reason"]) == ({"a": 1}, "tool_use")
    assert same(streamed(scripted, tools=[TOOL]), message)
    scripted.script = answer(calls(0, "f", arguments))
    assert post(scripted, tools=[TOOL]).json()["stop_reason"] == "end_turn"


def test_arguments_are_passed_on_as_they_were_written(scripted: ScriptedStack) -> None:
    arguments = '{"a": 1.50, "b": 123456789012345678901234567890, "c": 1E2}'
    scripted.script = answer(calls(0, "f", arguments))
    assert f'"input":{arguments}' in post(scripted, tools=[TOOL]).text


def test_a_failed_stream_raises_in_the_client(scripted: ScriptedStack) -> None:
    scripted.script = answer(says("Hel"), ends=False)
    client = anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0)
    stream = client.messages.create(**BODY, stream=True)
    while next(stream).type != "content_block_delta":
        continue
    scripted.fail_last()
    with pytest.raises(anthropic.APIStatusError) as raised:
        list(stream)
    error = raised.value.body["error"]  # type: ignore[index]
    assert (error["type"], error["code"]) == ("overloaded_error", "engine_unavailable")


def test_a_prompt_that_is_too_long_says_so_in_the_words_that_agents_look_for(scripted: ScriptedStack) -> None:
    message = "This model's maximum context length is 256 tokens. The prompt has 300 tokens and at least 1 more were …"
    scripted.script = lambda request: [TextFailed(id=request.id, code="context_length_exceeded", message=message)]
    error = post(scripted).json()["error"]
    assert error["message"].startswith("prompt is too long: 300 tokens > 256 maximum")
    assert error["code"] == "context_length_exceeded"


def test_keys_are_accepted_in_both_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_scripted: Callable[..., ScriptedStack]
) -> None:
    monkeypatch.setattr(auth, "RELOAD_SECONDS", 0.0)
    keys = tmp_path / "keys"
    keys.write_text("sk-first\n")
    stack = make_scripted(access=Access(api_keys=str(keys)))
    stack.script = answer(says("ok"))
    missing = stack.http.post("/v1/messages", json=BODY)
    assert (missing.status_code, missing.json()["error"]["type"]) == (401, "authentication_error")
    for headers, status in [
        ({"x-api-key": "sk-first"}, 200),
        ({"authorization": "Bearer sk-first"}, 200),
        ({"authorization": "Bearer sk-first", "x-api-key": "sk-other"}, 200),
        ({"authorization": "Bearer sk-other", "x-api-key": "sk-first"}, 200),
        ({"x-api-key": "sk-other"}, 401),
        ({"authorization": "Bearer sk-other"}, 401),
    ]:
        assert stack.http.post("/v1/messages", json=BODY, headers=headers).status_code == status, headers
    client = anthropic.Anthropic(base_url=stack.url, api_key="sk-first", max_retries=0)
    assert client.messages.create(**BODY).content
    assert stack.http.get("/v1/models", headers={"x-api-key": "sk-first"}).status_code == 200


def test_errors_of_the_count_and_of_other_methods_have_the_same_form(scripted: ScriptedStack) -> None:
    for response in (
        scripted.http.post("/v1/messages/count_tokens", json={}),
        scripted.http.get("/v1/messages"),
        scripted.http.post("/v1/messages/batches", json={}),
    ):
        assert response.json()["type"] == "error" and 400 <= response.status_code < 500
    continued = [*BODY["messages"], {"role": "assistant", "content": "It"}]
    count = scripted.http.post("/v1/messages/count_tokens", json={"messages": continued, "mood": 1})
    assert count.json() == {"input_tokens": 2} and count.headers["x-ignored-params"] == "mood"
    assert not scripted.last(Encode).rendering.add_generation_prompt
