"""The reference implementation of harmony, with the vocabulary of gpt-oss."""

from __future__ import annotations

import gzip
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
from openai_harmony import Author, Conversation, Message, Role, load_harmony_encoding

_VOCABULARY: Final = "o200k_base.tiktoken"


@cache
def encoding() -> Any:
    """Return the encoding. It reads its vocabulary from a directory, in place of the network, and checks its hash."""
    packed = Path(str(distribution("bpe-openai").locate_file(f"bpe_openai/data/{_VOCABULARY}.gz")))
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        (Path(directory) / _VOCABULARY).write_bytes(gzip.decompress(packed.read_bytes()))
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", directory)
        return load_harmony_encoding("HarmonyGptOss")


def message(text: str, channel: str = "", to: str = "", *, role: str = "assistant", name: str | None = None) -> Any:
    """Return a message of the reference; one to a tool has JSON."""
    made = Message.from_author_and_content(Author(role=Role(role), name=name), text)
    made.channel = channel or None
    made.recipient = to or None
    made.content_type = "<|constrain|>json" if to.startswith("functions.") else None
    return made


def parsed(tokens: list[int], role: str | None = None) -> list[Any]:
    """Return the messages that the reference reads."""
    found: list[Any] = encoding().parse_messages_from_completion_tokens(tokens, None if role is None else Role(role))
    return found


def prompt(messages: list[Any]) -> list[int]:
    """Return the tokens with which the reference asks for an answer."""
    tokens: list[int] = encoding().render_conversation_for_completion(
        Conversation.from_messages(messages), Role.ASSISTANT
    )
    return tokens


def text_of(message: Any) -> str:
    text: str = "".join(part.text for part in message.content)
    return text
