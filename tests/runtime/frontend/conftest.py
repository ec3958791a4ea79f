from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.frontend.chat_templates import AGENT
from support.frontend.chromium import Page
from support.frontend.scripted import ScriptedStack
from support.frontend.stack import FrontendStack


@pytest.fixture(scope="session")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendStack]:
    stack = FrontendStack(tmp_path_factory.mktemp("stack"), workers=2)
    yield stack
    stack.close()


@pytest.fixture
def stack(shared_stack: FrontendStack) -> FrontendStack:
    """For tests that leave the processes as they are."""
    shared_stack.scheduler.reset()
    return shared_stack


@pytest.fixture(scope="session")
def shared_agent_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendStack]:
    stack = FrontendStack(tmp_path_factory.mktemp("agent"), template=AGENT, max_model_len=2048)
    yield stack
    stack.close()


@pytest.fixture
def agent_stack(shared_agent_stack: FrontendStack) -> FrontendStack:
    """With a chat template for tools, documents and reasoning."""
    shared_agent_stack.scheduler.reset()
    return shared_agent_stack


@pytest.fixture
def make_stack(tmp_path: Path) -> Iterator[Callable[..., FrontendStack]]:
    """For tests that break something: a stack of their own."""
    made: list[FrontendStack] = []

    def make(**options: Any) -> FrontendStack:
        made.append(FrontendStack(tmp_path / str(len(made)), **options))
        return made[-1]

    yield make
    for stack in made:
        stack.close()


@pytest.fixture(scope="session")
def shared_scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedStack]:
    stack = ScriptedStack(tmp_path_factory.mktemp("scripted"))
    yield stack
    stack.close()


@pytest.fixture
def scripted(shared_scripted: ScriptedStack) -> ScriptedStack:
    """For tests of what becomes of text, reasoning and tool calls."""
    shared_scripted.reset()
    return shared_scripted


@pytest.fixture(scope="session")
def browser(shared_scripted: ScriptedStack) -> Iterator[Page]:
    with Page(f"{shared_scripted.url}/") as page:
        yield page


@pytest.fixture
def page(scripted: ScriptedStack, browser: Page) -> Page:
    """The chat page, in a browser that has kept nothing of other tests."""
    browser.resize(900, 700)
    browser.open(f"{scripted.url}/")
    browser.wait_for("document.querySelector('#model').textContent === 'org/tiny'")
    return browser


@pytest.fixture
def make_scripted(tmp_path: Path) -> Iterator[Callable[..., ScriptedStack]]:
    """For tests with a configuration of their own."""
    made: list[ScriptedStack] = []

    def make(**options: Any) -> ScriptedStack:
        made.append(ScriptedStack(tmp_path, **options))
        return made[-1]

    yield make
    for stack in made:
        stack.close()
