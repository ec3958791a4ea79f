"""Trial of tokenizer files: a process with limits loads them, renders chats of a few words and encodes a text.

A chat template is a program, and a tokenizer's normalizer rewrites text: either can make gigabytes of a word, or never
end, in calls that nothing inside their process can stop.
"""

from __future__ import annotations

import os
import resource
import signal
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from minisgl.errors import PromptError, TokenizerError
from minisgl.tokenizer.chat_template import ChatTemplate
from minisgl.tokenizer.model_files import ModelFiles, load_model_files
from minisgl.wire.text import ChatMessage, ToolOptions

_MEMORY_BYTES: Final = 768 << 20
"""A tokenizer with a vocabulary of 262,144 tokens takes 300 MB."""
_LOAD_SECONDS: Final = 30
"""Time of the cores to load the files, whose size is limited."""
_TRIAL_SECONDS: Final = 3.0
"""Time of the cores for everything after it, of which files of known models take a hundredth of a second."""
_TEXT: Final = f"{string.printable} äöüß Ελλάδα Россия नमस्ते 日本語 中文 한국어 \U0001f600 \u200d\u00a0"
"""A normalizer may lengthen some characters only."""


class _Report(msgspec.Struct, frozen=True):
    """Result of a process that has ended by itself: codes and messages."""

    tokenizer_error: tuple[str, str] | None = None
    template_error: tuple[str, str] | None = None


def try_files(directory: str | Path, *, fork: bool = False) -> PromptError | None:
    """Try the tokenizer files in a directory. Returns the error of a chat template that does not accept a plain chat:
    completions work with it. Raises TokenizerError, with code `tokenizer_limits` for files that need too much.

    fork: a copy of this process tries them, which takes a tenth of the time of a new one. Only for a process whose
    other threads cannot hold a lock that the copy would wait for.
    """
    output, status = _output_of_copy(str(directory)) if fork else _output_of_process(str(directory))
    try:
        report = msgspec.json.decode(output, type=_Report)
    except msgspec.MsgspecError:
        raise _too_much(directory, f"the process that tried them ended with status {status}") from None
    if report.tokenizer_error is not None:
        raise TokenizerError(*report.tokenizer_error)
    return None if report.template_error is None else PromptError(*report.template_error)


def _output_of_process(directory: str) -> tuple[bytes, int]:
    """Output and exit status of a new process that tries the files."""
    tried = subprocess.run(
        [sys.executable, "-P", "-m", __name__, directory],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    return tried.stdout, tried.returncode


def _output_of_copy(directory: str) -> tuple[bytes, int]:
    """Output and exit status of a copy of this process that tries the files."""
    reader, writer = os.pipe()
    copy = os.fork()
    if copy == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_RDWR), 2)
            os.dup2(writer, 1)
            _close_inherited_descriptors()
            _report(directory, 1)
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader, "rb") as stream:
        output = stream.read()
    return output, os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])


def _close_inherited_descriptors() -> None:
    """Close all descriptors but the standard ones: the end of a connection must reach its peer when the process that
    was copied ends, not when its copy does."""
    # Only those that are open: the limit can be a billion, and a system without close_range tries each number below.
    for name in os.listdir("/proc/self/fd"):
        if (descriptor := int(name)) > 2:
            # Does not fail for the descriptor of the listing itself, which is closed.
            os.closerange(descriptor, descriptor + 1)


def _too_much(directory: str | Path, found: str) -> TokenizerError:
    return TokenizerError(
        "tokenizer_limits",
        f"the tokenizer files in {directory} need more than {_MEMORY_BYTES >> 20} MiB, or {_TRIAL_SECONDS:g} s of a "
        f"core, for a chat of a few words ({found}): look for what their chat template or normalizer repeats, or use "
        "another copy of the model",
    )


def _limit_process() -> None:
    # Threads would need memory of their own.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Not RLIMIT_AS: allocators reserve much more than they use.
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_LOAD_SECONDS, _LOAD_SECONDS))


def _limit_trial() -> None:
    """The kernel ends the process at the end of the time: nothing else interrupts a call of a library."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, _TRIAL_SECONDS)


def _try(directory: str) -> _Report:
    try:
        files = load_model_files(directory)
        _limit_trial()
        files.tokenizer.encode(_TEXT)
        files.tokenizer.decode(files.tokenizer.encode(_TEXT, add_special_tokens=False).ids)
        return _Report(template_error=_try_templates(files))
    except TokenizerError as error:
        return _Report((error.code, error.message))
    except MemoryError:
        too_much = _too_much(directory, "memory")
        return _Report((too_much.code, too_much.message))


def _try_templates(files: ModelFiles) -> tuple[str, str] | None:
    """Returns the error of a plain chat."""
    if files.chat_template is None:
        return None
    template = ChatTemplate(files.chat_template, files.special_tokens)
    failed = _error_of(lambda: template.render([ChatMessage("user", "Hello")]))
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    turns = [
        *(ChatMessage("system", "s"), ChatMessage("user", "Hello")),
        *(ChatMessage("assistant", "Hi", reasoning="r"), ChatMessage("user", _TEXT)),
    ]
    with_tools = ChatTemplate(files.tool_template or files.chat_template, files.special_tokens)
    for thinking in (None, True, False):
        # A template may refuse any of it.
        _error_of(lambda: with_tools.render(turns, tools=ToolOptions(definitions=(tool,)), thinking=thinking))  # noqa: B023
        _error_of(lambda: template.render(turns, thinking=thinking))  # noqa: B023
    return None if failed is None else (failed.code, failed.message)


def _error_of(render: Callable[[], object]) -> PromptError | None:
    try:
        render()
    except PromptError as error:
        return error
    return None


def _report(directory: str, descriptor: int) -> None:
    """Try the files within the limits, which stay those of this process, and write the report."""
    _limit_process()
    with open(descriptor, "wb", closefd=False) as stream:
        stream.write(msgspec.json.encode(_try(directory)))


if __name__ == "__main__":
    _report(sys.argv[1], 1)
