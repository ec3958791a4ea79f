"""Reasoning and tool calls in the terminal chat, on a server whose answers the test determines."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from minisgl.cli.chat import Answer
from minisgl.cli.main import main
from minisgl.wire.text import FromTokenizer, Generate
from support.frontend.scripted import ScriptedStack, answer, calls, says, thinks
from support.frontend.served import RUNTIME
from support.tiny_checkpoint import tiny_checkpoint

_TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[ScriptedStack]:
    stack = ScriptedStack(tmp_path)
    yield stack
    stack.close()


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(_TOOLS))
    return path


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "minisgl", "chat", *arguments]


def _chat(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(*arguments),
        input=script,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(RUNTIME), **variables},
    )


def _weather(request: Generate) -> Sequence[FromTokenizer]:
    """Call get_weather for a question, and repeat the result."""
    assert request.messages is not None
    last = request.messages[-1]
    if last.role == "tool":
        return answer(says(f"It is {last.content}."))(request)
    return answer(calls(0, "get_weather", '{"city": ', '"Paris"}'), tool_calls=1)(request)


def test_a_script_gets_answers_without_their_reasoning(scripted: ScriptedStack) -> None:
    scripted.script = answer(thinks("Hm, "), thinks("easy."), says("Four."))
    done = _chat("2 + 2?\n/think\n", scripted.url)
    assert (done.returncode, done.stdout) == (0, "Four.\nHm, easy.\n"), done.stderr
    sent = _chat("/think\n2 + 2?\nAnd now?\n", scripted.url, "--no-thinking")
    assert sent.stdout == "no reasoning\nFour.\nFour.\n"
    request = scripted.last(Generate)
    assert request.messages is not None
    assert request.messages[1].reasoning == "Hm, easy."
    assert request.options.rendering.template_variables == {"enable_thinking": False}


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_without_an_argument_the_endpoint_is_that_of_the_variable(scheme: str, scripted: ScriptedStack) -> None:
    scripted.script = answer(says("Four."))
    done = _chat("2 + 2?\n", OPENAI_BASE_URL=f"{scheme}{scripted.url.removeprefix('http://')}/v1")
    assert (done.returncode, done.stdout) == (0, "Four.\n"), done.stderr


def test_the_rate_is_that_of_the_whole_answer() -> None:
    answered = Answer(first_seconds=0.5, seconds=0.5, completion_tokens=30, prompt_tokens=4)
    assert str(answered) == ("4 prompt tokens (0 cached), 30 answered in 0.50 s, 60.0 tokens/s, first after 500 ms")


def test_flags_of_the_engine_reach_the_server_of_the_chat() -> None:
    model = tiny_checkpoint()
    done = _chat("", str(model), "--device", "cpu", "--hf-overrides", '{"num_attention_heads": 4}', "--tp", "3")
    assert done.returncode == 1
    assert "tensor_does_not_divide" in done.stderr
    assert "the model's server exited before it was ready" in done.stderr


def test_flags_of_the_engine_need_a_model_to_serve(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chat", "http://127.0.0.1:1", "--device", "cpu"])
    assert "--device is for a MODEL to serve" in capsys.readouterr().err


def test_a_terminal_shows_that_the_model_thinks(scripted: ScriptedStack) -> None:
    scripted.script = answer(thinks("Hm, "), thinks("easy."), says("Four."))
    terminal, chat_end = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(RUNTIME), "TERM": "dumb"}
    chat = subprocess.Popen(_command(scripted.url), stdin=chat_end, stdout=chat_end, stderr=chat_end, env=environment)
    os.close(chat_end)
    shown = ""
    try:
        for typed, expected in (("", "> "), ("2 + 2?\n", "Four.\r\n> ")):
            os.write(terminal, typed.encode())
            while not shown.endswith(expected):
                shown += os.read(terminal, 4096).decode()
        assert "[thinking … " in shown
        assert "; /think shows it]\r\nFour." in shown
        assert "easy" not in shown
        os.write(terminal, b"\x04")
        assert chat.wait(60) == 0
    finally:
        chat.kill()
        chat.wait()
        os.close(terminal)


def test_calls_are_printed_and_their_results_read(scripted: ScriptedStack, tools: Path) -> None:
    scripted.script = _weather
    done = _chat("What is the weather in Paris?\nsunny\n/stats\n", scripted.url, "--tools", str(tools))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ['get_weather({"city": "Paris"})', "It is sunny."]
    sent = scripted.last(Generate)
    assert sent.options.tools is not None
    assert sent.options.tools.definitions[0]["function"]["name"] == "get_weather"
    assert sent.messages is not None
    _, called, result = sent.messages
    assert called.tool_calls is not None
    assert called.tool_calls[0]["function"]["arguments"] == {"city": "Paris"}
    assert (result.tool_call_id, result.content) == ("call_0", "sunny")


def test_input_that_ends_before_a_result_is_an_error(scripted: ScriptedStack, tools: Path) -> None:
    scripted.script = _weather
    done = _chat("What is the weather in Paris?\n", scripted.url, "--tools", str(tools))
    assert done.returncode == 1
    assert "the input ended before the result of a call" in done.stderr


def test_a_file_of_tools_must_be_a_json_list(scripted: ScriptedStack, tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{")
    (tmp_path / "object.json").write_text("{}")
    assert "cannot be read as JSON" in _chat("", scripted.url, "--tools", str(tmp_path / "no.json")).stderr
    assert (
        "does not contain a list of tools" in _chat("", scripted.url, "--tools", str(tmp_path / "object.json")).stderr
    )


def test_ctrl_c_stops_the_answer_and_not_the_chat(scripted: ScriptedStack) -> None:
    scripted.script = answer(says("Once"), ends=False)
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "minisgl", "chat", scripted.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(RUNTIME)},
    ) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        try:
            chat.stdin.write("Tell me a story\n")
            chat.stdin.flush()
            assert chat.stdout.read(4) == "Once"
            chat.send_signal(signal.SIGINT)
            assert chat.stdout.readline() == " [stopped]\n"
            scripted.script = answer(says("The end."))
            chat.stdin.write("Another one\n/stats\n")
            chat.stdin.close()
            assert chat.stdout.readline() == "The end.\n"
            assert chat.stdout.readline().startswith("last: ")
            assert chat.wait(60) == 0
        finally:
            chat.kill()
    # What was told of the first story stays in the conversation.
    sent = scripted.last(Generate).messages
    assert sent is not None
    assert [message.content for message in sent] == ["Tell me a story", "Once", "Another one"]
