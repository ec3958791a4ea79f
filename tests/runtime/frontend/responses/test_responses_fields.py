"""Fields of POST /v1/responses: what they mean, and what is rejected."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from minisgl.wire.text import ChatMessage, Generate, ScoredToken, ToolOptions
from support.frontend.scripted import ScriptedStack, Step, answer, calls, says, thinks

BODY: Any = {"model": "default", "input": "Hi"}
TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "Edit files."}
GRAMMAR = "start: /.+/"
SERVER: Any = {
    "type": "namespace",
    "name": "mcp__files__",
    "description": "Files.",
    "tools": [{**TOOL, "name": "read"}],
}


def post(stack: ScriptedStack, **fields: Any) -> Any:
    return stack.http.post("/v1/responses", json=BODY | fields)


def events(stack: ScriptedStack, **fields: Any) -> list[dict[str, Any]]:
    text = post(stack, **fields, stream=True).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def tools_of(stack: ScriptedStack) -> ToolOptions:
    tools = stack.last(Generate).options.tools
    assert tools is not None
    return tools


def names_of(stack: ScriptedStack) -> list[str]:
    return [definition["function"]["name"] for definition in tools_of(stack).definitions]


def messages(stack: ScriptedStack, *items: Any, **fields: Any) -> tuple[ChatMessage, ...]:
    """Return the messages that the template gets."""
    answered = post(stack, input=list(items), **fields)
    assert answered.status_code == 200, answered.text
    sent = stack.last(Generate).messages
    assert sent is not None
    return sent


def test_a_request_of_codex_is_answered(scripted: ScriptedStack) -> None:
    scripted.script = answer(
        thinks("Hm."), calls(0, "mcp__files__read", "{}"), calls(1, "apply_patch", '{"input":"*"}')
    )
    body = {
        "model": "default",
        "instructions": "You are Codex.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
        ],
        "tools": [
            {**TOOL, "name": "exec_command", "description": "Run a command."},
            {**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR}},
            SERVER,
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "1",
        "client_metadata": {"x": "y"},
        "text": {"verbosity": "low"},
    }
    response = scripted.http.post("/v1/responses", json=body)
    assert response.headers["x-ignored-params"] == "tools[3], tools[1].format"
    assert names_of(scripted) == ["exec_command", "apply_patch", "mcp__files__read"]
    last = json.loads(response.text.split("data: ")[-1])
    assert last["type"] == "response.completed"
    reasoning, read, patch = last["response"]["output"]
    assert (read["type"], read["name"], read["namespace"], read["arguments"]) == (
        *("function_call", "read", "mcp__files__"),
        "{}",
    )
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", "*")
    # Codex sends reasoning back without its identifier.
    returned = {name: value for name, value in reasoning.items() if name not in ("id", "content")}
    output = [
        {"type": "function_call_output", "call_id": "call_0", "output": "text"},
        {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"},
    ]
    again = {**body, "input": [*body["input"], returned, read, patch, *output]}  # type: ignore[misc]
    assert scripted.http.post("/v1/responses", json=again).status_code == 200
    assert scripted.last(Generate).messages == (
        ChatMessage("system", "You are Codex.\n\n<permissions>"),
        ChatMessage("user", "<environment>"),
        ChatMessage("user", "Fix it."),
        ChatMessage(
            "assistant",
            None,
            tool_calls=[
                {"id": "call_0", "type": "function", "function": {"name": "mcp__files__read", "arguments": {}}},
                {"id": "call_1", "type": "function", "function": {"name": "apply_patch", "arguments": {"input": "*"}}},
            ],
            reasoning="Hm.",
        ),
        ChatMessage("tool", "text", tool_call_id="call_0"),
        ChatMessage("tool", "done", tool_call_id="call_1"),
    )


def test_items_become_messages(scripted: ScriptedStack) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "no json"}}
    reasoning = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "sum"}]}
    assert messages(
        scripted,
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]},
        reasoning,
        {"role": "assistant", "content": [{"type": "output_text", "text": "d", "annotations": []}], "phase": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "e"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "no json"},
        {"role": "assistant", "content": "g"},
        {**reasoning, "content": [{"type": "reasoning_text", "text": "all"}]},
        {"type": "web_search_call", "id": "ws", "status": "completed"},
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "gAAAA"},
        {"role": "user", "content": ""},
    ) == (
        ChatMessage("system", "a"),
        ChatMessage("user", "b\nc"),
        ChatMessage("assistant", "d", reasoning="sum"),
        ChatMessage("assistant", "e", tool_calls=[call]),
        ChatMessage("assistant", "g"),
        ChatMessage("assistant", "", reasoning="all"),
        ChatMessage("user", ""),
    )
    unreadable = [
        {"type": "reasoning", "summary": [], "encrypted_content": "minisgl1.?"},
        {"role": "user", "content": ""},
    ]
    assert post(scripted, input=unreadable).headers["x-ignored-params"] == "input[0].encrypted_content"


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        (None, ("auto", ""), ["f", "apply_patch", "mcp__files__read"]),
        ("required", ("required", ""), ["f", "apply_patch", "mcp__files__read"]),
        ({"type": "function", "name": "f"}, ("named", "f"), None),
        ({"type": "custom", "name": "apply_patch"}, ("named", "apply_patch"), None),
        ({"type": "function", "name": "read", "namespace": "mcp__files__"}, ("named", "mcp__files__read"), None),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
            ("required", ""),
            ["f"],
        ),
    ],
)
def test_the_choice_of_tools(scripted: ScriptedStack, choice: Any, expected: Any, names: list[str] | None) -> None:
    response = post(scripted, tools=[TOOL, PATCH, SERVER], tool_choice=choice, parallel_tool_calls=False)
    assert response.status_code == 200, response.text
    tools = tools_of(scripted)
    assert (tools.choice, tools.name, tools.parallel) == (*expected, False)
    assert names is None or names_of(scripted) == names
    assert response.json()["tool_choice"] == ("auto" if choice is None else choice)


def test_the_format_of_a_custom_tool(scripted: ScriptedStack) -> None:
    pattern = {"type": "grammar", "syntax": "regex", "definition": "a|b"}
    response = post(scripted, tools=[PATCH, {**PATCH, "name": "g", "format": pattern}])
    assert "x-ignored-params" not in response.headers
    plain, constrained = (definition["function"] for definition in tools_of(scripted).definitions)
    assert plain["parameters"]["required"] == ["input"] and "strict" not in plain
    assert constrained["parameters"]["properties"]["input"]["pattern"] == "^(?:a|b)$" and constrained["strict"]


def test_the_input_of_a_custom_tool_is_streamed(scripted: ScriptedStack) -> None:
    pieces = [' {"inp', 'ut": "*** \\u', "00e9\\ud83d", "\\ude42\\", 'n\\"x\\q', '\\/" ', "}"]
    scripted.script = answer(calls(0, "apply_patch", *pieces))
    found = events(scripted, tools=[PATCH])
    deltas = [event["delta"] for event in found if event["type"] == "response.custom_tool_call_input.delta"]
    (done,) = (event for event in found if event["type"] == "response.custom_tool_call_input.done")
    assert "".join(deltas) == done["input"] == '*** é🙂\n"xq/'
    assert found[-1]["response"]["output"][0]["input"] == done["input"]


def test_reasoning_is_repeated_as_summary_where_one_is_asked_for(scripted: ScriptedStack) -> None:
    scripted.script = answer(thinks("Let "), thinks("me."), says("Hello"))
    found = events(scripted, reasoning={"effort": "high", "summary": "auto"}, include=["reasoning.encrypted_content"])
    for kind in ("reasoning_text", "reasoning_summary_text"):
        deltas = [event["delta"] for event in found if event["type"] == f"response.{kind}.delta"]
        (done,) = (event for event in found if event["type"] == f"response.{kind}.done")
        assert "".join(deltas) == done["text"] == "Let me."
    response = found[-1]["response"]
    (reasoning, _) = response["output"]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "Let me."}]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me."}]
    assert response["reasoning"] == {"effort": "high", "summary": "auto"}
    assert scripted.last(Generate).options.rendering.template_variables["reasoning_effort"] == "high"
    for kept in ("content", "encrypted_content", "summary"):
        item = {"type": "reasoning", "summary": [], kept: reasoning[kept]}
        assert messages(scripted, item, {"role": "user", "content": "?"})[0].reasoning == "Let me."
    plain = post(scripted).json()["output"][0]
    assert (plain["summary"], plain["encrypted_content"]) == ([], None)


def test_log_probabilities_are_those_of_the_text(scripted: ScriptedStack) -> None:
    token = ScoredToken(b"Hello", b"Hello", 0, -0.5, [(b"Hello", -0.5), (b"Hi", -1.5)], 1, [1, 2])
    scripted.script = answer(Step("Hello", scored=(token,)))
    found = events(scripted, top_logprobs=2)
    (delta,) = (event for event in found if event["type"] == "response.output_text.delta")
    assert [item["token"] for item in delta["logprobs"]] == ["Hello"]
    assert len(delta["logprobs"][0]["top_logprobs"]) == 2
    assert found[-1]["response"]["output"][0]["content"][0]["logprobs"] == delta["logprobs"]
    assert scripted.last(Generate).params.logprobs == 2
    post(scripted, include=["message.output_text.logprobs"])
    assert scripted.last(Generate).params.logprobs == 0
    post(scripted)
    assert scripted.last(Generate).params.logprobs is None


@pytest.mark.parametrize("steps", [[], [thinks("Hm.")]])
def test_a_complete_response_has_a_message_or_a_call(scripted: ScriptedStack, steps: list[Step]) -> None:
    scripted.script = answer(*steps)
    response = post(scripted).json()
    assert response["status"] == "completed"
    assert [item["type"] for item in response["output"]] == [*["reasoning"] * len(steps), "message"]
    scripted.script = answer(*steps, reason="length")
    assert len(post(scripted).json()["output"]) == len(steps)


@pytest.mark.parametrize("steps", [[thinks("Hm")], [says("Hel")], [calls(0, "f", '{"a": ')]])
def test_a_limit_leaves_an_incomplete_response(scripted: ScriptedStack, steps: Any) -> None:
    scripted.script = answer(*steps, reason="length")
    last = events(scripted, max_output_tokens=3, tools=[TOOL])[-1]
    assert last["type"] == "response.incomplete"
    response = last["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["incomplete"]
    whole = post(scripted, max_output_tokens=3, tools=[TOOL]).json()
    assert (whole["status"], whole["output"][0]["status"]) == ("incomplete", "incomplete")


@pytest.mark.parametrize("name", ["f", "apply_patch"])
@pytest.mark.parametrize(
    ("steps", "statuses"),
    [
        (['{"input": "'], ["incomplete"]),
        ([""], ["incomplete"]),
        (['{"input": "a"}'], ["completed"]),
        (['{"input": "a"}', '{"inp'], ["completed", "incomplete"]),
    ],
)
def test_a_call_that_a_stop_string_cuts_off_is_incomplete(
    scripted: ScriptedStack, name: str, steps: list[str], statuses: list[str]
) -> None:
    """No reason of an incomplete response says so, hence the response itself is complete."""
    made = [calls(number, name, arguments) for number, arguments in enumerate(steps)]
    scripted.script = answer(*made, tool_calls=len(made), matched_stop="###")
    fields = {"tools": [TOOL, PATCH], "stop": "###"}
    response = post(scripted, **fields).json()
    assert [item["status"] for item in response["output"]] == statuses
    assert (response["status"], response["incomplete_details"]) == ("completed", None)
    *_, done, last = events(scripted, **fields)
    assert (done["type"], done["item"]["status"]) == ("response.output_item.done", statuses[-1])
    assert last["type"] == "response.completed"
    assert [item["status"] for item in last["response"]["output"]] == statuses


def test_text_before_a_stop_string_is_complete(scripted: ScriptedStack) -> None:
    scripted.script = answer(says("On"), matched_stop="###")
    response = post(scripted, stop="###").json()
    assert (response["status"], response["output"][0]["status"]) == ("completed", "completed")


def test_text_behind_a_call_is_another_message(scripted: ScriptedStack) -> None:
    scripted.script = answer(says("a"), calls(0, "f", "{}"), says("b"), thinks("c"), calls(1, "f", "{}"))
    kinds = ["message", "function_call", "message", "reasoning", "function_call"]
    for response in (post(scripted, tools=[TOOL]).json(), events(scripted, tools=[TOOL])[-1]["response"]):
        assert [item["type"] for item in response["output"]] == kinds


def test_a_failed_stream_ends_in_an_error_and_no_end(scripted: ScriptedStack) -> None:
    scripted.script = answer(says("Hel"), ends=False)
    client = openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)
    stream = client.responses.create(**BODY, stream=True)
    while next(stream).type != "response.output_text.delta":
        continue
    scripted.fail_last()
    with pytest.raises(openai.APIError, match="it broke"):
        list(stream)
    lines: list[str] = []
    with (
        pytest.raises(httpx.RemoteProtocolError),
        scripted.http.stream("POST", "/v1/responses", json=BODY | {"stream": True}) as response,
    ):
        for line in response.iter_lines():
            lines.append(line)
            if line == "event: response.output_text.delta":
                scripted.fail_last()
    error, failed = [json.loads(line[6:]) for line in lines if line.startswith("data: ")][-2:]
    assert (error["type"], error["code"], error["error"]["type"]) == ("error", "engine_unavailable", "server_error")
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "engine_unavailable", "message": "it broke"}
    assert failed["response"]["output"][0]["content"][0]["text"] == "Hel"
    assert failed["sequence_number"] == error["sequence_number"] + 1 == 6


def test_fields_are_repeated_in_the_response(scripted: ScriptedStack) -> None:
    fields = {
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "max_tool_calls": 3,
        "top_p": 0.5,
        "tools": [TOOL],
        "instructions": "Be kind.",
    }
    response = post(scripted, **fields, store=True, text={"format": {"type": "json_object"}}).json()
    assert {name: response[name] for name in fields} == fields
    assert (response["store"], response["background"], response["previous_response_id"]) == (False, False, None)
    assert response["text"]["format"] == {"type": "json_object"}
    constraint = scripted.last(Generate).options.structured_output
    assert constraint is not None and constraint.value == '{"type":"object"}'
    assert post(scripted, structured_outputs={"choice": ["a", "b"]}, text={}).status_code == 200
    constraint = scripted.last(Generate).options.structured_output
    assert constraint is not None and (constraint.kind, constraint.value) == ("choice", '["a","b"]')


def test_sampling_parameters_reach_the_engine(scripted: ScriptedStack) -> None:
    fields = {"top_k": 4, "min_p": 0.1, "seed": 7, "presence_penalty": 1.0, "frequency_penalty": 0.5}
    assert post(scripted, **fields, stop="x", max_output_tokens=5, priority=2, cache_salt="s").status_code == 200
    sent = scripted.last(Generate)
    assert {name: getattr(sent.params, name) for name in fields} == fields
    assert (sent.params.stop, sent.params.max_tokens) == (("x",), 5)
    assert (sent.options.priority, sent.options.cache_salt) == (2, "s")
    assert sent.params.temperature == 0.6, "the checkpoint's"


MESSAGE: Any = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"conversation": "conv_1"}, "unsupported_parameter", "conversation"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"prompt": {"id": "p"}}, "unsupported_parameter", "prompt"),
        ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
        ({"moderation": {"model": "m"}}, "unsupported_parameter", "moderation"),
        ({"prediction": {"type": "content", "content": "a"}}, "unsupported_parameter", "prediction"),
        ({"compaction": {"type": "auto"}}, "unsupported_parameter", "compaction"),
        ({"thread": {"id": "t"}}, "unsupported_parameter", "thread"),
        ({"fallbacks": ["other"]}, "unsupported_parameter", "fallbacks"),
        ({"truncation_side": "right"}, "unsupported_parameter", "truncation_side"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "unsupported_parameter", "kv_transfer_params"),
        ({"context_management": [{"type": "compaction"}]}, "unsupported_parameter", "context_management"),
        ({"include": ["everything"]}, "invalid_value", "include[0]"),
        ({"input": None}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": [{"type": "image_generation_call"}]}, "invalid_value", "input"),
        ({"input": [{"id": "1"}]}, "missing_required_parameter", "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "unsupported_parameter", "input[0].type"),
        ({"input": [{"type": "compaction", "encrypted_content": ""}]}, "unsupported_parameter", "input[0].type"),
        ({"input": [{"type": "computer_call"}]}, "unsupported_parameter", "input[0].type"),
        ({"input": [{"type": "message", "content": ""}]}, "missing_required_parameter", "input[0].role"),
        ({"input": [{"role": "critic", "content": ""}]}, "invalid_value", "input[0].role"),
        ({"input": [{"role": "user"}]}, "missing_required_parameter", "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
            "unsupported_parameter",
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "missing_required_parameter",
            "input[0].content[0].text",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f"}]},
            "missing_required_parameter",
            "input[0].arguments",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "1"}]},
            "missing_required_parameter",
            "input[0].output",
        ),
        ({"tools": [{"type": "file_search"}]}, "unsupported_parameter", "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "s"}, TOOL]}, "unsupported_parameter", "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "missing_required_parameter", "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": ":", "tools": []}]}, "invalid_value", "tools[0].name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "missing_required_parameter", "tools[0].name"),
        ({"tools": [{**TOOL, "name": 1}]}, "invalid_value", "tools[0].name"),
        ({"tools": [{**TOOL, "parameters": {"type": "string"}}]}, "invalid_value", "tools[0].parameters.type"),
        ({"tools": [{**TOOL, "description": 1}]}, "invalid_value", "tools[0].description"),
        ({"tools": [TOOL, TOOL]}, "invalid_value", "tools[1].name"),
        ({"tools": [{**PATCH, "format": {"type": "grammar"}}]}, "invalid_value", "tools[0].format"),
        ({"tools": [{**SERVER, "name": ""}]}, "invalid_value", "tools[0].name"),
        ({"tools": [{**SERVER, "tools": None}]}, "invalid_value", "tools[0].tools"),
        ({"tools": [{**SERVER, "tools": [{"type": "mcp"}]}]}, "invalid_value", "tools[0].tools[0].type"),
        ({"tools": [{**SERVER, "tools": [TOOL] * 3}] * 50}, "invalid_value", "tools"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "any"}, "invalid_value", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "invalid_value", "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom", "name": "f"}}, "invalid_value", "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "invalid_value", "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "mcp", "server_label": "s"}},
            "unsupported_parameter",
            "tool_choice.type",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [1]}},
            "invalid_value",
            "tool_choice.tools[0]",
        ),
        ({"text": {"format": {"type": "grammar"}}}, "invalid_value", "text.format.type"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n"}}},
            "missing_required_parameter",
            "text.format.schema",
        ),
        ({"reasoning": {"effort": "huge"}}, "invalid_value", "reasoning.effort"),
        ({"max_tokens": 9}, "unsupported_parameter", "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
        ({"logit_bias": {"1": 1}}, "unsupported_parameter", "logit_bias"),
        (
            {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
            "invalid_value",
            "structured_outputs.regex",
        ),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"model": "gpt"}, "model_not_found", "model"),
    ],
)
def test_what_is_not_possible_is_rejected_by_name(scripted: ScriptedStack, fields: Any, code: str, param: str) -> None:
    response = post(scripted, **fields)
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert response.status_code == (404 if code == "model_not_found" else 400)


def test_stored_responses_do_not_exist(scripted: ScriptedStack) -> None:
    client = openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)
    for request in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="responses are not stored"):
            request("resp_1")
    with pytest.raises(openai.NotFoundError, match="responses are not stored"):
        client.responses.input_items.list("resp_1")
    assert scripted.http.put("/v1/responses/resp_1").status_code == 405


def test_compaction_says_what_to_do_instead(scripted: ScriptedStack) -> None:
    refused = scripted.http.post("/v1/responses/compact", json={"model": "default", "input": "Hi"})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (404, "compaction_not_supported")
    assert "summary" in error["message"] and "POST /v1/responses" in error["message"]
    assert scripted.http.get("/v1/responses/compact").json()["error"]["code"] == "response_not_found"
