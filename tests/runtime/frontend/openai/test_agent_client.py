"""Chats with tools and reasoning through the official client, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from minisgl.wire.text import ChatMessage, Generate, ScoredToken, TextFailed, ToolOptions
from support.frontend.scripted import ScriptedStack, Step, answer, calls, says, thinks

USER: Any = [{"role": "user", "content": "Weather in Bonn?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
LOOK = calls(0, "get_weather", '{"city":', ' "Bonn"}')


@pytest.fixture
def client(scripted: ScriptedStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)


def whole(client: openai.OpenAI, **options: Any) -> ChatCompletion:
    return client.chat.completions.create(model="default", messages=USER, **options)


def streamed(client: openai.OpenAI, **options: Any) -> ChatCompletion:
    """Return the completion that the client's helper puts together from a stream."""
    with client.chat.completions.stream(
        model="default", messages=USER, stream_options={"include_usage": True}, **options
    ) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion()


BOTH = pytest.mark.parametrize("ask", [whole, streamed])


def fields(message: ChatCompletionMessage) -> dict[str, Any]:
    """Return the fields of a message that clients read, without those that are absent or null."""
    dumped = message.to_dict()
    for call in dumped.get("tool_calls") or ():
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    return {name: value for name, value in dumped.items() if value is not None and name not in ("role", "parsed")}


