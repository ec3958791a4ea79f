"""The agent model behind a complete server: it decides by itself when to think, which tool to call with what, and when
not to call any. Each of the four formats of tool calls has a checkpoint and a server."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from minisgl.parsing.detect import find_formats
from minisgl.parsing.names import Parsers
from minisgl.toy.agent_formats import TEMPLATES
from minisgl.toy.agent_world import NO_TOOL, TOOLS
from support.agent_calls import Case as Generated
from support.agent_calls import generated_cases, is_right
from support.agent_checkpoints import agent_checkpoints
from support.frontend.chromium import Page
from support.frontend.served import Served

# Without `make test`, the first test trains the model.
pytestmark = pytest.mark.timeout(900)

_EACH_FORM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
_THINKING = pytest.mark.parametrize("thinks", [False, True], ids=["direct", "thinking"])
_ALL = tuple(TOOLS)
_AT_ONCE = 8
"""Requests that share batches."""


class Case(NamedTuple):
    """A question and the call that answers it, in the manner of the Berkeley Function Calling Leaderboard."""

    question: str
    tools: tuple[str, ...]
    name: str
    arguments: dict[str, Any]


SIMPLE = [
    Case("What is the weather in Paris?", ("get_weather",), "get_weather", {"city": "Paris"}),
    Case("Do I need an umbrella for the weather in Hamburg?", ("get_weather",), "get_weather", {"city": "Hamburg"}),
    Case("What time is it in Tokyo?", ("get_time",), "get_time", {"city": "Tokyo"}),
    Case("What is 2 + 3?", ("add",), "add", {"a": 2, "b": 3}),
    Case("What is the sum of 20 and 17?", ("add",), "add", {"a": 20, "b": 17}),
    Case("How much is 7 times 8?", ("multiply",), "multiply", {"a": 7, "b": 8}),
    Case("Turn on the light in the kitchen", ("set_light",), "set_light", {"room": "kitchen", "on": True}),
    Case("Light off in the garage!", ("set_light",), "set_light", {"room": "garage", "on": False}),
    Case("Where can I eat sushi in Oslo?", ("find_food",), "find_food", {"food": "sushi", "city": "Oslo"}),
]
MULTIPLE = [
    Case("What is the weather like in Rome?", _ALL, "get_weather", {"city": "Rome"}),
    Case("Is the weather good in Dublin?", ("get_time", "get_weather"), "get_weather", {"city": "Dublin"}),
    Case("What is the time in Lima?", ("get_weather", "find_food", "get_time"), "get_time", {"city": "Lima"}),
    Case("What is 12 plus 30?", ("multiply", "add"), "add", {"a": 12, "b": 30}),
    Case("What is 12 times 3?", ("multiply", "add"), "multiply", {"a": 12, "b": 3}),
    Case("What is the product of 4 and 25?", _ALL, "multiply", {"a": 4, "b": 25}),
    Case("Turn the light in the office off", _ALL, "set_light", {"room": "office", "on": False}),
    Case("Find pasta in Vienna", ("get_weather", "find_food"), "find_food", {"food": "pasta", "city": "Vienna"}),
]
MISSING = [
    ("What is the weather in Paris?", ("get_time", "add"), "get_weather"),
    ("What time is it in Tokyo?", ("get_weather",), "get_time"),
    ("What is 2 + 3?", ("set_light", "multiply"), "add"),
    ("Turn on the light in the kitchen", ("find_food", "get_weather"), "set_light"),
    ("What is the weather in Paris?", (), "get_weather"),
]
"""Questions and tools, then the one that is needed."""
IRRELEVANT = [
    ("Who wrote Faust?", _ALL),
    ("Book a flight to Cairo", ("get_weather", "get_time")),
]
RESULTS = [
    ("get_weather", {"city": "Paris"}, "What is the weather in Paris?", "sunny, 14 degrees", ("sunny", "14", "Paris")),
    ("get_time", {"city": "Kyoto"}, "Tell me the time in Kyoto", "9:45", ("9:45", "Kyoto")),
    ("add", {"a": 2, "b": 3}, "What is 2 + 3?", "5", ("5",)),
    ("multiply", {"a": 9, "b": 8}, "What is 9 * 8?", "72", ("72",)),
    ("set_light", {"room": "hall", "on": True}, "Turn on the light in the hall", "on", ("hall", "on")),
    ("find_food", {"food": "soup", "city": "Lima"}, "Find soup in Lima", "Lotus", ("Lotus",)),
]


@pytest.fixture(scope="module", params=list(TEMPLATES))
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="agent-") as temporary:
        server = Served(agent_checkpoints()[request.param], Path(temporary), "--tokenizers", "0")
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.kill()


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120)


class Answer(NamedTuple):
    finish_reason: str
    reasoning: str
    content: str
    calls: list[tuple[str, str]]
    """Names and arguments."""

    @property
    def decoded(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def _ask(client: openai.OpenAI, messages: Any, tools: tuple[str, ...], stream: bool = False, **fields: Any) -> Answer:
    if tools:
        fields["tools"] = [TOOLS[name].definition for name in tools]
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    made: Any = client.chat.completions.create(
        model="default", messages=messages, temperature=0, max_tokens=200, stream=stream, **fields
    )
    if not stream:
        choice = made.choices[0]
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        reasoning = getattr(choice.message, "reasoning_content", None) or ""
        return Answer(choice.finish_reason, reasoning, choice.message.content or "", calls)
    reason, reasoning, content, joined = "", "", "", dict[int, list[str]]()
    for chunk in made:
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                name_and_arguments = joined.setdefault(call.index, ["", ""])
                name_and_arguments[0] += call.function.name or ""
                name_and_arguments[1] += call.function.arguments or ""
    return Answer(reason, reasoning, content, [(name, arguments) for name, arguments in joined.values()])


def _thinking(thinks: bool) -> dict[str, Any]:
    return {"extra_body": {"enable_thinking": thinks}}


@_THINKING
@_EACH_FORM
def test_the_tool_that_a_question_needs_is_called(client: openai.OpenAI, stream: bool, thinks: bool) -> None:
    wrong = []
    for case in (*SIMPLE, *MULTIPLE):
        answer = _ask(client, case.question, case.tools, stream, **_thinking(thinks))
        expected = ("tool_calls", "", [(case.name, case.arguments)])
        if (answer.finish_reason, answer.content, answer.decoded) != expected:
            wrong.append((case, answer))
        assert (case.name in answer.reasoning) == thinks
    assert wrong == []


@_THINKING
@_EACH_FORM
def test_generated_cases_are_answered_by_the_right_calls(client: openai.OpenAI, stream: bool, thinks: bool) -> None:
    cases = generated_cases(int(stream))
    assert min(Counter(case.category for case in cases).values()) > 20

    def ask(case: Generated) -> Answer:
        return _ask(client, case.question, case.tools, stream, **_thinking(thinks))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(ask, cases))
    assert [
        (case, answer) for case, answer in zip(cases, answers, strict=True) if not is_right(case, answer.calls)
    ] == []
    assert all(answer.finish_reason == ("tool_calls" if answer.calls else "stop") for answer in answers)
    assert all(bool(answer.calls) != (answer.content == NO_TOOL) for answer in answers)
    assert all(bool(answer.reasoning) == thinks for answer in answers)


@_THINKING
@_EACH_FORM
def test_nothing_is_called_for_other_questions(client: openai.OpenAI, stream: bool, thinks: bool) -> None:
    answers = [_ask(client, question, tools, stream, **_thinking(thinks)) for question, tools in IRRELEVANT]
    reasoning = "No tool fits." if thinks else ""
    assert answers == [Answer("stop", reasoning, NO_TOOL, [])] * len(IRRELEVANT)


@_THINKING
@_EACH_FORM
def test_a_tool_that_is_not_offered_is_missed(client: openai.OpenAI, stream: bool, thinks: bool) -> None:
    for question, tools, needed in MISSING:
        reasoning = f"I need {needed}, which is missing." if thinks else ""
        answer = _ask(client, question, tools, stream, **_thinking(thinks))
        assert answer == Answer("stop", reasoning, NO_TOOL, [])


@_EACH_FORM
def test_the_answer_to_a_result_tells_it(client: openai.OpenAI, stream: bool) -> None:
    for name, arguments, question, result, parts in RESULTS:
        first = _ask(client, question, _ALL, stream)
        assert first.decoded == [(name, arguments)]
        call = {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": first.calls[0][1]}}
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": first.reasoning},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": result},
        ]
        answer = _ask(client, messages, _ALL, stream)
        assert (answer.finish_reason, answer.calls) == ("stop", [])
        assert answer.reasoning
        assert all(part in answer.content for part in parts), answer


def test_streamed_answers_equal_whole_ones(client: openai.OpenAI) -> None:
    for question in ("What is the weather in Athens?", "What is 20 times 4?", "Light on in the hall!", "Hello"):
        whole, streamed = (_ask(client, question, _ALL, stream) for stream in (False, True))
        assert whole == streamed


@_EACH_FORM
def test_tool_choice(client: openai.OpenAI, stream: bool) -> None:
    question, call = "What is 2 + 3?", [("add", {"a": 2, "b": 3})]
    required = _ask(client, question, _ALL, stream, tool_choice="required")
    assert (required.finish_reason, required.decoded) == ("tool_calls", call)
    named = _ask(client, question, _ALL, stream, tool_choice={"type": "function", "function": {"name": "add"}})
    assert (named.finish_reason, named.decoded) == ("stop", call)
    assert required.reasoning and named.reasoning
    assert _ask(client, question, _ALL, stream, tool_choice="none").calls == []
    # It would call nothing by itself: the grammar makes it.
    forced = _ask(client, "Who wrote Faust?", ("get_weather",), stream, tool_choice="required")
    assert [name for name, _ in forced.calls] == ["get_weather"]


def test_a_chat_goes_on_behind_a_call(client: openai.OpenAI) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    messages = [
        {"role": "system", "content": "You are helpful."},
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "5"},
        {"role": "assistant", "content": "The result is 5."},
        {"role": "user", "content": "What time is it in Oslo?"},
    ]
    assert _ask(client, messages, ("get_time", "add")).decoded == [("get_time", {"city": "Oslo"})]
    assert _ask(client, messages, ("add",)).content == NO_TOOL


def test_the_example_of_the_chat_page_thinks_calls_and_answers(served: Served) -> None:
    with Page(f"{served.url}/") as page:
        page.wait_for(f"{list(TEMPLATES)}.includes(document.querySelector('#model').textContent)")
        page.evaluate("document.querySelector('#example').click()")
        answered = "document.querySelector('#stop').hidden && document.querySelectorAll('.speed').length === "
        page.wait_for(f"{answered}1")

        def texts(selector: str) -> list[str]:
            found: list[str] = page.evaluate(
                f"[...document.querySelectorAll('{selector}')].map(node => node.textContent)"
            )
            return found

        assert texts(".wrong") == []
        assert texts(".turn") == ["What is the weather in Paris?", "It is windy in Paris, 11 degrees."]
        assert texts(".call") == ['get_weather({"city": "Paris"})windy, 11 degrees']
        assert texts(".thinking div")[0] == "I need get_weather for Paris."
        page.evaluate("document.querySelector('#question').focus()")
        page.type("What is 17 + 25?")
        page.press_enter()
        page.wait_for(f"{answered}2")
        assert texts(".call")[1:] == ['add({"a": 17, "b": 25})42']
        assert texts(".turn")[2:] == ["What is 17 + 25?", "The result is 42."]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_found_from_the_template(name: str) -> None:
    found = find_formats(Parsers(), TEMPLATES[name], {})
    assert found.tools is not None
    assert found.reasoning is not None
    assert (found.tools.name, found.reasoning.name) == (name, "qwen3")
