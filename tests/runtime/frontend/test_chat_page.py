"""The chat page in a browser, on a server whose answers the test determines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minisgl.wire.text import FromTokenizer, Generate, TextFailed
from support.frontend import pooled
from support.frontend.chromium import Page
from support.frontend.scripted import MODEL, Script, ScriptedStack, answer, calls, says, thinks
from support.frontend.served import eventually

_ANSWERED = "document.querySelector('#stop').hidden && document.querySelectorAll('.speed').length"
_WIDE = (
    "| a | b |\n|---|---|\n"
    + f"| {'wide ' * 30} | {'cells ' * 30} |\n\n```\n{'code ' * 60}\n```\n\n"
    + f"$$ {'x + ' * 60} y $$\n\nInline ${'y + ' * 60} z$"
)
_RECORD = (
    "window.bodies = []; const real = fetch; window.fetch = (url, options) => {"
    "if (options?.body) bodies.push(JSON.parse(options.body)); return real(url, options); }; 0"
)


def _then(first: Script, second: Script) -> Script:
    """Return the script of a question, and that of the results of its calls."""

    def script(request: Generate) -> Sequence[FromTokenizer]:
        assert request.messages is not None
        return (second if request.messages[-1].role == "tool" else first)(request)

    return script


def _fails(code: str, message: str) -> Script:
    return lambda request: [TextFailed(id=request.id, code=code, message=message)]


def _click(page: Page, selector: str, number: int = 0) -> None:
    page.evaluate(f"document.querySelectorAll({selector!r})[{number}].click()")


def _ask(page: Page, question: str) -> None:
    page.evaluate("document.querySelector('#question').focus()")
    page.type(question)
    page.press_enter()
    page.wait_for(_ANSWERED)


def _texts(page: Page, selector: str) -> list[str]:
    texts: list[str] = page.evaluate(f"[...document.querySelectorAll('{selector}')].map(node => node.textContent)")
    return texts


def _questions(scripted: ScriptedStack) -> list[tuple[str, str | None]]:
    """Return role and content of the messages that were sent last."""
    sent = scripted.last(Generate).messages
    assert sent is not None
    return [(message.role, message.content) for message in sent]


def _set(page: Page, **settings: str) -> None:
    """Fill in fields of the settings."""
    if not page.evaluate("document.querySelector('#settings').open"):
        _click(page, "#open-settings")
    for name, value in settings.items():
        page.evaluate(f"document.querySelector('#settings form').elements[{name!r}].value = {json.dumps(value)}")
    _click(page, "#settings button.main")


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
    _click(page, "#stop")
    page.wait_for(_ANSWERED)
    scripted.script = answer(says("Yes."))
    _ask(page, "Really?")
    assert _questions(scripted) == [("user", "Really?")]


def test_the_rate_is_that_of_the_whole_answer(scripted: ScriptedStack, page: Page) -> None:
    # All of it arrives at once, after half a second.
    page.evaluate(
        "window.clock = 0; performance.now = () => clock; const real = fetch; window.fetch = async (url, options) => {"
        "const response = await real(url, options); clock = 500; return response; }; 0"
    )
    scripted.script = answer(says("Four"), says("."))
    _ask(page, "2 + 2?")
    assert _texts(page, ".speed") == ["3 tokens · first after 500 ms · 6.0 tokens/s"]


@pytest.mark.parametrize(("choice", "sent"), [("off", False), ("on", True), ("", None)])
def test_thinking_can_be_switched(scripted: ScriptedStack, page: Page, choice: str, sent: bool | None) -> None:
    scripted.script = answer(says("Yes."))
    page.evaluate(f"document.querySelector('#think').value = '{choice}'")
    _ask(page, "Really?")
    request = scripted.last(Generate)
    assert request.options.rendering.thinking is sent
    assert request.options.tools is None


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
    assert sent.options.tools is not None
    assert [one["function"]["name"] for one in sent.options.tools.definitions] == ["get_weather", "add"]
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
    scripted.script = answer(says("Yes."))
    _ask(page, "Really?")
    assert _questions(scripted) == [("user", "Really?")]


def test_the_page_uses_no_external_resources(scripted: ScriptedStack, page: Page) -> None:
    text = scripted.http.get("/").text
    assert "http://" not in text
    assert "https://" not in text
    assert "default-src 'none'" in text
    assert "unsafe" not in text
    loaded = "performance.getEntriesByType('resource')"
    assert page.evaluate(f"{loaded}.filter(one => one.name.includes('/static/')).length") > 10
    assert page.evaluate(f"{loaded}.every(one => one.name.startsWith(location.origin))")
    assert page.evaluate(f"{loaded}.reduce((sum, one) => sum + one.decodedBodySize, 0)") < 400_000


def test_only_what_the_person_has_set_is_sent(scripted: ScriptedStack, page: Page) -> None:
    page.evaluate(_RECORD)
    scripted.script = answer(says("Hi."))
    _ask(page, "Hello")
    always = {"model", "messages", "stream", "stream_options"}
    assert page.evaluate("Object.keys(bodies[0])") == ["model", "messages", "stream", "stream_options"]
    _set(page, system="Be brief.", temperature="0.2", max_tokens="5", top_p="7")
    # A value that cannot be valid keeps the settings open.
    assert page.evaluate("document.querySelector('#settings').open")
    _set(page, top_p="")
    assert not page.evaluate("document.querySelector('#settings').open")
    _ask(page, "And now?")
    sent: dict[str, Any] = page.evaluate("bodies[1]")
    assert {name: value for name, value in sent.items() if name not in always} == {"temperature": 0.2, "max_tokens": 5}
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    # They last until they are cleared.
    page.send("Page.reload")
    page.wait_for("document.querySelector('#model')?.textContent === 'org/tiny'")
    _ask(page, "Still?")
    assert scripted.last(Generate).params.temperature == 0.2
    _click(page, "#open-settings")
    _click(page, "#clear-settings")
    _set(page)
    _ask(page, "Now?")
    assert scripted.last(Generate).params.temperature == MODEL.defaults.temperature
    assert _questions(scripted)[0] == ("user", "Hello")


def test_settings_show_no_value_that_is_not_used(page: Page) -> None:
    _set(page, temperature="7", top_k="20")
    assert page.evaluate("document.querySelector('#settings').open")
    page.press_escape()
    page.wait_for("document.querySelector('[name=temperature]').value === ''")
    assert not page.evaluate("document.querySelector('#settings').open")
    assert page.evaluate("document.querySelector('[name=top_k]').value") == "20"


def test_a_link_asks_its_question_also_where_it_is_not_encoded(scripted: ScriptedStack, page: Page) -> None:
    scripted.script = answer(says("Yes."))
    for fragment, question in [("Is%20it%20100%25%3F", "Is it 100%?"), ("100%", "100%")]:
        page.open(f"{scripted.url}/#{fragment}")
        page.wait_for(f"{_ANSWERED} && document.querySelectorAll('.retry').length === 1")
        assert _questions(scripted) == [("user", question)]


def test_the_drawer_takes_the_focus_and_escape_closes_it(page: Page) -> None:
    page.resize(390, 800)
    _click(page, "#open-chats")
    assert page.evaluate("document.activeElement.id") == "close-chats"
    page.evaluate("document.activeElement.blur()")
    page.press_escape()
    page.wait_for("!document.querySelector('#chats').classList.contains('open')")
    assert page.evaluate("document.activeElement.id") == "open-chats"


def test_an_answer_is_given_again_and_a_question_is_changed(scripted: ScriptedStack, page: Page) -> None:
    scripted.script = answer(says("One."))
    _ask(page, "First")
    _ask(page, "Second")
    scripted.script = answer(says("Other."))
    _click(page, ".retry", 1)
    page.wait_for(f"{_ANSWERED} && document.querySelectorAll('.retry').length === 2")
    assert _questions(scripted) == [("user", "First"), ("assistant", "One."), ("user", "Second")]
    assert _texts(page, ".turn") == ["First", "One.", "Second", "Other."]
    _click(page, ".edit-question")
    page.evaluate("document.querySelector('.edit textarea').value = 'Changed'")
    _click(page, ".edit button.main")
    page.wait_for(f"{_ANSWERED} && document.querySelectorAll('.retry').length === 1")
    assert _questions(scripted) == [("user", "Changed")]
    assert _texts(page, ".turn") == ["Changed", "Other."]


def test_question_and_answer_are_copied_as_they_were_written(scripted: ScriptedStack, page: Page) -> None:
    page.evaluate("window.copied = []; navigator.clipboard.writeText = async text => { copied.push(text); }; 0")
    scripted.script = answer(thinks("Hm."), says("It is **5**."))
    _ask(page, "2 + *3*?")
    page.evaluate(
        "[...document.querySelectorAll('button')].filter(node => node.textContent === 'Copy' && node.checkVisibility())"
        ".forEach(node => node.click())"
    )
    page.wait_for("copied.length === 2")
    assert page.evaluate("copied") == ["2 + *3*?", "It is **5**."]


def test_chats_are_kept_listed_and_removed(scripted: ScriptedStack, page: Page) -> None:
    scripted.script = _then(
        answer(thinks("Hm."), calls(0, "add", '{"a": 2, "b": 3}'), tool_calls=1), answer(says("It is **5**."))
    )
    _click(page, "#use-tools")
    _ask(page, "2 + 3?")
    shown = [*_texts(page, ".turn"), *_texts(page, ".call"), *_texts(page, ".thinking div")]
    assert len(shown) == 4
    _click(page, "#reset")
    assert _texts(page, "#welcome h2") == ["Ask something"]
    assert _texts(page, ".turn") == []
    scripted.script = answer(says("Yes."))
    _ask(page, "Other")
    assert _questions(scripted) == [("user", "Other")]
    # A reload shows the chat that was open.
    page.send("Page.reload")
    page.wait_for("document.querySelectorAll('.turn').length === 2")
    assert _texts(page, "#chat-list .open") == ["Other", "2 + 3?"]
    _click(page, "#chat-list .open", 1)
    assert [*_texts(page, ".turn"), *_texts(page, ".call"), *_texts(page, ".thinking div")] == shown
    page.wait_for("document.querySelector('#model').textContent === 'org/tiny'")
    _ask(page, "Sure?")
    assert [role for role, _ in _questions(scripted)] == ["user", "assistant", "tool", "assistant", "user"]
    _click(page, "#chat-list .quiet", 0)
    assert _texts(page, "#chat-list .quiet") == ["Delete?", "×"]
    names = "[...document.querySelectorAll('#chat-list .quiet')].map(button => button.ariaLabel)"
    assert page.evaluate(names) == ["Delete? Press again to delete 2 + 3?", "Delete Other (asks for confirmation)"]
    _click(page, "#chat-list .quiet", 0)
    assert _texts(page, "#chat-list .open") == ["Other"]
    assert _texts(page, "#welcome h2") == ["Ask something"]


def test_chats_leave_in_a_file_and_come_back(scripted: ScriptedStack, page: Page, tmp_path: Path) -> None:
    scripted.script = answer(says("Yes."))
    _ask(page, "Keep <b>this</b>")
    page.send("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    _click(page, "#export")
    file = tmp_path / "minisgl-chats.json"
    eventually(file.exists)
    [chat] = json.loads(file.read_text())["chats"]
    assert (chat["title"], chat["exchanges"][0]["messages"][0]["content"]) == ("Keep <b>this</b>", "Yes.")
    for _ in range(2):
        _click(page, "#chat-list .quiet")
    assert _texts(page, "#chat-list .open") == []

    def choose(path: Path) -> None:
        root = page.send("DOM.getDocument")["root"]["nodeId"]
        node = page.send("DOM.querySelector", nodeId=root, selector="#import-file")["nodeId"]
        page.send("DOM.setFileInputFiles", files=[str(path)], nodeId=node)

    damaged = tmp_path / "damaged.json"
    strange = tmp_path / "strange.json"
    result = {"role": "tool", "tool_call_id": "none", "content": "a"}
    exchange = {"question": "Q", "messages": [result, {"role": "assistant", "content": "A"}]}
    strange.write_text(
        json.dumps(
            {
                "format": "minisgl-chats",
                "version": 1,
                "chats": [chat | {"exchanges": [exchange], "updated": chat["updated"] + 1}],
            }
        )
    )
    damaged.write_text(file.read_text().replace('"role": "assistant"', '"role": "root"'))
    choose(damaged)
    page.wait_for("document.querySelector('#announcer').textContent.includes('damaged')")
    assert _texts(page, "#chat-list .open") == []
    choose(file)
    page.wait_for("document.querySelector('#announcer').textContent === '1 chat imported'")
    assert _texts(page, "#chat-list .open") == ["Keep <b>this</b>"]
    _click(page, "#chat-list .open")
    assert _texts(page, ".turn") == ["Keep <b>this</b>", "Yes."]
    # The chat that is open shows what has taken its place.
    choose(strange)
    page.wait_for("document.querySelector('#chat-list .open').textContent === 'Q'")
    assert _texts(page, ".turn") == ["Q", "A"]
    assert _texts(page, "#turns > p") == ["1 chat imported"]


def test_the_oldest_chats_make_room(browser: Page) -> None:
    kept = browser.evaluate(
        "(async () => { const { ChatStore, MemoryStorage, newChat } = await import('/static/chat/store.js');"
        "const store = new ChatStore(new MemoryStorage());"
        "const add = (question, updated) => store.save({ ...newChat(), updated, exchanges:"
        "  [{ question, messages: [], note: '', problem: null }] });"
        "for (let number = 0; number < 203; number++) add(`${number}`, number);"
        "const many = store.list().map(chat => chat.title);"
        "const large = add('x'.repeat(2_999_000), 900);"
        "return [many.length, many[0], many.at(-1), large, store.list().length < 20, add('x'.repeat(4e6), 901)]; })()"
    )
    assert kept == [200, "202", "3", True, True, False]


def _change_in_another_tab(page: Page, question: str) -> None:
    """Add an exchange to the only stored chat, as another tab does."""
    page.evaluate(
        "(() => { const [name] = Object.keys(localStorage).filter(one => one.startsWith('minisgl.chat.'));"
        "const stored = JSON.parse(localStorage[name]); stored.updated += 1000;"
        f"stored.exchanges.push({{ question: {json.dumps(question)}, messages: [], note: '', problem: null }});"
        "localStorage[name] = JSON.stringify(stored); dispatchEvent(new StorageEvent('storage', { key: name })); })()"
    )


def _stored_questions(page: Page) -> list[list[str]]:
    """Return the questions of each stored chat."""
    questions: list[list[str]] = page.evaluate(
        "Object.keys(localStorage).filter(one => one.startsWith('minisgl.chat.'))"
        ".map(one => JSON.parse(localStorage[one]).exchanges.map(({ question }) => question))"
    )
    return sorted(questions)


def test_the_open_chat_goes_on_with_what_another_tab_has_added(scripted: ScriptedStack, page: Page) -> None:
    scripted.script = answer(says("Yes."))
    _ask(page, "First")
    _change_in_another_tab(page, "Other")
    assert _texts(page, ".user .turn") == ["First", "Other"]
    _ask(page, "Last")
    assert _stored_questions(page) == [["First", "Other", "Last"]]


def test_a_chat_that_changes_in_another_tab_during_an_answer_becomes_two(scripted: ScriptedStack, page: Page) -> None:
    scripted.script = answer(says("Yes."))
    _ask(page, "First")
    scripted.script = answer(says("Well"), ends=False)
    page.evaluate("document.querySelector('#question').focus()")
    page.type("Second")
    page.press_enter()
    page.wait_for("[...document.querySelectorAll('.answer .turn')].at(-1)?.textContent === 'Well'")
    _change_in_another_tab(page, "Other")
    assert _texts(page, ".turn") == ["First", "Yes.", "Second", "Well"]
    _click(page, "#stop")
    page.wait_for(_ANSWERED)
    assert _stored_questions(page) == [["First", "Second"], ["First", "Second", "Other"]]
    assert _texts(page, "#chat-list [aria-current]") == ["First"]
    scripted.script = answer(says("Yes."))
    _ask(page, "Last")
    assert _stored_questions(page) == [["First", "Second", "Last"], ["First", "Second", "Other"]]


def test_an_edited_question_stays_when_another_tab_changes_the_chat(scripted: ScriptedStack, page: Page) -> None:
    scripted.script = answer(says("Yes."))
    _ask(page, "First")
    _click(page, ".edit-question")
    page.evaluate("document.querySelector('.edit textarea').value = 'Changed'")
    _change_in_another_tab(page, "Other")
    _click(page, ".edit button.main")
    page.wait_for(f"{_ANSWERED} && document.querySelectorAll('.retry').length === 1")
    assert _stored_questions(page) == [["Changed"], ["First", "Other"]]


def test_a_chat_without_a_place_goes_on(scripted: ScriptedStack, page: Page) -> None:
    scripted.script = answer(says("Yes."))
    _ask(page, "First")
    page.evaluate(
        "window.set = Storage.prototype.setItem; Storage.prototype.setItem = () => { throw Error('full'); }; 0"
    )
    _ask(page, "Second")
    assert "no place" in _texts(page, "#turns > p")[-1]
    assert _stored_questions(page) == [["First"]]
    page.evaluate("Storage.prototype.setItem = window.set; 0")
    _ask(page, "Third")
    assert _stored_questions(page) == [["First", "Second", "Third"]]


@pytest.mark.parametrize(
    ("question", "refuses"), [("'x'.repeat(3_000_001)", "false"), ("'x'", "true")], ids=["too-long", "storage-refuses"]
)
def test_no_chat_is_removed_for_one_that_has_no_place(browser: Page, question: str, refuses: str) -> None:
    before, saved, after = browser.evaluate(
        "(async () => { const { ChatStore, MemoryStorage, newChat } = await import('/static/chat/store.js');"
        "const storage = new MemoryStorage(), store = new ChatStore(storage), open = newChat();"
        "const ask = (chat, question, updated) => store.save(Object.assign(chat, { updated, exchanges:"
        "  [{ question, messages: [], note: '', problem: null }] }));"
        "for (let number = 0; number < 5; number++) ask(newChat(), `${number}`, number);"
        "ask(open, 'open', 10); const before = store.export(), set = storage.setItem.bind(storage);"
        "storage.setItem = (name, text) => {"
        f"  if (name.endsWith(open.id) && {refuses}) throw new Error('full');"
        "  set(name, text); };"
        f"const saved = ask(open, {question}, 11); return [before, saved, store.export()]; }})()"
    )
    assert not saved
    assert after == before
    assert len(json.loads(after)["chats"]) == 6


def test_only_as_many_chats_are_removed_as_the_browser_needs(browser: Page) -> None:
    kept = browser.evaluate(
        "(async () => { const { ChatStore, MemoryStorage, newChat } = await import('/static/chat/store.js');"
        "const storage = new MemoryStorage(), store = new ChatStore(storage), set = storage.setItem.bind(storage);"
        "storage.setItem = (name, text) => {"
        "  const others = [...storage.entries].filter(([one]) => one !== name);"
        "  if (others.reduce((sum, [, kept]) => sum + kept.length, text.length) > 5_000) throw new Error('full');"
        "  set(name, text); };"
        "const add = (question, updated) => store.save({ ...newChat(), updated, exchanges:"
        "  [{ question, messages: [], note: '', problem: null }] });"
        "for (let number = 0; number < 4; number++) add(`${number}`.repeat(1_000), number);"
        "return [add('x'.repeat(1_500), 9), store.list().map(chat => chat.title[0])]; })()"
    )
    assert kept == [True, ["x", "3", "2"]]


def test_one_of_several_models_is_chosen(scripted: ScriptedStack, page: Page) -> None:
    scripted.serve(msgspec.structs.replace(MODEL, names=("org/tiny", "other"), capabilities=("chat", "tools")))
    page.send("Page.reload")
    page.wait_for("document.querySelector('#model select')?.value === 'org/tiny'")
    page.evaluate(_RECORD)
    page.evaluate(
        "const choice = document.querySelector('#model select'); choice.value = 'other';"
        "choice.dispatchEvent(new Event('change'))"
    )
    scripted.script = answer(says("Yes."))
    _ask(page, "Who?")
    assert page.evaluate("bodies[0].model") == "other"
    page.send("Page.reload")
    page.wait_for("document.querySelector('#model select')?.value === 'other'")


def test_thinking_and_tools_are_offered_where_the_model_has_them(scripted: ScriptedStack, page: Page) -> None:
    controls = ["#thinking-control", "#tools-control", "#example"]
    visible = f"{controls}.map(one => document.querySelector(one)?.checkVisibility() ?? false)"
    assert page.evaluate(visible) == [True, True, True]
    scripted.serve(msgspec.structs.replace(MODEL, capabilities=("chat", "reasoning")))
    page.send("Page.reload")
    page.wait_for("document.querySelector('#model')?.textContent === 'org/tiny'")
    assert page.evaluate(visible) == [False, False, False]


def test_a_model_that_does_not_chat_says_where_it_is_asked(scripted: ScriptedStack, page: Page) -> None:
    scripted.serve(pooled.model("embed"))
    page.send("Page.reload")
    page.wait_for("document.querySelector('#welcome')?.innerText.includes('/v1/embeddings')")
    assert _texts(page, "#welcome h2") == ["This model does not chat"]


def test_an_error_says_what_to_do(scripted: ScriptedStack, page: Page) -> None:
    scripted.script = _fails("context_length_exceeded", "This model's maximum context length is 256 tokens.")
    _ask(page, "Long")
    assert _texts(page, ".wrong") == ["This chat is longer than the model can read."]
    assert "Start a new chat" in _texts(page, ".advice")[0]
    assert _texts(page, ".detail") == ["This model's maximum context length is 256 tokens."]
    page.evaluate("window.real = fetch; window.fetch = () => Promise.reject(new TypeError('Failed to fetch')); 0")
    _ask(page, "Gone")
    assert _texts(page, ".wrong")[1:] == ["The server cannot be reached."]
    page.evaluate("window.fetch = real; 0")
    scripted.script = answer(says("Here."))
    _click(page, ".retry", 1)
    page.wait_for(f"{_ANSWERED} && document.querySelectorAll('.wrong').length === 1")
    assert _questions(scripted) == [("user", "Gone")]


@pytest.mark.parametrize(
    ("status", "code", "param", "what", "advice", "action"),
    [
        (401, "missing_api_key", None, "This server needs an API key.", "Enter it in the settings.", "settings"),
        (
            400,
            "invalid_value",
            "top_k",
            "The server refuses “top_k”.",
            "Change it in the settings, then retry.",
            "settings",
        ),
        (404, "model_not_found", "model", "This model is no longer served here.", "Choose another one", None),
        (429, "queue_full", None, "Too many requests wait at this server.", "Wait a few seconds", None),
        (503, "engine_unavailable", None, "No model can answer at the moment.", "It may still be starting.", None),
        (403, "origin_not_allowed", None, "The server refuses this page.", "Only the people who run", None),
        (500, "internal_error", None, "The server could not finish the answer.", "about request abc", None),
    ],
)
def test_errors_of_the_server_are_explained(
    browser: Page, status: int, code: str, param: str | None, what: str, advice: str, action: str | None
) -> None:
    error = json.dumps({"message": "the server's words", "code": code, "param": param})
    found: dict[str, Any] = browser.evaluate(
        "Promise.all([import('/static/chat/api.js'), import('/static/chat/problems.js')])"
        f".then(([api, problems]) => problems.explain(new api.ApiError({status}, {error}, 'abc')))"
    )
    assert (found["what"], found["action"], found["detail"]) == (what, action, "the server's words")
    assert advice in found["advice"]


def test_a_server_without_a_model_is_asked_again(scripted: ScriptedStack, page: Page) -> None:
    page.evaluate(
        "(async () => { const { Models } = await import('/static/chat/models.js'); const real = fetch;"
        "const later = setTimeout; window.setTimeout = run => later(run, 0);"
        'window.fetch = async () => new Response(\'{"error": {"message": "m", "code": "engine_unavailable"}}\','
        "  { status: 503 });"
        "window.found = []; const models = new Models(localStorage, () => '', problem => found.push(problem?.what));"
        "await models.load(); found.push(document.querySelector('#model').textContent); window.fetch = real; })()"
    )
    page.wait_for("document.querySelector('#model').textContent === 'org/tiny'")
    assert page.evaluate("found.map(one => one ?? '')") == ["No model can answer at the moment.", "no model", ""]


def test_each_turn_has_a_speaker_and_each_answer_one_announcement(scripted: ScriptedStack, page: Page) -> None:
    page.evaluate(
        "window.announced = [];"
        "new MutationObserver(() => { const { textContent } = document.querySelector('#announcer');"
        "if (textContent) announced.push(textContent); })"
        ".observe(document.querySelector('#announcer'), { childList: true, characterData: true, subtree: true })"
    )
    scripted.script = answer(*(says(f"{word} ") for word in ["a", "**bold**", "answer"]))
    _ask(page, "Go")
    page.wait_for("announced.length")
    assert page.evaluate("announced") == ["a bold answer"]
    assert _texts(page, "article > h2") == ["You", "Assistant"]
    assert page.evaluate("document.querySelectorAll('main [aria-live], main[aria-live]').length") == 0


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen(scripted: ScriptedStack, page: Page, width: int) -> None:
    page.resize(width, 800)
    long_name = "organization/a-model-with-a-very-long-name-that-no-phone-can-show-in-one-line-7B-Instruct"
    page.evaluate(f"document.querySelector('#model').textContent = '{long_name}'")
    # 2,000 characters without a space.
    scripted.script = answer(thinks("t" * 2000), says(f"{'w' * 2000}\n\n{_WIDE}"))
    _ask(page, "q" * 2000)
    outside = (
        "[...document.querySelectorAll('header > *, footer *, .message, .turn > *, .actions > *')]"
        ".filter(node => node.checkVisibility() && !node.closest('[hidden]'))"
        f".filter(node => node.getBoundingClientRect().right > {width} || node.getBoundingClientRect().left < 0)"
        ".map(node => node.outerHTML.slice(0, 80))"
    )
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("document.querySelector('main').scrollWidth <= document.querySelector('main').clientWidth")
    assert page.evaluate(outside) == []
    assert page.evaluate("document.querySelector('#model').getBoundingClientRect().width") > 100
    _click(page, "#open-settings")
    assert page.evaluate("document.querySelector('#settings').getBoundingClientRect().right") < width
    assert page.evaluate("document.querySelector('#settings').scrollWidth") <= width
    _click(page, "#settings button.main")
    if width == 390:
        _click(page, "#open-chats")
        page.wait_for("document.querySelector('#chats').getBoundingClientRect().left === 0")
        assert page.evaluate("document.querySelector('#close-chats').checkVisibility()")
