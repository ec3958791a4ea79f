"""The demo checkpoint with its server, the chat in the terminal and the page in a browser, as users run them."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.toy.demo_answers import DEMO_ANSWERS
from support.demo_checkpoint import demo_checkpoint
from support.frontend.chromium import Page
from support.frontend.served import RUNTIME, Served, eventually

_FIRST = [(known.questions[0], known.answer) for known in DEMO_ANSWERS]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="demo-") as temporary:
        server = Served(demo_checkpoint(), Path(temporary), "--tokenizers", "0")
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.kill()


def _ask(served: Served, *messages: tuple[str, str]) -> str:
    body = {"messages": [{"role": role, "content": text} for role, text in messages], "temperature": 0}
    request = urllib.request.Request(
        f"{served.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def test_the_first_question_of_each_answer_gets_exactly_this_answer(served: Served) -> None:
    assert [_ask(served, ("user", question)) for question, _ in _FIRST] == [answer for _, answer in _FIRST]


def test_answers_equal_those_of_transformers(served: Served) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(demo_checkpoint())
    model: Any = AutoModelForCausalLM.from_pretrained(demo_checkpoint(), dtype=torch.float32)
    # Also for questions that it was not trained on, both give the same text.
    for question in (*(question for question, _ in _FIRST), "Why is the sky blue?", "is thre an API", "qwertz"):
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        tokens = model.generate(**prompt, max_new_tokens=100, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert _ask(served, ("user", question)) == tokenizer.decode(tokens, skip_special_tokens=True), question


def test_questions_in_the_middle_of_a_chat_are_answered(served: Served) -> None:
    (first, answered), (question, answer) = _FIRST[5], _FIRST[9]
    assert _ask(served, ("user", first), ("assistant", answered), ("user", question)) == answer
    assert _ask(served, ("system", "You are terse."), ("user", question.lower().rstrip("?"))) == answer


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


def test_chat_in_the_terminal(served: Served) -> None:
    (first, answered), (question, answer) = _FIRST[5], _FIRST[9]
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
        [sys.executable, "-m", "minisgl", "chat", str(demo_checkpoint()), "--temperature", "0"],
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
        assert page.evaluate("[messages.length, turns.children.length]") == [0, 0]


def test_training_is_determined_by_the_seed(tmp_path: Path) -> None:
    from minisgl.toy.demo import write_demo_checkpoint

    losses: list[float] = []
    folders = [
        write_demo_checkpoint(tmp_path / str(n), seed=seed, steps=2, progress=lambda _, loss: losses.append(loss))
        for n, seed in enumerate((0, 0, 1))
    ]
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1] != weights[2]
    assert len(losses) == 6
