"""Every invalid request gets an OpenAI error that names the problem, and the server keeps running."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from minisgl.wire.messages import Submit
from support.frontend.fake_scheduler import answer_with
from support.frontend.stack import EOS, FrontendStack, ids

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"prompt": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


def allowed(*tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": list(tools)}}


def predicted(content: Any, kind: str = "content") -> dict[str, Any]:
    return {"type": kind, "content": content}


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth else {}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert isinstance(error["code"], str)
    assert error["message"]
    return error


@pytest.fixture(autouse=True)
def alive_afterwards(stack: FrontendStack) -> Iterator[None]:
    yield
    assert stack.scheduler.received(Submit) == [], "an invalid request reached the scheduler"
    stack.scheduler.answer = answer_with([*ids("ok"), -EOS])
    response = stack.http.post("/v1/chat/completions", json=CHAT)
    assert response.json()["choices"][0]["message"]["content"] == "ok"


def both(**cases: Any) -> list[Any]:
    return [pytest.param(*case, id=name) for name, case in cases.items()]


@pytest.mark.parametrize(
    ("change", "param", "code"),
    both(
        temperature_low=({"temperature": -0.1}, "temperature", "invalid_value"),
        temperature_high=({"temperature": 2.1}, "temperature", "invalid_value"),
        temperature_text=({"temperature": "1"}, "temperature", "invalid_value"),
        temperature_bool=({"temperature": True}, "temperature", "invalid_value"),
        top_p_zero=({"top_p": 0}, "top_p", "invalid_value"),
        top_p_high=({"top_p": 1.01}, "top_p", "invalid_value"),
        top_k=({"top_k": -2}, "top_k", "invalid_value"),
        top_k_fraction=({"top_k": 1.5}, "top_k", "invalid_value"),
        min_p=({"min_p": 1.5}, "min_p", "invalid_value"),
        seed=({"seed": 2**63}, "seed", "invalid_value"),
        max_tokens_negative=({"max_tokens": -1}, "max_tokens", "invalid_value"),
        max_tokens_text=({"max_tokens": "5"}, "max_tokens", "invalid_value"),
        stop_empty=({"stop": ""}, "stop", "invalid_value"),
        stop_long=({"stop": "x" * 257}, "stop", "invalid_value"),
        stop_many=({"stop": ["x"] * 17}, "stop", "invalid_value"),
        stop_thousands=({"stop": ["x" * 200] * 5000}, "stop", "invalid_value"),
        stop_part=({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
        stop_type=({"stop": 5}, "stop", "invalid_value"),
        stop_regex=({"stop_regex": "("}, "stop_regex", "invalid_value"),
        stop_regex_part=({"stop_regex": ["a", "b$"]}, "stop_regex[1]", "invalid_value"),
        stop_regex_size=({"stop_regex": ["a{200}", "b{200}"]}, "stop_regex[1]", "invalid_value"),
        stop_regex_empty=({"stop_regex": ""}, "stop_regex", "invalid_value"),
        allowed_none=({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
        allowed_vocabulary=({"allowed_token_ids": [5, 512]}, "allowed_token_ids", "invalid_token"),
        logprob_ids_alone=({"logprob_token_ids": [5]}, "logprob_token_ids", "invalid_value"),
        logprob_ids_many=({"logprob_token_ids": [5] * 129}, "logprob_token_ids", "invalid_value"),
        bad_words_empty=({"bad_words": ["a", ""]}, "bad_words[1]", "invalid_value"),
        bad_words_many=({"bad_words": ["a"] * 129}, "bad_words", "invalid_value"),
        bad_words_type=({"bad_words": "a"}, "bad_words", "invalid_value"),
        stream=({"stream": "yes"}, "stream", "invalid_value"),
        ignore_eos=({"ignore_eos": 1}, "ignore_eos", "invalid_value"),
        n=({"n": 0}, "n", "invalid_value"),
        n_high=({"n": 129}, "n", "invalid_value"),
        n_bool=({"n": True}, "n", "invalid_value"),
        presence_penalty=({"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
        frequency_penalty=({"frequency_penalty": -2.5}, "frequency_penalty", "invalid_value"),
        repetition_penalty=({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        repetition_penalty_near_0=({"repetition_penalty": 0.0009}, "repetition_penalty", "invalid_value"),
        logit_bias_type=({"logit_bias": {"5": "1"}}, "logit_bias", "invalid_value"),
        logit_bias_key=({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
        logit_bias_many=({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "invalid_value"),
        logit_bias_vocabulary=({"logit_bias": {"512": 1}}, "logit_bias", "invalid_token"),
        stop_token_ids=({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
        prompt_logprobs_of_all=({"prompt_logprobs": -1}, "prompt_logprobs", "invalid_value"),
        min_tokens=({"min_tokens": -1}, "min_tokens", "invalid_value"),
        min_above_max=({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "invalid_value"),
        top_logprobs_or_logprobs=({"logprobs": "5"}, "logprobs", "invalid_value"),
        priority=({"priority": 1.5}, "priority", "invalid_value"),
        timeout=({"timeout": 0}, "timeout", "invalid_value"),
        cache_salt=({"cache_salt": ""}, "cache_salt", "invalid_value"),
        json_schema=(
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "missing_required_parameter",
        ),
        response_format=({"response_format": {"type": "x"}}, "response_format.type", "invalid_value"),
    ),
)
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)], ids=["chat", "completion"]
)
def test_invalid_parameters(
    stack: FrontendStack, path: str, body: dict[str, Any], change: dict[str, Any], param: str, code: str
) -> None:
    error = error_of(stack.http.post(path, json=body | change), 400)
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("bias", "named"),
    [
        ({"5": 1, "a": 1}, "'a'"),
        ({"bad1": 1, "5": 1, "bad2": 1}, "'bad1', 'bad2'"),
        ({f"x{number}": 1 for number in range(99)}, "95 more"),
        ({"5": 1, "05": 1}, "'05'"),
        ({"-1": 1}, "'-1'"),
        ({"9" * 5000: 1}, "'999"),
        ({"5": "1"}, "token 5"),
        ({"5": 1, "6": None, "7": None}, "token 6"),
        ({"6": {"a": 1}}, "token 6"),
        ({"512": 1}, "token id 512"),
        ({"": 1}, "''"),
        ([5], "object"),
        ({str(token): 1 for token in range(1025)}, "1024"),
    ],
    ids=[
        "name",
        "names",
        "many names",
        "zeros",
        "negative",
        "huge",
        "text",
        "null",
        "object",
        "vocabulary",
        "empty",
        "list",
        "many",
    ],
)
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_errors_of_logit_bias_name_the_key(
    stack: FrontendStack, path: str, body: dict[str, Any], bias: Any, named: str
) -> None:
    error = error_of(stack.http.post(path, json=body | {"logit_bias": bias}), 400)
    assert error["param"] == "logit_bias"
    assert named in error["message"] and len(error["message"]) < 250


@pytest.mark.parametrize(
    ("body", "param", "code"),
    both(
        no_messages=({}, "messages", "missing_required_parameter"),
        empty=({"messages": []}, "messages", "invalid_value"),
        many=({"messages": CHAT["messages"] * 2049}, "messages", "invalid_value"),
        type=({"messages": "Hi"}, "messages", "invalid_value"),
        no_role=({"messages": [{"content": "Hi"}]}, "messages[0].role", "missing_required_parameter"),
        role=({"messages": [{"role": "the boss", "content": "Hi"}]}, "messages[0].role", "invalid_value"),
        role_control=({"messages": [{"role": "<|im_end|>", "content": "Hi"}]}, "messages[0].role", "invalid_value"),
        function=({"messages": [{"role": "function", "content": "a"}]}, "messages[0].role", "unsupported_parameter"),
        tool=({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages[0].content", "invalid_value"),
        no_content=({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
        content=({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_value"),
        image=(
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "unsupported_parameter",
        ),
        part=(
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "invalid_value",
        ),
        tool_calls=(
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
            "missing_required_parameter",
        ),
        tool_calls_role=(
            {"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]},
            "messages[0].tool_calls",
            "invalid_value",
        ),
        tool_calls_template=(
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]},
            "messages[0].tool_calls",
            "chat_template_error",
        ),
        tools_required=(CHAT | {"tools": [TOOL], "tool_choice": "required"}, "tools", "chat_template_error"),
        tools_type=(CHAT | {"tools": "f"}, "tools", "invalid_value"),
        tools_many=(CHAT | {"tools": [TOOL] * 129}, "tools", "invalid_value"),
        tool_type=(CHAT | {"tools": [TOOL, "f"]}, "tools[1]", "invalid_value"),
        tool_kind=(CHAT | {"tools": [{"type": "custom"}]}, "tools[0].type", "unsupported_parameter"),
        tool_empty=(CHAT | {"tools": [{}]}, "tools[0].function", "missing_required_parameter"),
        tool_function=(CHAT | {"tools": [{"function": "f"}]}, "tools[0].function", "invalid_value"),
        tool_unnamed=(CHAT | {"tools": [tool()]}, "tools[0].function.name", "missing_required_parameter"),
        tool_name=(CHAT | {"tools": [tool(name="a b")]}, "tools[0].function.name", "invalid_value"),
        tool_name_line=(CHAT | {"tools": [tool(name="a\n")]}, "tools[0].function.name", "invalid_value"),
        tool_name_long=(CHAT | {"tools": [tool(name="a" * 129)]}, "tools[0].function.name", "invalid_value"),
        tool_name_twice=(CHAT | {"tools": [TOOL, TOOL]}, "tools[1].function.name", "invalid_value"),
        tool_text=(CHAT | {"tools": [tool(name="f", description=1)]}, "tools[0].function.description", "invalid_value"),
        tool_strict=(CHAT | {"tools": [tool(name="f", strict=1)]}, "tools[0].function.strict", "invalid_value"),
        tool_schema=(
            CHAT | {"tools": [tool(name="f", parameters=[])]},
            "tools[0].function.parameters",
            "invalid_value",
        ),
        tool_array=(
            CHAT | {"tools": [tool(name="f", parameters={"type": "array"})]},
            "tools[0].function.parameters.type",
            "invalid_value",
        ),
        tool_number=(
            CHAT | {"tools": [tool(name="f", parameters={"const": 2**64})]},
            "tools[0]",
            "invalid_value",
        ),
        tool_deep=(CHAT | {"tools": [tool(name="f", parameters=nested(80))]}, "tools[0]", "invalid_value"),
        tool_large=(
            CHAT | {"tools": [tool(name="f", description="x" * 300_000)]},
            "tools[0].function",
            "invalid_value",
        ),
        tool_choice=(CHAT | {"tool_choice": "required"}, "tool_choice", "invalid_value"),
        tool_choice_word=(CHAT | {"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "invalid_value"),
        tool_choice_form=(CHAT | {"tools": [TOOL], "tool_choice": {"name": "f"}}, "tool_choice", "invalid_value"),
        tool_choice_name=(
            CHAT | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
            "invalid_value",
        ),
        tool_choice_kind=(
            CHAT | {"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
            "tool_choice.type",
            "unsupported_parameter",
        ),
        tool_choice_allowed=(
            CHAT | {"tools": [TOOL], "tool_choice": allowed({"type": "function", "function": {"name": "g"}})},
            "tool_choice.allowed_tools.tools[0].function.name",
            "invalid_value",
        ),
        tool_choice_allowed_form=(
            CHAT | {"tools": [TOOL], "tool_choice": allowed("f")},
            "tool_choice.allowed_tools.tools[0]",
            "invalid_value",
        ),
        tool_choice_allowed_alone=(CHAT | {"tool_choice": allowed()}, "tool_choice", "invalid_value"),
        parallel_tool_calls=(CHAT | {"parallel_tool_calls": "yes"}, "parallel_tool_calls", "invalid_value"),
        tool_calls_custom=(
            {"messages": [{"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}]},
            "messages[0].tool_calls[0].type",
            "unsupported_parameter",
        ),
        tool_calls_number=(
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 2**64}}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            "invalid_value",
        ),
        reasoning_role=(
            {"messages": [{"role": "user", "content": "a", "reasoning": "b"}]},
            "messages[0].reasoning",
            "invalid_value",
        ),
        prediction=(CHAT | {"prediction": "Hi"}, "prediction", "invalid_value"),
        prediction_empty=(CHAT | {"prediction": {}}, "prediction.type", "missing_required_parameter"),
        prediction_type=(CHAT | {"prediction": predicted("a", "text")}, "prediction.type", "invalid_value"),
        prediction_none=(CHAT | {"prediction": predicted(None)}, "prediction.content", "invalid_value"),
        prediction_ids=(CHAT | {"prediction": predicted([5])}, "prediction.content[0]", "invalid_value"),
        prediction_part=(
            CHAT | {"prediction": predicted([{"type": "text"}])},
            "prediction.content[0].text",
            "invalid_value",
        ),
        prediction_image=(
            CHAT | {"prediction": predicted([{"type": "text", "text": "a"}, {"type": "image_url"}])},
            "prediction.content[1].type",
            "unsupported_parameter",
        ),
        prediction_without_content=(
            CHAT | {"prediction": {"type": "content"}},
            "prediction.content",
            "missing_required_parameter",
        ),
        functions=(CHAT | {"functions": [{}]}, "functions", "unsupported_parameter"),
        function_call=(CHAT | {"function_call": {"name": "f"}}, "function_call", "unsupported_parameter"),
        documents=(CHAT | {"documents": [{"title": "a"}]}, "documents", "chat_template_error"),
        documents_type=(CHAT | {"documents": ["a"]}, "documents[0]", "invalid_value"),
        continued=(
            CHAT | {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "invalid_value",
        ),
        continued_call=(
            {"messages": [{"role": "assistant", "tool_calls": [CALL]}], "continue_final_message": True},
            "continue_final_message",
            "invalid_value",
        ),
        truncated=(CHAT | {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        truncated_below=(CHAT | {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "invalid_value"),
        thinking=(CHAT | {"enable_thinking": True}, "enable_thinking", "chat_template_error"),
        budgets=(CHAT | {"thinking_budget": 5, "thinking_token_budget": 5}, "thinking_budget", "invalid_value"),
        budget=(CHAT | {"thinking_token_budget": -2}, "thinking_token_budget", "invalid_value"),
        modalities=(CHAT | {"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
        audio=(CHAT | {"audio": {}}, "audio", "unsupported_parameter"),
        reasoning_effort=(CHAT | {"reasoning_effort": "lots"}, "reasoning_effort", "invalid_value"),
        web_search_options=(CHAT | {"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
        chat_template_kwargs=(
            CHAT | {"chat_template_kwargs": {"a": [2**64]}},
            "chat_template_kwargs",
            "invalid_value",
        ),
        logprobs=(CHAT | {"logprobs": 1}, "logprobs", "invalid_value"),
        top_logprobs=(CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        top_logprobs_of_all=(CHAT | {"logprobs": True, "top_logprobs": -1}, "top_logprobs", "invalid_value"),
        logprobs_of_all=(COMPLETION | {"logprobs": -1}, "logprobs", "invalid_value"),
        top_logprobs_alone=(CHAT | {"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        top_logprobs_off=(CHAT | {"top_logprobs": 2, "logprobs": False}, "top_logprobs", "invalid_value"),
        max_tokens=(CHAT | {"max_tokens": 0}, "max_tokens", "invalid_value"),
        max_completion_tokens=(CHAT | {"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    ),
)
def test_invalid_chat_bodies(stack: FrontendStack, body: dict[str, Any], param: str, code: str) -> None:
    error = error_of(stack.http.post("/v1/chat/completions", json=body), 400)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    ("path", "body", "change", "param"),
    [
        ("/v1/chat/completions", CHAT | {"n": 128}, {"max_tokens": 32769}, "n"),
        ("/v1/completions", {"prompt": ["a"] * 128, "n": 8}, {"max_tokens": 4097}, "n"),
        ("/v1/completions", {"prompt": ["a"] * 128}, {"max_tokens": 32769, "n": 2}, "n"),
        ("/generate", {"text": "a"}, {"sampling_params": {"n": 128, "max_new_tokens": 32769}}, "sampling_params.n"),
    ],
)
def test_the_total_of_requested_tokens_is_limited(
    stack: FrontendStack, path: str, body: dict[str, Any], change: dict[str, Any], param: str
) -> None:
    error = error_of(stack.http.post(path, json=body | change), 400)
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert "4194304" in error["message"] and "fewer choices" in error["message"]


def test_max_tokens_of_a_single_choice_is_limited_by_the_context_only(stack: FrontendStack) -> None:
    """Only the context of the model limits it."""
    body = {"prompt": ["a"] * 128, "max_tokens": 32769}
    assert error_of(stack.http.post("/v1/completions", json=body), 400)["code"] == "context_length_exceeded"
    body["max_tokens"], body["n"] = 4096, 8
    assert error_of(stack.http.post("/v1/completions", json=body), 400)["code"] == "context_length_exceeded"


def test_copies_of_a_long_prompt_are_limited(stack: FrontendStack) -> None:
    """Each choice carries a copy of its prompt."""
    body = {"prompt": [1] * 600_000, "n": 60}
    error = error_of(stack.http.post("/v1/completions", json=body), 400)
    assert (error["param"], error["code"]) == ("n", "invalid_value")
    error = error_of(stack.http.post("/v1/completions", json=body | {"n": 2}), 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    both(
        missing=({}, "prompt", "missing_required_parameter"),
        empty_text=({"prompt": ""}, "prompt", "empty_prompt"),
        empty_list=({"prompt": []}, "prompt", "invalid_value"),
        empty_ids=({"prompt": [[]]}, "prompt[0]", "invalid_value"),
        mixed=({"prompt": [1, "a"]}, "prompt", "invalid_value"),
        fraction=({"prompt": [1.5]}, "prompt[0]", "invalid_value"),
        boolean=({"prompt": [[1, True]]}, "prompt[0]", "invalid_value"),
        negative=({"prompt": [-1]}, "prompt", "invalid_token"),
        beyond=({"prompt": [512]}, "prompt", "invalid_token"),
        far_beyond=({"prompt": [2**40]}, "prompt", "invalid_value"),
        many=({"prompt": ["a"] * 129}, "prompt", "invalid_value"),
        choices=({"prompt": ["a"] * 128, "n": 9}, "n", "invalid_value"),
        echo=({"prompt": "a", "echo": 1}, "echo", "invalid_value"),
        logprobs=({"prompt": "a", "logprobs": 21}, "logprobs", "invalid_value"),
        logprobs_bool=({"prompt": "a", "logprobs": True}, "logprobs", "invalid_value"),
        suffix=({"prompt": "a", "suffix": "b"}, "suffix", "unsupported_parameter"),
        best_of=({"prompt": "a", "best_of": 2}, "best_of", "unsupported_parameter"),
        best_of_n=({"prompt": "a", "best_of": 3, "n": 2}, "best_of", "unsupported_parameter"),
    ),
)
def test_invalid_completion_bodies(stack: FrontendStack, body: dict[str, Any], param: str, code: str) -> None:
    error = error_of(stack.http.post("/v1/completions", json=body), 400)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"messages": NaN}',
        b'{"temperature": Infinity}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": -Infinity}',
    ],
    ids=range(15),
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_bodies_that_are_not_requests_are_rejected(stack: FrontendStack, path: str, body: bytes) -> None:
    error = error_of(stack.http.post(path, content=body, headers={"content-type": "application/json"}), 400)
    assert len(error["message"]) < 400


def test_errors_do_not_repeat_the_input(stack: FrontendStack) -> None:
    secret = "s" * 10_000
    for body in ({secret: 1}, {"prompt": {secret: 1}}, {"prompt": "a", "temperature": secret}):
        response = stack.http.post("/v1/completions", json=body)
        error_of(response, 400)
        assert len(response.text) < 400


@pytest.mark.parametrize(
    "change",
    [
        {name: None for name in ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n", "user")},
        {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "repetition_penalty": 1.0},
        {"stream_options": {"include_usage": True}},
        {"stream": False, "user": "me"},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False, "store": False},
        {"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": True},
        {"reasoning_effort": "none", "enable_thinking": False, "thinking_token_budget": -1, "documents": []},
        {"reasoning_effort": "high", "use_beam_search": False, "add_generation_prompt": True, "echo": True},
        {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x"},
        {"prompt_cache_key": "k", "modalities": ["text"], "tool_choice": "auto", "functions": []},
        {"stream_options": None, "logit_bias": None, "logprobs": None, "top_logprobs": None, "tools": None},
    ],
)
def test_unsupported_fields_that_ask_for_nothing_are_accepted(stack: FrontendStack, change: dict[str, Any]) -> None:
    stack.scheduler.answer = answer_with([-EOS])
    response = stack.http.post("/v1/chat/completions", json=CHAT | change)
    assert response.status_code == 200, response.text
    stack.scheduler.reset()


@pytest.mark.parametrize(
    "change",
    [
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "functions": [], "documents": []},
        {"tools": None, "tool_choice": "auto", "parallel_tool_calls": False, "chat_template_kwargs": {}},
        {"thinking_token_budget": -1, "separate_reasoning": False, "include_reasoning": True, "messages": None},
        {"add_generation_prompt": False, "continue_final_message": False, "modalities": ["text"], "top_logprobs": 0},
    ],
)
def test_fields_of_chats_that_ask_for_nothing_are_accepted_in_completions(
    stack: FrontendStack, change: dict[str, Any]
) -> None:
    stack.scheduler.answer = answer_with([-EOS])
    response = stack.http.post("/v1/completions", json={"prompt": "Hi"} | change)
    assert response.status_code == 200, response.text
    assert "x-ignored-params" not in response.headers
    stack.scheduler.reset()


def test_content_types(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with([-EOS])
    body = json.dumps(CHAT).encode()
    for kind in ("application/json", "application/json; charset=utf-8", "Application/Problem+JSON"):
        assert stack.http.post("/v1/chat/completions", content=body, headers={"content-type": kind}).status_code == 200
    assert stack.http.post("/v1/chat/completions", content=body).status_code == 200
    # As `curl -d` sends it.
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert stack.http.post("/v1/chat/completions", content=body, headers=form).status_code == 200
    stack.scheduler.reset()
    own = {"origin": str(stack.http.base_url)}
    for headers in ({"content-type": "text/plain"}, {"content-type": ""}, form | own):
        response = stack.http.post("/v1/chat/completions", content=body, headers=headers)
        assert error_of(response, 415)["code"] == "unsupported_media_type"
    compressed = {"content-encoding": "gzip"}
    response = stack.http.post("/v1/chat/completions", content=gzip.compress(body), headers=compressed)
    assert "not decompressed" in error_of(response, 415)["message"]


def test_the_declared_and_the_sent_size_of_a_body_are_limited(make_stack: Callable[..., FrontendStack]) -> None:
    http = make_stack(max_body_bytes=100_000).http
    headers = {"content-type": "application/json"}
    frame = b'{"prompt": "%s"}'
    fitting = frame % (b"x" * (100_000 - len(frame) + 2))
    assert len(fitting) == 100_000
    big = fitting + b" "

    def pieces(body: bytes) -> Iterator[bytes]:
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    for send in (bytes, pieces):
        error = error_of(http.post("/v1/completions", content=send(fitting), headers=headers), 400)
        assert error["code"] == "context_length_exceeded"
        error = error_of(http.post("/v1/completions", content=send(big), headers=headers), 413)
        assert error["code"] == "body_too_large"


def test_paths_and_methods(stack: FrontendStack) -> None:
    assert error_of(stack.http.get("/nowhere"), 404)["code"] == "not_found"
    assert error_of(stack.http.post("/v1/completions/", json=COMPLETION), 404)["type"] == "not_found_error"
    response = stack.http.get("/v1/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    assert error_of(stack.http.post("/v1/models"), 405)


def test_request_ids(stack: FrontendStack) -> None:
    def answered(given: str) -> str:
        return stack.http.get("/health", headers={"x-request-id": given}).headers["x-request-id"]

    assert answered("abc-1") == "abc-1"
    assert answered("x" * 200) != "x" * 200
    assert answered("") != answered("")


def test_internal_errors_have_the_same_form(stack: FrontendStack, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(stack.server._tokenizers, "submit", lambda *_: 1 / 0)
        error = error_of(stack.http.post("/v1/completions", json=COMPLETION), 500)
    assert (error["code"], error["type"]) == ("internal_error", "server_error")
    assert "division" not in error["message"]
