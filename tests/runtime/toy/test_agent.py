"""The agent model behind a complete server: it decides by itself when to think, which tool to call with what, and when
not to call any. Each of the four formats of tool calls has a checkpoint and a server.

Its training judges what the model has learned (minisgl.toy.agent). Here, the server gives the answers that the same
weights give without it, whatever these are: other processors train other weights."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from minisgl.parsing.detect import find_formats
from minisgl.parsing.names import Parsers
from minisgl.toy.agent_formats import TEMPLATES
from minisgl.toy.agent_world import NO_TOOL, RESULT_THOUGHT, TOOLS, Exchange, thought
from support.agent_answers import Answer, OfflineAgent, chat
from support.agent_calls import generated_cases
from support.agent_checkpoints import agent_checkpoints
from support.frontend.chromium import Page
from support.frontend.served import ONE_START, Served
from support.offline import Chat

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
    (
        "get_weather",
        {"city": "Paris"},
        "What is the weather in Paris?",
        "sunny, 14 degrees",
        "It is sunny in Paris, 14 degrees.",
    ),
    ("get_time", {"city": "Kyoto"}, "Tell me the time in Kyoto", "9:45", "It is 9:45 in Kyoto."),
    ("add", {"a": 2, "b": 3}, "What is 2 + 3?", "5", "The result is 5."),
    ("multiply", {"a": 9, "b": 8}, "What is 9 * 8?", "72", "The result is 72."),
    ("set_light", {"room": "hall", "on": True}, "Turn on the light in the hall", "on", "The light in the hall is on."),
    ("find_food", {"food": "soup", "city": "Lima"}, "Find soup in Lima", "Lotus", "The place is Lotus."),
]


@pytest.fixture(scope="module", params=list(TEMPLATES))
def name(request: pytest.FixtureRequest) -> str:
    """Format of the calls."""
    return str(request.param)


@pytest.fixture(scope="module")
def served(name: str) -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="agent-") as temporary:
        server = Served(agent_checkpoints()[name], Path(temporary), *ONE_START, "--tokenizers", "0")
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.kill()


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def offline(name: str) -> OfflineAgent:
    return OfflineAgent(name)


def _ask(client: openai.OpenAI, asked: Chat, stream: bool = False, **fields: Any) -> Answer:
    if asked.tools:
        fields["tools"] = asked.tools
    if not asked.thinks:
        fields["extra_body"] = {"enable_thinking": False}
    made: Any = client.chat.completions.create(
        model="default", messages=asked.messages, temperature=0, max_tokens=200, stream=stream, **fields
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


def _uniform(answer: Answer) -> Answer:
    """Spell all arguments in the same way: formats leave spaces to the model."""
    return answer._replace(calls=[(name, json.dumps(json.loads(arguments))) for name, arguments in answer.calls])


def _check(
    client: openai.OpenAI,
    offline: OfflineAgent,
    chats: Sequence[Chat],
    right: Sequence[Answer],
    stream: bool,
    least: float = 0.5,
) -> None:
    """Check that served answers are those that the weights give offline, and that these show what the test is about:
    at least the share `least` of them is right."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        served = list(pool.map(lambda asked: _ask(client, asked, stream), chats))
    expected = offline.answers(chats)
    compared = [number for number, answer in enumerate(expected) if answer is not None]
    assert [_uniform(served[number]) for number in compared] == [expected[number] for number in compared]
    assert sum(pair[0] == pair[1] for pair in zip(expected, right, strict=True)) >= least * len(chats)


def _called(name: str, arguments: Any, *, thinks: bool) -> Answer:
    """Return the right answer to a question that needs the tool."""
    exchange = Exchange("", "", TOOLS[name], True, arguments)
    return Answer("tool_calls", thought(exchange) if thinks else "", "", [(name, json.dumps(dict(arguments)))])


def _without_call(needed: str | None, *, thinks: bool) -> Answer:
    """Return the right answer if the tool is missing, or there is none."""
    exchange = Exchange("", NO_TOOL, None if needed is None else TOOLS[needed])
    return Answer("stop", thought(exchange) if thinks else "", NO_TOOL, [])


@_THINKING
@_EACH_FORM
def test_the_tool_that_a_question_needs_is_called(
    client: openai.OpenAI, offline: OfflineAgent, stream: bool, thinks: bool
) -> None:
    cases = (*SIMPLE, *MULTIPLE)
    chats = [chat(case.question, case.tools, thinks=thinks) for case in cases]
    right = [_called(case.name, case.arguments, thinks=thinks) for case in cases]
    _check(client, offline, chats, right, stream)