def call(number: int, name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


# Calls


@BOTH
def test_an_answer_of_calls_alone_has_no_content(scripted: ScriptedStack, client: openai.OpenAI, ask: Any) -> None:
    scripted.script = answer(LOOK, calls(1, "get_weather", '{"city": "Köln"}'), tool_calls=2)
    (choice,) = ask(client, tools=[WEATHER]).choices
    assert choice.finish_reason == "tool_calls"
    expected = [call(0, "get_weather", '{"city": "Bonn"}'), call(1, "get_weather", '{"city": "Köln"}')]
    given = fields(choice.message)
    # The first event of a stream has an empty content.
    assert given.pop("content", "") == ""
    assert given == {"tool_calls": expected}


def test_content_is_null_beside_calls_and_refusal_always(scripted: ScriptedStack) -> None:
    scripted.script = answer(LOOK, tool_calls=1)
    body = {"messages": USER, "tools": [WEATHER]}
    message = scripted.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["content"] is None and message["refusal"] is None


@BOTH
def test_text_reasoning_and_calls_are_apart(scripted: ScriptedStack, client: openai.OpenAI, ask: Any) -> None:
    scripted.script = answer(
        thinks("Bonn "), thinks("it is."), says("Let me "), says("look."), LOOK, tool_calls=1, reasoning_tokens=5
    )
    completion = ask(client, tools=[WEATHER])
    assert fields(completion.choices[0].message) == {
        "content": "Let me look.",
        "reasoning": "Bonn it is.",
        "reasoning_content": "Bonn it is.",
        "tool_calls": [call(0, "get_weather", '{"city": "Bonn"}')],
    }
    assert completion.usage.completion_tokens_details.reasoning_tokens == 5
    assert completion.usage.prompt_tokens_details.cached_tokens == 2


@BOTH
@pytest.mark.parametrize(
    ("choice", "end", "reason"),
    [
        ("auto", {"tool_calls": 1}, "tool_calls"),
        ("required", {"tool_calls": 1}, "tool_calls"),
        (NAMED, {"tool_calls": 1}, "stop"),
        ("auto", {"tool_calls": 1, "reason": "length"}, "length"),
        (NAMED, {"tool_calls": 1, "reason": "length"}, "length"),
        ("auto", {"tool_calls": 0}, "stop"),
    ],
)
def test_finish_reasons(
    scripted: ScriptedStack, client: openai.OpenAI, ask: Any, choice: Any, end: dict[str, Any], reason: str
) -> None:
    scripted.script = answer(*(LOOK if end["tool_calls"] else [says("No.")]), **end)
    if ask is streamed and reason == "length":
        # The client's helper raises for answers that were cut, so the events are read directly.
        stream = client.chat.completions.create(
            model="default", messages=USER, tools=[WEATHER], tool_choice=choice, stream=True
        )
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == reason
        return
    assert ask(client, tools=[WEATHER], tool_choice=choice).choices[0].finish_reason == reason


def test_events_of_a_call(scripted: ScriptedStack, client: openai.OpenAI) -> None:
    """Identifier, type and name come once; the index is constant and the pieces of the arguments follow."""
    scripted.script = answer(LOOK, calls(1, "get_time", "{}"), tool_calls=2)
    chunks = list(client.chat.completions.create(model="default", messages=USER, tools=[WEATHER, TIME], stream=True))
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    for index, name, arguments in ((0, "get_weather", '{"city": "Bonn"}'), (1, "get_time", "{}")):
        first, *later = [piece for piece in pieces if piece.index == index]
        assert first.function is not None
        assert (first.id, first.type, first.function.name) == (f"call_{index}", "function", name)
        assert all((piece.id, piece.type, piece.function.name) == (None, None, None) for piece in later)
        assert "".join(piece.function.arguments for piece in (first, *later)) == arguments
    first_delta, last_delta = chunks[0].choices[0].delta, chunks[-1].choices[0].delta
    assert (first_delta.role, first_delta.content) == ("assistant", "")
    assert last_delta.to_dict() == {}


@pytest.mark.parametrize("stream", [False, True])
def test_each_of_several_choices_has_its_own_calls(
    scripted: ScriptedStack, client: openai.OpenAI, stream: bool
) -> None:
    scripted.script = answer(thinks("hm"), LOOK, tool_calls=1)
    made = client.chat.completions.create(model="default", messages=USER, tools=[WEATHER], n=3, stream=stream)
    if not stream:
        found = [choice.message.tool_calls[0].function.arguments for choice in made.choices]
        reasons = [choice.finish_reason for choice in made.choices]
    else:
        found, ends = ["", "", ""], {}
        for chunk in made:
            (choice,) = chunk.choices
            for piece in choice.delta.tool_calls or ():
                found[choice.index] += piece.function.arguments
            ends |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
        reasons = [ends[index] for index in range(3)]
    assert [json.loads(arguments) for arguments in found] == [{"city": "Bonn"}] * 3
    assert reasons == ["tool_calls"] * 3


def test_tools_reach_the_worker_as_they_are(scripted: ScriptedStack, client: openai.OpenAI) -> None:
    scripted.script = answer(says("a"))

    def sent(**options: Any) -> ToolOptions | None:
        whole(client, **options)
        return scripted.last(Generate).options.tools

    assert sent() is None
    assert sent(tools=[]) is None
    assert sent(tools=[WEATHER]) == ToolOptions(definitions=(WEATHER,))
    assert sent(tools=[WEATHER], tool_choice="none") == ToolOptions(definitions=(WEATHER,), choice="none")
    required = sent(tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False)
    assert required == ToolOptions(definitions=(WEATHER, TIME), choice="required", parallel=False)
    named = sent(tools=[TIME, WEATHER], tool_choice=NAMED)
    assert named == ToolOptions(definitions=(TIME, WEATHER), choice="named", name="get_weather")
    allowed = {"mode": "required", "tools": [NAMED]}
    given = sent(tools=[TIME, WEATHER], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert given == ToolOptions(definitions=(WEATHER,), choice="required")
    extra = {"type": "function", "x-origin": "mcp", "function": {"name": "f", "parameters": None, "returns": {}}}
    assert sent(tools=[extra]) == ToolOptions(
        definitions=({"type": "function", "function": {"name": "f", "returns": {}}, "x-origin": "mcp"},)
    )


def test_the_answer_goes_back_into_the_conversation(scripted: ScriptedStack, client: openai.OpenAI) -> None:
    """As agents do it: the message is returned as the client has it, and the result of the call follows."""
    scripted.script = answer(thinks("hm"), LOOK, tool_calls=1)
    message = whole(client, tools=[WEATHER]).choices[0].message
    scripted.script = answer(says("Sunny."))
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}
    client.chat.completions.create(model="default", messages=[*USER, message, result], tools=[WEATHER])
    _, returned, last = scripted.last(Generate).messages
    history = {"id": "call_0", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Bonn"}}}
    assert returned == ChatMessage("assistant", None, tool_calls=[history], reasoning="hm")
    assert last == ChatMessage("tool", "sun", tool_call_id="call_0")


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ("", {}),
        (" ", {}),
        ("[1]", "[1]"),
        ("{", "{"),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_arguments_in_the_history_are_objects_where_possible(
    scripted: ScriptedStack, client: openai.OpenAI, arguments: Any, taken: Any
) -> None:
    scripted.script = answer(says("a"))
    turn = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    client.chat.completions.create(model="default", messages=[*USER, turn])
    (history,) = scripted.last(Generate).messages[1].tool_calls
    assert history["function"] == {"name": "f", "arguments": taken}


# Reasoning


def test_reasoning_is_streamed_under_both_names(scripted: ScriptedStack, client: openai.OpenAI) -> None:
    scripted.script = answer(thinks("a"), thinks("b"), says("c"), reasoning_tokens=2)
    chunks = list(client.chat.completions.create(model="default", messages=USER, stream=True))
    deltas = [chunk.choices[0].delta.to_dict() for chunk in chunks]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "ab"
    assert "".join(delta.get("content", "") for delta in deltas) == "c"
    order = [sorted(delta) for delta in deltas]
    assert order.index(["reasoning", "reasoning_content"]) < order.index(["content"])


@BOTH
def test_reasoning_can_be_left_out_of_the_response(scripted: ScriptedStack, client: openai.OpenAI, ask: Any) -> None:
    scripted.script = answer(thinks("secret"), says("c"), reasoning_tokens=2)
    completion = ask(client, extra_body={"include_reasoning": False})
    assert fields(completion.choices[0].message) == {"content": "c"}
    assert completion.usage.completion_tokens_details.reasoning_tokens == 2


@BOTH
def test_a_chat_without_reasoning_counts_none(scripted: ScriptedStack, client: openai.OpenAI, ask: Any) -> None:
    scripted.script = answer(says("c"))
    completion = ask(client)
    assert fields(completion.choices[0].message) == {"content": "c"}
    assert completion.usage.completion_tokens_details.reasoning_tokens == 0


ON = {"enable_thinking": True, "thinking": True}


@pytest.mark.parametrize(
    ("body", "thinking", "variables"),
    [
        ({}, None, {}),
        ({"reasoning_effort": "none"}, False, {}),
        ({"reasoning_effort": "low"}, None, {"reasoning_effort": "low", **ON}),
        ({"reasoning_effort": "high", "enable_thinking": False}, False, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "none", "enable_thinking": True}, True, {}),
        ({"enable_thinking": True}, True, {}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, None, {"enable_thinking": False}),
        (
            {"reasoning_effort": "max", "chat_template_kwargs": {"enable_thinking": False, "x": [{"y": 1}]}},
            None,
            {"reasoning_effort": "max", "enable_thinking": False, "thinking": True, "x": [{"y": 1}]},
        ),
    ],
)
def test_effort_and_thinking_reach_the_template(
    scripted: ScriptedStack, client: openai.OpenAI, body: dict[str, Any], thinking: Any, variables: dict[str, Any]
) -> None:
    scripted.script = answer(says("c"))
    whole(client, extra_body=body)
    sent = scripted.last(Generate)
    assert (sent.options.rendering.thinking, sent.options.rendering.template_variables) == (thinking, variables)


@pytest.mark.parametrize(
    ("body", "budget"),
    [
        ({}, None),
        ({"thinking_token_budget": 0}, 0),
        ({"thinking_budget": 9}, 9),
        ({"thinking_token_budget": -1}, None),
    ],
)
def test_a_thinking_budget_reaches_the_worker(
    scripted: ScriptedStack, client: openai.OpenAI, body: dict[str, Any], budget: int | None
) -> None:
    scripted.script = answer(says("c"))
    whole(client, extra_body=body)
    assert scripted.last(Generate).options.thinking_budget == budget


def test_reasoning_may_stay_in_the_content(scripted: ScriptedStack, client: openai.OpenAI) -> None:
    scripted.script = answer(says("<think>a</think>b"))
    completion = whole(client, extra_body={"separate_reasoning": False})
    assert completion.choices[0].message.content == "<think>a</think>b"
    assert scripted.last(Generate).options.separate_reasoning is False


# The prompt


@pytest.mark.parametrize(
    ("body", "begun", "continued"),
    [
        ({}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": True}, False, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, False, True),
        ({"continue_final_message": False, "add_generation_prompt": True}, True, False),
    ],
)
def test_the_end_of_the_prompt(
    scripted: ScriptedStack, client: openai.OpenAI, body: dict[str, Any], begun: bool, continued: bool
) -> None:
    scripted.script = answer(says("c"))
    whole(client, extra_body=body)
    sent = scripted.last(Generate)
    rendering = sent.options.rendering
    assert (rendering.add_generation_prompt, rendering.continue_final_message) == (begun, continued)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("last", "echoed"),
    [({"role": "assistant", "content": "Once upon"}, "Once upon"), ({"role": "user", "content": "Go"}, "")],
)
def test_an_echo_puts_the_continued_message_before_the_answer(
    scripted: ScriptedStack, client: openai.OpenAI, last: Any, echoed: str, stream: bool
) -> None:
    scripted.script = answer(says(" a time"))
    made: Any = client.chat.completions.create(
        model="default",
        messages=[*USER, last],
        n=2,
        stream=stream,
        extra_body={"echo": True, "continue_final_message": True},
    )
    texts = ["", ""]
    if stream:
        for chunk in made:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        texts = [choice.message.content for choice in made.choices]
    assert texts == [f"{echoed} a time"] * 2


def test_roles_of_the_template_reach_it(scripted: ScriptedStack, client: openai.OpenAI) -> None:
    scripted.script = answer(says("c"))
    messages: Any = [{"role": "critic", "content": "b"}, *USER]
    client.chat.completions.create(model="default", messages=messages)
    assert scripted.last(Generate).messages[0] == ChatMessage("user", "b", custom_role="critic")


def test_documents_and_truncation_reach_the_worker(scripted: ScriptedStack, client: openai.OpenAI) -> None:
    scripted.script = answer(says("c"))
    documents = [{"title": "a", "text": "b", "meta": {"pages": [1, 2]}}]
    whole(client, extra_body={"documents": documents, "truncate_prompt_tokens": 7})
    sent = scripted.last(Generate)
    assert (sent.options.rendering.documents, sent.options.truncate_prompt_tokens) == (documents, 7)
    client.completions.create(model="default", prompt="a", extra_body={"truncate_prompt_tokens": -1})
    assert scripted.last(Generate).options.truncate_prompt_tokens == -1


# Batches


@pytest.mark.parametrize("stream", [False, True])
def test_a_batch_has_choices_for_each_conversation(scripted: ScriptedStack, stream: bool) -> None:
    scripted.script = lambda request: answer(says(f"{request.messages[-1].content}!"))(request)
    conversations = [[{"role": "user", "content": text}] for text in "ab"]
    conversations.append([*USER, {"role": "assistant", "content": "c"}])
    body = {"messages": conversations, "n": 2, "echo": True, "stream": stream}
    response = scripted.http.post("/v1/chat/completions/batch", json=body)
    assert response.status_code == 200, response.text
    if stream:
        texts = [""] * 6
        for event in response.text.split("\n\n")[:-2]:
            (choice,) = json.loads(event.removeprefix("data: "))["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
    else:
        completion = ChatCompletion.model_validate(response.json())
        assert [choice.index for choice in completion.choices] == list(range(6))
        assert completion.usage is not None and completion.usage.prompt_tokens == 9
        texts = [choice.message.content or "" for choice in completion.choices]
    assert texts == ["a!", "a!", "b!", "b!", "cc!", "cc!"]


def test_errors_of_a_batch_name_the_conversation(scripted: ScriptedStack) -> None:
    for conversations, param in (
        ([], "messages"),
        ([[]], "messages[0]"),
        ([USER, [{"role": "user"}]], "messages[1][0].content"),
        (USER, "messages[0]"),
    ):
        response = scripted.http.post("/v1/chat/completions/batch", json={"messages": conversations})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    unknown = {"messages": [USER, [USER[0] | {"mood": 1}]]}
    response = scripted.http.post("/v1/chat/completions/batch", json=unknown)
    assert response.headers["x-ignored-params"] == "messages[1][0].mood"


# Log-probabilities


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_beside_calls(scripted: ScriptedStack, client: openai.OpenAI, stream: bool) -> None:
    token = ScoredToken(b"Look", b"Look", 0, -0.5, [])
    scripted.script = answer(Step("Look", scored=(token,)), LOOK, tool_calls=1)
    made: Any = client.chat.completions.create(
        model="default", messages=USER, tools=[WEATHER], logprobs=True, stream=stream
    )
    choices = [chunk.choices[0] for chunk in made] if stream else made.choices
    scores = [entry.logprob for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert scores == [-0.5]


# Failures


def test_a_stream_of_calls_that_breaks_raises(scripted: ScriptedStack, client: openai.OpenAI) -> None:
    broken = answer(LOOK, ends=False)
    scripted.script = lambda request: [
        *broken(request),
        TextFailed(id=request.id, code="engine_error", message="it broke"),
    ]
    with pytest.raises(openai.APIError, match="it broke"):
        for _ in client.chat.completions.create(model="default", messages=USER, tools=[WEATHER], stream=True):
            pass
