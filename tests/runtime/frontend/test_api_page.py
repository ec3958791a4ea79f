"""The reference of the API at /docs, in a browser."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl.frontend.config import Access
from minisgl.version import __version__
from support.frontend.chromium import Page
from support.frontend.scripted import ScriptedStack, answer, says

_LOADED = "document.querySelectorAll('.operation').length > 10"


def _open(page: Page, path: str) -> str:
    """Open an operation, and return its text."""
    page.evaluate(f"document.getElementById({path!r}).open = true")
    page.wait_for(f"document.getElementById({path!r}).children.length > 1")
    text: str = page.evaluate(f"document.getElementById({path!r}).innerText")
    return text


@pytest.mark.parametrize("width", [390, 1280])
def test_operations_have_fields_and_an_example_that_runs(scripted: ScriptedStack, browser: Page, width: int) -> None:
    browser.resize(width, 800)
    browser.open(f"{scripted.url}/docs")
    browser.wait_for(_LOADED)
    assert browser.evaluate("document.querySelector('#version').textContent") == __version__
    headings = browser.evaluate("[...document.querySelectorAll('main h2')].map(node => node.textContent)")
    assert headings == ["OpenAI", "Anthropic", "Embeddings and scores", "Tokens", "Other servers", "Server"]
    text = _open(browser, "/v1/chat/completions")
    assert "temperature number, ≥ 0, ≤ 2" in " ".join(text.split())
    assert "messages array of Message, up to 2048 required" in " ".join(text.split())
    assert "name string required" in " ".join(_open(browser, "/v1/models/{name}").split())
    # Fields of fields are made when they are opened.
    browser.evaluate(
        "[...document.querySelectorAll('.fields details')].find(one => one.innerText.startsWith('messages'))"
        ".open = true"
    )
    browser.wait_for(
        "[...document.querySelectorAll('.fields .fields code')].some(one => one.textContent === 'tool_call_id')"
    )
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    right = "Math.max(...[...document.querySelectorAll('header > *')].map(node => node.getBoundingClientRect().right))"
    assert browser.evaluate(right) <= width - 16
    assert browser.evaluate("performance.getEntriesByType('resource').every(e => e.name.startsWith(location.origin))")
    scripted.script = answer(says("Hi there."))
    command = browser.evaluate("document.getElementById('/v1/chat/completions').querySelector('pre').textContent")
    assert "Hi there." in subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout


def test_a_link_opens_an_operation(scripted: ScriptedStack, browser: Page) -> None:
    browser.open(f"{scripted.url}/docs#/tokenize")
    browser.wait_for(_LOADED)
    assert browser.evaluate("document.getElementById('/tokenize').open")


def test_a_server_with_keys_is_described_to_those_who_have_one(
    make_scripted: Callable[..., ScriptedStack], browser: Page, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    guarded: Any = make_scripted(access=Access(api_keys=str(keys)))
    browser.open(f"{guarded.url}/docs")
    for key in ("wrong", "secret"):
        browser.wait_for("!document.querySelector('#key-form').hidden")
        browser.evaluate(f"document.querySelector('#key').value = '{key}'")
        browser.evaluate("document.querySelector('#key-form button').click()")
        if key == "wrong":
            browser.wait_for("document.querySelector('#key-problem').textContent.includes('does not know')")
    browser.wait_for(_LOADED)
    assert "Authorization: Bearer $API_KEY" in _open(browser, "/v1/models")
    assert guarded.http.get("/static/docs/main.js").headers["content-type"].startswith("text/javascript")
    tag = guarded.http.get("/docs").headers["etag"]
    assert guarded.http.get("/docs", headers={"if-none-match": tag}).status_code == 304
    assert guarded.http.get("/static/docs/../../app.py").status_code in (401, 404)
