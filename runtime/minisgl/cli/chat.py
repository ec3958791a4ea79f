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
from typing import Any, Final

import msgspec

from minisgl.bench.http_client import Endpoint, HttpError
from minisgl.errors import CodedError
from minisgl.flags.arguments import integer

DEFAULT_URL: Final = "http://127.0.0.1:8000"
_START_SECONDS: Final = 1800
_POLL_SECONDS: Final = 0.1

_HELP: Final = """\
/reset         start a new conversation
/system TEXT   start a new conversation with TEXT as system prompt; without TEXT: with none
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
        default=DEFAULT_URL,
        metavar="URL|MODEL",
        help="OpenAI endpoint (http://… or https://…), or a model to serve for this chat: a directory or a Hub id "
        f"(default: {DEFAULT_URL})",
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


def run(args: argparse.Namespace) -> int:
    with _endpoint(args.target, args.api_key or os.environ.get("OPENAI_API_KEY")) as endpoint:
        options = {"temperature": args.temperature, "max_tokens": args.max_tokens}
        with asyncio.Runner() as runner:
            model = args.model or runner.run(endpoint.first_model())
            chat = Chat(endpoint, model, {name: value for name, value in options.items() if value is not None})
            chat.reset(args.system)
            return _talk(chat, runner)


class Answer(msgspec.Struct):
    """Text, times and token counts of one answer."""

    text: str = ""
    first_seconds: float = 0.0
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def __str__(self) -> str:
        decode, tokens = self.seconds - self.first_seconds, self.completion_tokens - 1
        speed = f", {tokens / decode:.1f} tokens/s" if tokens > 0 and decode > 0 else ""
        return (
            f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached), {self.completion_tokens} answered, "
            f"first after {self.first_seconds * 1000:.0f} ms{speed}"
        )


class Chat:
    """A conversation with one model of an endpoint."""

    def __init__(self, endpoint: Endpoint, model: str, options: dict[str, Any]) -> None:
        self.endpoint = endpoint
        self.model = model
        self.answers: list[Answer] = []
        self._options = options
        self._messages: list[dict[str, str]] = []

    def reset(self, system: str | None) -> None:
        """Start a new conversation, with `system` as system prompt unless it is empty."""
        self._messages = [] if not system else [{"role": "system", "content": system}]

    @property
    def system(self) -> str | None:
        first = self._messages[0] if self._messages else {}
        return first["content"] if first.get("role") == "system" else None

    async def ask(self, question: str, show: Callable[[str], None]) -> None:
        """Ask and pass each piece of the answer to `show`. A cancelled answer stays in the conversation as far as it
        came; after an error the question is removed from it. Raises HttpError."""
        self._messages.append({"role": "user", "content": question})
        answer = Answer()
        try:
            await self._receive(answer, show)
        except HttpError:
            self._messages.pop()
            raise
        except (ValueError, KeyError, TypeError) as error:
            self._messages.pop()
            raise HttpError("not_a_chunk", f"not a chunk of an OpenAI stream: {error!r}") from error
        except asyncio.CancelledError:
            self._keep(answer)
            raise
        self._keep(answer)

    def _keep(self, answer: Answer) -> None:
        self.answers.append(answer)
        self._messages.append({"role": "assistant", "content": answer.text})

    async def _receive(self, answer: Answer, show: Callable[[str], None]) -> None:
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
                    piece = choice["delta"].get("content") or ""
                    if piece:
                        answer.seconds = event.at - began
                        answer.first_seconds = answer.first_seconds or answer.seconds
                        answer.text += piece
                        show(piece)
                if usage := chunk.get("usage"):
                    answer.prompt_tokens = usage["prompt_tokens"]
                    answer.completion_tokens = usage["completion_tokens"]
                    answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


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
    def show(piece: str) -> None:
        print(piece, end="", flush=True)

    try:
        runner.run(chat.ask(question, show))
    except HttpError as error:
        print(f"minisgl: error: {error}", file=sys.stderr)
        return False
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    print(flush=True)
    return True


@contextlib.contextmanager
def _endpoint(target: str, api_key: str | None) -> Iterator[Endpoint]:
    """Yield the endpoint `target`, or serve the model `target` until the block ends and yield its endpoint."""
    if "://" in target:
        yield Endpoint(target, api_key)
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "minisgl", "serve", target, "--host", "127.0.0.1", "--port", str(port)]
    # A separate process group: Ctrl-C stops an answer, not the server.
    server = subprocess.Popen([*command, "--log-level", "warning"], process_group=0, stdin=subprocess.DEVNULL)
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
