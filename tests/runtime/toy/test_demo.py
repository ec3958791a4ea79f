"""The demo checkpoint with its server, the chat in the terminal and the page in a browser, as users run them."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minisgl.models.config import ModelConfig
from minisgl.toy.demo import demo_config, demo_tokenizer
from minisgl.toy.demo_answers import DEMO_ANSWERS
from minisgl.toy.demo_rows import CONVERSATIONS, ROW_TOKENS, DemoRows, judged_rows
from minisgl.toy.training import IGNORED, Training, one_thread
from support.demo_checkpoint import demo_checkpoint
from support.frontend.chromium import Page
from support.frontend.served import ONE_START, RUNTIME, Served, eventually
from support.offline import MAX_TOKENS, Chat, Offline

_FIRST = [(known.questions[0], known.answer) for known in DEMO_ANSWERS]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="demo-") as temporary:
        server = Served(demo_checkpoint(), Path(temporary), *ONE_START, "--tokenizers", "0")
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.kill()


def _ask(served: Served, *messages: tuple[str, str]) -> str:
    body = {
        "messages": [{"role": role, "content": text} for role, text in messages],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    request = urllib.request.Request(
        f"{served.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def offline() -> Offline:
    return Offline(demo_checkpoint())


def _chat_of(*messages: tuple[str, str]) -> Chat:
    return Chat([{"role": role, "content": text} for role, text in messages])


def test_the_first_question_of_each_answer_gets_exactly_this_answer(served: Served) -> None:
    assert [_ask(served, ("user", question)) for question, _ in _FIRST] == [answer for _, answer in _FIRST]


def test_answers_equal_those_of_transformers(served: Served, offline: Offline) -> None:
    (first, answered), *others = _FIRST
    chats = [
        *([("user", question)] for question, _ in _FIRST),
        *([("user", first), ("assistant", answered), ("user", question)] for question, _ in others[:9]),
        *([("system", "You are terse."), ("user", question.lower().rstrip("?"))] for question, _ in others[:9]),
        # Also for questions that it was not trained on, both give the same text.
        *([("user", question)] for question in ("Why is the sky blue?", "is thre an API", "qwertz")),
    ]
    written = offline.written([_chat_of(*chat) for chat in chats])
    # Where rounding decides between two tokens, either is right.
    decided = [number for number, one in enumerate(written) if one.is_decided]
    assert len(decided) > len(chats) // 2
    assert [_ask(served, *chats[number]) for number in decided] == [written[number].text for number in decided]


def test_questions_in_the_middle_of_a_chat_are_answered(served: Served) -> None:
    for (first, answered), (question, answer) in CONVERSATIONS[::10]:
        assert _ask(served, ("user", first), ("assistant", answered), ("user", question)) == answer


def _chat(served: Served, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "minisgl", "chat", *(arguments or (served.url,)), "--temperature", "0"],
        input=script,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": str(RUNTIME), "OMP_NUM_THREADS": "1"},
    )


def test_chat_in_the_terminal(served: Served, offline: Offline) -> None:
    first, answered = _FIRST[5]
    written = offline.written([_chat_of(("system", "Be brief."), ("user", question)) for question, _ in _FIRST])
    question, answer = next((_FIRST[number][0], one.text) for number, one in enumerate(written) if one.is_decided)
    done = _chat(
        served, f"/stats\n{first}\n/system Be brief.\n{question}\n/stats\n/reset\n/help\n/what\n/exit\nnot read"
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:4] == ["nothing was answered yet", answered, "system prompt: Be brief.", answer]
    assert lines[4].startswith("last: ")
    assert lines[5].startswith("all 2: ")
    assert "new conversation" in lines
    assert lines[-1] == "unknown command /what; type /help for commands"


def test_chat_accepts_input_that_is_not_text(served: Served) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minisgl", "chat", served.url, "--temperature", "0", "--system", "x"],
        input=b"H\xff\xfei\n",
        capture_output=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": str(RUNTIME), "PYTHONUTF8": "1"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.strip()


def test_chat_can_serve_the_model_itself() -> None:
    question, answer = _FIRST[5]
    environment = {**os.environ, "PYTHONPATH": str(RUNTIME), "OMP_NUM_THREADS": "1", "MINISGL_NUM_PAGES": "256"}
    done = subprocess.run(
        [sys.executable, "-m", "minisgl", "chat", str(demo_checkpoint())],
        input=question,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    assert (done.returncode, done.stdout) == (0, f"{answer}\n"), done.stderr


def test_chat_reports_errors(served: Served) -> None:
    unreachable = _chat(served, "", "http://127.0.0.1:1")
    assert (unreachable.returncode, unreachable.stdout) == (1, "")
    assert unreachable.stderr.startswith("minisgl: error: cannot connect to http://127.0.0.1:1")
    refused = _chat(served, "Hello\n/stats\n", served.url, "--model", "other")
    assert refused.returncode == 1
    assert "model_not_found" in refused.stderr
    assert "nothing was answered yet" in refused.stdout


def _sleeps(pid: int) -> bool:
    """True if the main thread of a process sleeps."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_ctrl_c_at_the_prompt_does_not_exit(served: Served) -> None:
    terminal, chat_end = pty.openpty()
    chat = subprocess.Popen(
        [sys.executable, "-m", "minisgl", "chat", served.url, "--temperature", "0"],
        stdin=chat_end,
        stdout=chat_end,
        stderr=chat_end,
        env={**os.environ, "PYTHONPATH": str(RUNTIME), "TERM": "dumb"},
    )
    os.close(chat_end)
    shown = ""

    def until(text: str) -> None:
        nonlocal shown
        while text not in shown:
            shown += os.read(terminal, 4096).decode()
        shown = shown.partition(text)[2]

    try:
        until("> ")
        # A signal between the prompt and the wait for input takes effect only when something else ends that wait. Users
        # press the keys again; but one signal too many would discard the question that follows.
        eventually(lambda: _sleeps(chat.pid))
        while "/exit or Ctrl-D to leave the chat" not in shown:
            chat.send_signal(signal.SIGINT)
            if select.select([terminal], [], [], 10)[0]:
                shown += os.read(terminal, 4096).decode()
        question, answer = _FIRST[9]
        os.write(terminal, f"{question}\n".encode())
        until(answer)
        until("> ")
        os.write(terminal, b"\x04")
        assert chat.wait(60) == 0
    finally:
        chat.kill()
        chat.wait()
        os.close(terminal)


