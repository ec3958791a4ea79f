"""Tools of a model whose chat template has no place for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from minisgl.parsing.names import Parsers
from minisgl.wire.messages import Submit
from support.frontend.fake_scheduler import answer_with
from support.frontend.stack import EOS, TOKENIZER, FrontendStack, ids

USER = {"role": "user", "content": "Hi"}
FUNCTION = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOL = {"type": "function", "function": FUNCTION}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "tools": [TOOL], "max_tokens": 200},
    "/v1/responses": {"input": "Hi", "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 200},
    "/v1/messages": {
        "messages": [USER],
        "tools": [{"name": "get_weather", "input_schema": FUNCTION["parameters"]}],
        "max_tokens": 200,
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
EACH_API = pytest.mark.parametrize("path", BODIES)


@pytest.fixture(scope="module")
def shared_described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendStack]:
    path = tmp_path_factory.mktemp("described")
    stack = FrontendStack(path, max_model_len=2048, parsers=Parsers(tool_calls="hermes"))
    yield stack
    stack.close()


@pytest.fixture
def described(shared_described: FrontendStack) -> FrontendStack:
    """With --tool-call-parser."""
    shared_described.scheduler.reset()
    return shared_described


def post(stack: FrontendStack, path: str, text: str = "one two", **fields: Any) -> httpx.Response:
    stack.scheduler.reset()
    stack.scheduler.answer = answer_with([*ids(text), -EOS])
    return stack.http.post(path, json=BODIES[path] | fields)


def prompt(stack: FrontendStack) -> str:
    (submit,) = stack.scheduler.received(Submit)
    return TOKENIZER.decode(np.frombuffer(submit.prompt, "<i4").tolist(), skip_special_tokens=False)


@EACH_API
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tools_that_the_model_cannot_see_are_left_out_and_named(stack: FrontendStack, path: str, stream: bool) -> None:
    response = post(stack, path, stream=stream)
    assert response.status_code == 200
    # Tokens that are ready together make one event, and others one each.
    assert "one" in "".join(re.findall(r'"(?:text|content|delta)": ?"([^"]*)"', response.text))
    assert response.headers["x-ignored-params"] == "tools"
    assert prompt(stack) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    without = post(stack, path, stream=stream, tools=None)
    assert "x-ignored-params" not in without.headers


def test_what_only_restricts_calls_changes_nothing(stack: FrontendStack) -> None:
    strict = {"type": "function", "function": FUNCTION | {"strict": True}}
    for fields in ({"tools": [strict]}, {"parallel_tool_calls": False}, {"tool_choice": "auto"}):
        response = post(stack, "/v1/chat/completions", text=CALL, **fields)
        assert response.json()["choices"][0]["message"]["content"] == CALL, "text that looks like a call is none"
        (submit,) = stack.scheduler.received(Submit)
        assert submit.constraint.grammar == ""
    post(stack, "/v1/chat/completions", response_format={"type": "json_object"})
    (submit,) = stack.scheduler.received(Submit)
    assert submit.constraint.grammar != "", "a constraint of the text remains"


NAMED = {"type": "function", "function": {"name": "get_weather"}}
NEEDED: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {"tool_choice": "required"}),
    ("/v1/chat/completions", {"tool_choice": NAMED}),
    ("/v1/responses", {"tool_choice": "required"}),
    ("/v1/messages", {"tool_choice": {"type": "any"}}),
    ("/v1/messages", {"tool_choice": {"type": "tool", "name": "get_weather"}}),
]


@pytest.mark.parametrize("made", [False, True], ids=["unknown format", "known format"])
@pytest.mark.parametrize(("path", "fields"), NEEDED)
def test_a_call_that_is_required_is_refused(
    stack: FrontendStack, described: FrontendStack, path: str, fields: Any, made: bool
) -> None:
    error = post(described if made else stack, path, **fields).json()["error"]
    assert (error["code"], error["param"]) == ("chat_template_error", "tools")


def test_a_client_may_prefer_an_error(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with([*ids("one two"), -EOS])
    headers = {"prefer": "handling=strict"}
    refused = stack.http.post("/v1/chat/completions", json=BODIES["/v1/chat/completions"], headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


@EACH_API
def test_a_system_text_describes_tools_in_the_format_that_the_server_was_given(
    described: FrontendStack, path: str
) -> None:
    response = post(described, path)
    assert response.status_code == 200 and "x-ignored-params" not in response.headers
    system, user = prompt(described).split("<|im_end|>\n")[:2]
    assert system.startswith("<|im_start|>system\n") and user == "<|im_start|>user\nHi"
    functions = [json.loads(line) for line in system.splitlines() if line.startswith("{") and "get_weather" in line]
    assert [(one["name"], one["parameters"]) for one in functions] == [(FUNCTION["name"], FUNCTION["parameters"])]
    assert '<tool_call>\n{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}\n</tool_call>' in system


def test_the_description_follows_the_instructions(described: FrontendStack) -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER]
    post(described, "/v1/chat/completions", messages=messages)
    assert prompt(described).startswith("<|im_start|>system\nBe brief.\n\nYou can call ")
    assert prompt(described).count("system") == 1
    post(described, "/v1/chat/completions", tool_choice="none")
    assert prompt(described) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_described_tool_can_be_called(described: FrontendStack, stream: bool) -> None:
    response = post(described, "/v1/chat/completions", text=f"Let me look.\n{CALL}", stream=stream)
    if stream:
        assert '"name":"get_weather"' in response.text and '"finish_reason":"tool_calls"' in response.text
        return
    (choice,) = response.json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert choice["finish_reason"] == "tool_calls"


def test_the_session_goes_on_behind_calls(described: FrontendStack) -> None:
    def call(number: int, city: str) -> dict[str, Any]:
        arguments = json.dumps({"city": city})
        return {"id": f"c{number}", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}

    messages = [
        USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [call(1, "Oslo"), call(2, "Rome")]},
        {"role": "tool", "tool_call_id": "c1", "content": "cold"},
        {"role": "tool", "tool_call_id": "c2", "content": "warm <|im_end|>"},
        {"role": "user", "content": "So?"},
    ]
    assert post(described, "/v1/chat/completions", messages=messages).status_code == 200
    rome = CALL.replace("Oslo", "Rome")
    assert prompt(described).split("<|im_start|>")[3:] == [
        f"assistant\nI look.\n\n{CALL}\n{rome}<|im_end|>\n",
        "tool\ncold<|im_end|>\n",
        "tool\nwarm <|im_end|><|im_end|>\n",
        "user\nSo?<|im_end|>\n",
        "assistant\n",
    ]
    (submit,) = described.scheduler.received(Submit)
    ends = np.frombuffer(submit.prompt, "<i4").tolist().count(EOS)
    assert ends == 6, "a text of the client ends no turn"


def test_markers_of_calls_are_tokens_where_the_vocabulary_has_them(
    make_stack: Callable[..., FrontendStack], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model reads them as it is to write them."""
    from support.frontend import stack as module
    from support.tiny_tokenizers import byte_level

    tokenizer = byte_level(added=("<tool_call>", "</tool_call>"))
    monkeypatch.setattr(module, "TOKENIZER", tokenizer)
    stack = make_stack(max_model_len=2048, parsers=Parsers(tool_calls="hermes"))
    stack.scheduler.answer = answer_with([-EOS])
    assert stack.http.post("/v1/chat/completions", json=BODIES["/v1/chat/completions"]).status_code == 200
    (submit,) = stack.scheduler.received(Submit)
    tokens = np.frombuffer(submit.prompt, "<i4").tolist()
    assert [tokens.count(tokenizer.token_to_id(text)) for text in ("<tool_call>", "</tool_call>")] == [1, 1]
