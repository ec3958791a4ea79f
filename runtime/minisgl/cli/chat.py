"""`minisgl chat [URL|MODEL]`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

from minisgl.bench.http_client import Endpoint, HttpError
from minisgl.config import EngineConfig
from minisgl.errors import CodedError
from minisgl.extras import require
from minisgl.flags.arguments import add_options, given_flags, integer

DEFAULT_URL: Final = "http://127.0.0.1:8000"
Show: TypeAlias = Callable[[Literal["reasoning", "text"], str], None]
"""Receives each piece of an answer with its kind."""

_START_SECONDS: Final = 1800
_POLL_SECONDS: Final = 0.1

_HELP: Final = """\
/reset         start a new conversation
/system TEXT   start a new conversation with TEXT as system prompt; without TEXT: with none
/think         show the reasoning of the last answer
/stats         show tokens and times of the last answer, and tokens of all answers
/help          show this list
/exit          leave the chat; so does Ctrl-D
Ctrl-C         stop the answer"""


class ChatError(CodedError):
    """The chat cannot continue. `code` is stable."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        nargs="?",
        metavar="URL|MODEL",
        help="OpenAI endpoint (http://… or https://…), or a model to serve for this chat: a directory or a Hub id "
        f"(default: the variable OPENAI_BASE_URL, or {DEFAULT_URL})",
    )
    parser.add_argument("--model", metavar="NAME", help="model of the endpoint (default: the first one it lists)")
    parser.add_argument(
        "--api-key", metavar="KEY", help="API key for the endpoint (default: the variable OPENAI_API_KEY, or none)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt (default: none)")
    parser.add_argument(
        "--temperature", type=_temperature, metavar="X", help="0 for the most likely answer (default: the endpoint's)"
    )
    parser.add_argument(
        "--max-tokens",
        type=integer(1),
        metavar="N",
        help="maximum length of an answer (default: the endpoint's, in tokens)",
    )
    parser.add_argument(
        "--no-thinking",
        action="store_true",
        help="answer without reasoning, if the model's chat template allows it (default: as the template does)",
    )
    parser.add_argument(
        "--tools",
        type=_tools,
        metavar="FILE",
        help="JSON file with a list of tools as in a request; the chat shows each call and asks for its result "
        "(default: no tools)",
    )
    engine = parser.add_argument_group("engine", "only with a MODEL")
    add_options(engine, EngineConfig(model=""))
    for action in engine._group_actions:
        # Those that are given go to `serve`, which has the defaults.
        action.default = argparse.SUPPRESS
    parser.set_defaults(engine_flags=engine._group_actions, usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    target = args.target or _url_of_the_variable() or DEFAULT_URL
    flags = given_flags(args, args.engine_flags)
    if flags and "://" in target:
        args.usage_error(f"{flags[0]} is for a MODEL to serve, and {target} is served already")
    require(*(("frontend", ("httptools",)) if "://" in target else ("serve",)))
    with _endpoint(target, args.api_key or os.environ.get("OPENAI_API_KEY"), flags) as endpoint:
        options = {
            "temperature": args.temperature,
            "max_tokens": args.max_tokens,
            "tools": args.tools,
            "chat_template_kwargs": {"enable_thinking": False} if args.no_thinking else None,
        }
        with asyncio.Runner() as runner:
            model = args.model or runner.run(endpoint.first_model())
            chat = Chat(endpoint, model, {name: value for name, value in options.items() if value is not None})
            chat.reset(args.system)
            return _talk(chat, runner)


def _url_of_the_variable() -> str | None:
    url = os.environ.get("OPENAI_BASE_URL")
    # Without a scheme it would be taken for the name of a model.
    return f"http://{url}" if url and "://" not in url else url


class Call(msgspec.Struct):
    """A call of a tool, as far as it has arrived."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    def __str__(self) -> str:
        return f"{self.name}({self.arguments})"


class Answer(msgspec.Struct):
    """Reasoning, text, tool calls, times and token counts of one answer."""

    reasoning: str = ""
    text: str = ""
    calls: list[Call] = []
    first_seconds: float = 0.0
    seconds: float = 0.0
    """From the question to the last piece."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def __str__(self) -> str:
        # Of the whole answer: its pieces may have been held back on the way and come all at once.
        speed = f", {self.completion_tokens / self.seconds:.1f} tokens/s" if self.seconds > 0 else ""
        return (
            f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached), {self.completion_tokens} answered in "
            f"{self.seconds:.2f} s{speed}, first after {self.first_seconds * 1000:.0f} ms"
        )


