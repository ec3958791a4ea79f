"""The chat page in a browser, on a server whose answers the test determines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from minisgl.wire.text import FromTokenizer, Generate
from support.frontend.chromium import Page
from support.frontend.scripted import Script, ScriptedStack, answer, calls, says, thinks

_ANSWERED = "document.querySelector('#stop').hidden && document.querySelectorAll('.speed').length"


@pytest.fixture
def page(scripted: ScriptedStack) -> Iterator[Page]:
    with Page(f"{scripted.url}/") as page:
        page.wait_for("document.querySelector('#model').textContent === 'org/tiny'")
        yield page


def _then(first: Script, second: Script) -> Script:
    """Return the script of a question, and that of the results of its calls."""

    def script(request: Generate) -> Sequence[FromTokenizer]:
        assert request.messages is not None
        return (second if request.messages[-1].role == "tool" else first)(request)

    return script


def _ask(page: Page, question: str) -> None:
    page.evaluate("document.querySelector('#question').focus()")
    page.type(question)
    page.press_enter()
    page.wait_for(_ANSWERED)


def _texts(page: Page, selector: str) -> list[str]:
    texts: list[str] = page.evaluate(f"[...document.querySelectorAll('{selector}')].map(node => node.textContent)")
    return texts


def test_thinking_is_folded(scripted: ScriptedStack, page: Page) -> None:
    scripted.script = answer(thinks("Hm, "), thinks("easy."), says("Four"), says("."))
    _ask(page, "2 + 2?")
    assert _texts(page, ".turn") == ["2 + 2?", "Four."]
    assert _texts(page, ".thinking div") == ["Hm, easy."]
    [summary] = _texts(page, ".thinking summary")
    assert summary.startswith("Thought for ")
    assert page.evaluate("document.querySelector('.thinking div').checkVisibility()") is False
    page.evaluate("document.querySelector('.thinking summary').click()")
    assert page.evaluate("document.querySelector('.thinking div').checkVisibility()") is True
    # The next question goes out with the reasoning.
    _ask(page, "And now?")
    sent = scripted.last(Generate).messages
    assert sent is not None
    assert (sent[1].content, sent[1].reasoning) == ("Four.", "Hm, easy.")


def test_thinking_streams_before_the_answer_begins(scripted: ScriptedStack, page: Page) -> None:
    scripted.script = answer(thinks("Hm, "), thinks("let me see"), ends=False)
    page.evaluate("document.querySelector('#question').focus()")
    page.type("Why?")
    page.press_enter()
    page.wait_for("document.querySelector('.thinking div')?.textContent === 'Hm, let me see'")
    assert _texts(page, ".thinking summary") == ["Thinking…"]
    page.evaluate("document.querySelector('#stop').click()")
    page.wait_for(_ANSWERED)
    assert page.evaluate("messages.length") == 0


def test_thinking_can_be_switched_off(scripted: ScriptedStack, page: Page) -> None:
    scripted.script = answer(says("Yes."))
    page.evaluate("document.querySelector('#think').click()")
    _ask(page, "Really?")
    sent = scripted.last(Generate)
    assert sent.template_variables == {"enable_thinking": False}
    assert sent.tools is None


def test_the_example_runs_a_tool_and_sends_its_result(scripted: ScriptedStack, page: Page) -> None:
    scripted.script = _then(
        answer(thinks("I need a tool."), calls(0, "get_weather", '{"ci', 'ty": "Pa', 'ris"}'), tool_calls=1),
        answer(says("It is sunny.")),
    )
    page.evaluate("document.querySelector('#example').click()")
    page.wait_for(_ANSWERED)
    assert _texts(page, ".turn") == ["What is the weather in Paris?", "It is sunny."]
    [call] = _texts(page, ".call")
    [result] = _texts(page, ".call .result")
    assert call == f'get_weather({{"city": "Paris"}}){result}'
    sent = scripted.last(Generate)
    assert sent.tools is not None
    assert [one["function"]["name"] for one in sent.tools.definitions] == ["get_weather", "add"]
    assert sent.messages is not None
    _, called, reply = sent.messages
    assert called.tool_calls is not None
    assert called.tool_calls[0]["function"] == {"name": "get_weather", "arguments": {"city": "Paris"}}
    assert called.reasoning == "I need a tool."
    assert (reply.role, reply.tool_call_id, reply.content) == ("tool", "call_0", result)


def test_several_calls_run_and_a_failed_one_says_why(scripted: ScriptedStack, page: Page) -> None:
    scripted.script = _then(
        answer(calls(0, "add", '{"a": 2, "b": 3}'), calls(1, "fly", "{}"), calls(2, "add", "{"), tool_calls=3),
        answer(says("Done.")),
    )
    page.evaluate("document.querySelector('#use-tools').click()")
    _ask(page, "Do it")
    five, unknown, broken = _texts(page, ".call .result")
    assert (five, unknown) == ("5", "error: there is no tool fly")
    assert broken.startswith("error: ")
    assert _texts(page, ".turn") == ["Do it", "Done."]


def test_a_model_that_only_calls_tools_is_stopped(scripted: ScriptedStack, page: Page) -> None:
    scripted.script = answer(calls(0, "add", '{"a": 2, "b": 3}'), tool_calls=1)
    _ask(page, "Do it")
    assert len(_texts(page, ".call .result")) == 7
    assert _texts(page, ".wrong") == ["the model called tools 8 times in a row"]
    assert page.evaluate("messages.length") == 0


def test_the_page_uses_no_external_resources(scripted: ScriptedStack, page: Page) -> None:
    text = scripted.http.get("/").text
    assert "http://" not in text
    assert "https://" not in text
    assert "default-src 'none'" in text
    assert page.evaluate("performance.getEntriesByType('resource').every(e => e.name.startsWith(location.origin))")