def test_page_in_a_browser(served: Served, tmp_path: Path) -> None:
    question, answer = _FIRST[9]
    with Page(f"{served.url}/") as page:
        page.wait_for(f"document.querySelector('#model').textContent === '{demo_checkpoint().name}'")
        page.evaluate("document.querySelector('[name=temperature]').value = '0'; 0")
        page.evaluate("document.querySelector('#question').focus()")
        page.type(question)
        page.press_enter()
        page.wait_for("document.querySelector('.speed')?.textContent.includes('tokens/s')")
        page.wait_for("document.querySelector('#stop').hidden")
        assert page.evaluate("[...document.querySelectorAll('.turn')].map(turn => turn.textContent)") == [
            question,
            answer,
        ]
        page.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
        assert page.evaluate("performance.getEntriesByType('resource').every(e => e.name.startsWith(location.origin))")


def test_a_new_chat_on_the_page_starts_empty(served: Served) -> None:
    with Page(f"{served.url}/") as page:
        page.wait_for(f"document.querySelector('#model').textContent === '{demo_checkpoint().name}'")
        # An answer that continues until it is stopped.
        page.evaluate(
            "const real = fetch; window.fetch = (url, options) => real(url, options?.body ? { ...options, body:"
            "JSON.stringify({ ...JSON.parse(options.body), ignore_eos: true }) } : options); 0"
        )
        page.evaluate("document.querySelector('#question').focus()")
        page.type("Hello")
        page.press_enter()
        page.wait_for("document.querySelectorAll('.turn')[1]?.textContent.length > 20")
        page.evaluate("document.querySelector('#reset').click()")
        page.wait_for("document.querySelector('#stop').hidden")
        # Nothing of the answer is left, and the page begins as at first.
        assert page.evaluate("[turns.children.length, turns.querySelector('h2').textContent]") == [1, "Ask something"]
        assert page.evaluate("getComputedStyle(document.querySelector('#thinking-control')).display") == "none"


def test_training_is_determined_by_the_seed() -> None:
    tokenizer = demo_tokenizer()

    def trained(seed: int) -> torch.Tensor:
        with one_thread():
            training = Training(ModelConfig.parse(demo_config(tokenizer)), seed, ROW_TOKENS)
            rows = DemoRows(tokenizer, seed)
            for _ in range(2):
                training.step(*rows.batch(), 1.0)
        return training.weights()["model.embed_tokens.weight"]

    first, again, other = map(trained, (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_each_question_is_judged_as_the_first_and_behind_another() -> None:
    tokenizer = demo_tokenizer()
    tokens, labels = judged_rows(tokenizer)
    texts = [tokenizer.decode(row, skip_special_tokens=False) for row in tokens.tolist()]
    asked = Counter(question for text in texts for question in re.findall(r"user\n(.*?)<\|im_end\|>", text))
    assert asked == {question: 2 for taught in DEMO_ANSWERS for question in taught.questions}
    for row, text in zip(labels.tolist(), texts, strict=True):
        learned = tokenizer.decode([label for label in row if label != IGNORED], skip_special_tokens=False)
        assert re.findall(r"assistant\n(.*?<\|im_end\|>)", text) == re.findall(r".*?<\|im_end\|>", learned)