class Chat:
    """A conversation with one model of an endpoint."""

    def __init__(self, endpoint: Endpoint, model: str, options: dict[str, Any]) -> None:
        self.endpoint = endpoint
        self.model = model
        self.answers: list[Answer] = []
        self._options = options
        self._messages: list[dict[str, Any]] = []
        self._asked = 0
        """Number of messages before the last question."""

    def reset(self, system: str | None) -> None:
        """Start a new conversation, with `system` as system prompt unless it is empty."""
        self._messages = [] if not system else [{"role": "system", "content": system}]

    @property
    def system(self) -> str | None:
        first = self._messages[0] if self._messages else {}
        return first["content"] if first.get("role") == "system" else None

    @property
    def awaits_results(self) -> bool:
        """The last answer calls tools."""
        return bool(self._messages) and "tool_calls" in self._messages[-1]

    async def ask(self, question: str, show: Show) -> Answer:
        """Ask and pass each piece of the answer to `show`. A cancelled answer stays in the conversation as far as its
        text came; after an error the question is removed from it. Raises HttpError."""
        self._asked = len(self._messages)
        return await self._continue([{"role": "user", "content": question}], show)

    async def reply(self, results: Sequence[tuple[Call, str]], show: Show) -> Answer:
        """Continue after the calls of the last answer with their results, as `ask` does."""
        return await self._continue(
            [{"role": "tool", "tool_call_id": call.id, "content": result} for call, result in results], show
        )

    def forget(self) -> None:
        """Remove the last question from the conversation, with everything behind it."""
        del self._messages[self._asked :]

    async def _continue(self, messages: Sequence[dict[str, Any]], show: Show) -> Answer:
        self._messages += messages
        answer = Answer()
        try:
            await self._receive(answer, show)
        except HttpError:
            self.forget()
            raise
        except (ValueError, KeyError, TypeError) as error:
            self.forget()
            raise HttpError("not_a_chunk", f"not a chunk of an OpenAI stream: {error!r}") from error
        except asyncio.CancelledError:
            # Calls without results cannot be continued.
            answer.calls.clear()
            self._keep(answer)
            raise
        self._keep(answer)
        return answer

    def _keep(self, answer: Answer) -> None:
        self.answers.append(answer)
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.calls
            ]
        self._messages.append(message)

    async def _receive(self, answer: Answer, show: Show) -> None:
        body = {
            "model": self.model,
            "messages": self._messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        began = time.perf_counter()
        async with self.endpoint.stream("/v1/chat/completions", body) as events:
            async for event in events:
                chunk = json.loads(event.data)
                if "error" in chunk:
                    raise HttpError("stream_failed", str(chunk["error"].get("message", chunk["error"])))
                for choice in chunk["choices"]:
                    if _add(answer, choice["delta"], show):
                        answer.seconds = event.at - began
                        answer.first_seconds = answer.first_seconds or answer.seconds
                if usage := chunk.get("usage"):
                    answer.prompt_tokens = usage["prompt_tokens"]
                    answer.completion_tokens = usage["completion_tokens"]
                    answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _add(answer: Answer, delta: dict[str, Any], show: Show) -> bool:
    """Add a delta of the stream to the answer; returns whether it had any output."""
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    text = delta.get("content") or ""
    calls = delta.get("tool_calls") or []
    if reasoning:
        answer.reasoning += reasoning
        show("reasoning", reasoning)
    if text:
        answer.text += text
        show("text", text)
    for piece in calls:
        if piece["index"] == len(answer.calls):
            answer.calls.append(Call())
        call, function = answer.calls[piece["index"]], piece.get("function") or {}
        call.id += piece.get("id") or ""
        call.name += function.get("name") or ""
        call.arguments += function.get("arguments") or ""
    return bool(reasoning or text or calls)


def _talk(chat: Chat, runner: asyncio.Runner) -> int:
    """Answer questions until the input ends; returns 1 when a question of a script was not answered, else 0."""
    interactive = sys.stdin.isatty()
    if interactive:
        # Line editing and history for `input`.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        print(f"{chat.model} at {chat.endpoint.url}; type /help for commands")
    failed = False
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            # The shell's prompt belongs on a line of its own.
            print(end="\n" if interactive else "")
            return int(failed)
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\nuse /exit or Ctrl-D to leave the chat")
            continue
        if line == "/exit":
            return int(failed)
        if line.startswith("/"):
            print(_command(chat, line))
        elif line:
            failed |= not _answer(chat, line, runner) and not interactive


def _command(chat: Chat, line: str) -> str:
    name, _, rest = line.partition(" ")
    match name:
        case "/reset":
            chat.reset(chat.system)
            return "new conversation"
        case "/system":
            chat.reset(rest.strip())
            return f"system prompt: {rest.strip() or 'none'}"
        case "/think":
            return chat.answers[-1].reasoning if chat.answers and chat.answers[-1].reasoning else "no reasoning"
        case "/stats":
            return _stats(chat.answers)
        case "/help":
            return _HELP
    return f"unknown command {name}; type /help for commands"


def _stats(answers: Sequence[Answer]) -> str:
    if not answers:
        return "nothing was answered yet"
    prompt = sum(answer.prompt_tokens for answer in answers)
    completion = sum(answer.completion_tokens for answer in answers)
    return f"last: {answers[-1]}\nall {len(answers)}: {prompt} prompt tokens, {completion} answered"


def _answer(chat: Chat, question: str, runner: asyncio.Runner) -> bool:
    """Print the answer to a question; calls of tools are printed, and their results read from the input. Returns
    whether the question was answered."""
    screen = _Screen(sys.stdin.isatty())
    try:
        answer = runner.run(chat.ask(question, screen.show))
        while answer.calls:
            screen.end_reasoning()
            results = [(call, _result_of(call, screen.interactive)) for call in answer.calls]
            answer = runner.run(chat.reply(results, screen.show))
    except HttpError as error:
        print(f"minisgl: error: {error}", file=sys.stderr)
        return False
    except EOFError:
        chat.forget()
        print("minisgl: error: the input ended before the result of a call", file=sys.stderr)
        return False
    except KeyboardInterrupt:
        if chat.awaits_results:
            chat.forget()
        print(" [stopped]", end="")
    screen.end_reasoning()
    print(flush=True)
    return True


def _result_of(call: Call, interactive: bool) -> str:
    print(call, flush=True)
    return input("result> " if interactive else "")


class _Screen:
    """Prints an answer as it arrives; reasoning only as a line that says how long it took."""

    def __init__(self, interactive: bool) -> None:
        self.interactive = interactive
        self._reasoning_since = 0.0
        """0: no reasoning is going on."""

    def show(self, kind: Literal["reasoning", "text"], piece: str) -> None:
        if kind == "text":
            self.end_reasoning()
            print(piece, end="", flush=True)
        elif self.interactive and not self._reasoning_since:
            self._reasoning_since = time.perf_counter()
            print("[thinking …", end="", flush=True)

    def end_reasoning(self) -> None:
        if self._reasoning_since:
            print(f" {time.perf_counter() - self._reasoning_since:.1f} s; /think shows it]", flush=True)
            self._reasoning_since = 0.0


@contextlib.contextmanager
def _endpoint(target: str, api_key: str | None, flags: Sequence[str]) -> Iterator[Endpoint]:
    """Yield the endpoint `target`, or serve the model `target` with `flags` until the block ends and yield its
    endpoint."""
    if "://" in target:
        yield Endpoint(target, api_key)
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "minisgl", "serve", target, "--host", "127.0.0.1", "--port", str(port)]
    # A separate process group: Ctrl-C stops an answer, not the server.
    server = subprocess.Popen([*command, "--log-level", "warning", *flags], process_group=0, stdin=subprocess.DEVNULL)
    try:
        endpoint = Endpoint(f"http://127.0.0.1:{port}")
        print(f"loading {target} …", file=sys.stderr, flush=True)
        asyncio.run(_until_ready(endpoint, server))
        yield endpoint
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


async def _until_ready(endpoint: Endpoint, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise ChatError("server_failed", "the model's server exited before it was ready; see its output above")
        try:
            await endpoint.json("GET", "/ready")
            return
        except HttpError:
            await asyncio.sleep(_POLL_SECONDS)
    raise ChatError("server_failed", f"the model's server was not ready within {_START_SECONDS} s")


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 2")
    return value


def _tools(path: str) -> list[Any]:
    try:
        tools = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path!r} cannot be read as JSON: {error}") from error
    if not isinstance(tools, list):
        raise argparse.ArgumentTypeError(f"{path!r} does not contain a list of tools")
    return tools