@_THINKING
@_EACH_FORM
def test_generated_cases_are_answered_by_the_right_calls(
    client: openai.OpenAI, offline: OfflineAgent, stream: bool, thinks: bool
) -> None:
    cases = generated_cases(int(stream))
    assert min(Counter(case.category for case in cases).values()) > 20
    chats = [chat(case.question, case.tools, thinks=thinks) for case in cases]
    right = [
        _called(*case.call, thinks=thinks) if case.call else _without_call(case.needed, thinks=thinks) for case in cases
    ]
    _check(client, offline, chats, right, stream, least=0.95)


@_THINKING
@_EACH_FORM
def test_nothing_is_called_for_other_questions(
    client: openai.OpenAI, offline: OfflineAgent, stream: bool, thinks: bool
) -> None:
    chats = [chat(question, tools, thinks=thinks) for question, tools in IRRELEVANT]
    _check(client, offline, chats, [_without_call(None, thinks=thinks)] * len(chats), stream)


@_THINKING
@_EACH_FORM
def test_a_tool_that_is_not_offered_is_missed(
    client: openai.OpenAI, offline: OfflineAgent, stream: bool, thinks: bool
) -> None:
    chats = [chat(question, tools, thinks=thinks) for question, tools, _ in MISSING]
    _check(client, offline, chats, [_without_call(needed, thinks=thinks) for _, _, needed in MISSING], stream)


@_EACH_FORM
def test_the_answer_to_a_result_tells_it(client: openai.OpenAI, offline: OfflineAgent, stream: bool) -> None:
    chats = []
    for name, arguments, question, result, _ in RESULTS:
        call = {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        reasoning = _called(name, arguments, thinks=True).reasoning
        asked = chat(question, _ALL)
        messages = [
            *asked.messages,
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": reasoning},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": result},
        ]
        chats.append(asked._replace(messages=messages))
    right = [Answer("stop", RESULT_THOUGHT, answer, []) for *_, answer in RESULTS]
    _check(client, offline, chats, right, stream)


def test_streamed_answers_equal_whole_ones(client: openai.OpenAI, offline: OfflineAgent) -> None:
    questions = ("What is the weather in Athens?", "What is 20 times 4?", "Light on in the hall!", "Hello")
    chats = [chat(question, _ALL) for question in questions]
    decided = [asked for asked, answer in zip(chats, offline.answers(chats), strict=True) if answer is not None]
    assert decided
    for asked in decided:
        whole, streamed = (_ask(client, asked, stream) for stream in (False, True))
        assert whole == streamed


@_EACH_FORM
def test_tool_choice(client: openai.OpenAI, offline: OfflineAgent, stream: bool) -> None:
    chats = [chat(case.question, _ALL) for case in (*SIMPLE, *MULTIPLE)]
    # A question for which these weights call a tool by themselves.
    asked, calling = next(pair for pair in zip(chats, offline.answers(chats), strict=True) if pair[1] and pair[1].calls)
    assert calling is not None
    required = _ask(client, asked, stream, tool_choice="required")
    assert _uniform(required) == calling
    function = {"name": calling.calls[0][0]}
    named = _ask(client, asked, stream, tool_choice={"type": "function", "function": function})
    assert _uniform(named) == calling._replace(finish_reason="stop")
    assert required.reasoning and named.reasoning
    assert _ask(client, asked, stream, tool_choice="none").calls == []
    # It would call nothing by itself: the grammar makes it.
    forced = _ask(client, chat("Who wrote Faust?", ("get_weather",)), stream, tool_choice="required")
    assert [name for name, _ in forced.calls] == ["get_weather"]


def test_a_chat_goes_on_behind_a_call(client: openai.OpenAI, offline: OfflineAgent) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    messages = [
        {"role": "system", "content": "You are helpful."},
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "5"},
        {"role": "assistant", "content": "The result is 5."},
        {"role": "user", "content": "What time is it in Oslo?"},
    ]
    chats = [chat("", tools)._replace(messages=messages) for tools in (("get_time", "add"), ("add",))]
    right = [_called("get_time", {"city": "Oslo"}, thinks=True), _without_call("get_time", thinks=True)]
    _check(client, offline, chats, right, stream=False)


def test_the_example_of_the_chat_page_thinks_calls_and_answers(served: Served) -> None:
    with Page(f"{served.url}/") as page:
        page.wait_for(f"{list(TEMPLATES)}.includes(document.querySelector('#model').textContent)")
        page.evaluate("document.querySelector('[name=temperature]').value = '0'; 0")
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
