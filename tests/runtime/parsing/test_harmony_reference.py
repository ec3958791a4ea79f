"""Answers and prompts in channels mean what OpenAI's own implementation reads in them, with gpt-oss's vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.tokenizer.loaded import LoadedTokenizer, load
from minisgl.wire.text import ChatMessage
from support.frontend.chat_templates import HARMONY
from support.messages import generate_of
from support.parsing import harmony_reference as reference
from support.parsing.channels import AS_TOKENS, IDS, Quoted, replay
from support.parsing.replay import Result
from support.tiny_tokenizers import byte_level, write_directory

MARKERS: Final = {token: text for text, token in IDS.items()}

TEXTS: Final = st.lists(st.sampled_from(("Hm.", " a", "\n", "é🙂", "日本", "{", '"', "<|", "12", "to=", "final"))).map(
    "".join
)
ARGUMENTS: Final = st.dictionaries(TEXTS, TEXTS | st.integers() | st.none(), max_size=3)
CHANNELS: Final = st.sampled_from(("analysis", "commentary", "final", ""))
TOOL_NAMES: Final = st.sampled_from(("functions.get_weather", "functions.search-web", "functions.other"))
MESSAGES: Final = st.tuples(CHANNELS, TEXTS).map(lambda made: reference.message(made[1], made[0]))
CALLS: Final = st.tuples(TOOL_NAMES, ARGUMENTS).map(
    lambda made: reference.message(json.dumps(made[1], ensure_ascii=False), "commentary", made[0])
)


def parts(tokens: list[int]) -> list[str | Quoted]:
    """Return markers and the texts between them as a tokenizer worker passes them on."""
    found: list[str | Quoted] = []
    held: list[int] = []
    for token in tokens:
        if token in MARKERS:
            found.append(MARKERS[token])
            continue
        held.append(token)
        # The bytes of a character may be several tokens.
        text = reference.encoding().decode(held)
        if "\ufffd" not in text:
            found.append(Quoted(text))
            held = []
    return found


def expected(messages: list[Any]) -> Result:
    """Return what a scanner should make of messages that the reference has read."""
    reasoning: list[str] = []
    texts: list[str] = []
    calls: list[tuple[str, str]] = []
    for message in messages:
        text = reference.text_of(message)
        if message.recipient:
            calls.append((message.recipient.removeprefix("functions."), text))
        elif text:
            (reasoning if message.channel == "analysis" else texts).append(text)
    return Result("\n\n".join(reasoning), "\n\n".join(texts), calls)


@settings(max_examples=150, deadline=None)
@given(st.lists(MESSAGES | CALLS, min_size=1, max_size=6))
def test_whatever_the_reference_writes_is_read_as_it_reads_it(messages: list[Any]) -> None:
    tokens = [token for message in messages for token in reference.encoding().render(message)]
    answer = tokens[len(reference.encoding().encode("<|start|>assistant", allowed_special="all")) :]
    assert replay(AS_TOKENS, parts(answer)) == expected(reference.parsed(answer, "assistant"))


HEADERS: Final = [
    "<|channel|>analysis",
    "<|channel|>final",
    "<|channel|>commentary",
    "",
    "<|channel|>commentary to=functions.get_weather <|constrain|>json",
    "<|channel|>commentary to=functions.get_weather<|constrain|>json",
    "<|channel|>commentary to=functions.get_weather json",
    "<|channel|>commentary to=functions.get_weather",
    "<|channel|>analysis to=functions.get_weather code",
    " to=functions.get_weather<|channel|>commentary <|constrain|>json",
    " to=functions.get_weather<|channel|>commentary json",
    " to=functions.get_weather<|channel|>analysis",
]


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("end", ["<|end|>", "<|call|>", "<|return|>", ""])
def test_headers_mean_the_same_in_every_form(header: str, end: str) -> None:
    text = f'{header}<|message|>{{"text": "Bonn"}}{end}'
    tokens = reference.encoding().encode(text, allowed_special="all")
    found = replay(AS_TOKENS, parts(tokens))
    assert found == expected(reference.parsed(tokens, "assistant"))
    assert found != Result("", "", [])


def test_the_vocabulary_has_the_markers_where_the_format_says() -> None:
    encoded = {text: reference.encoding().encode(text, allowed_special="all") for text in IDS}
    assert encoded == {text: [token] for text, token in IDS.items()}
    assert {IDS["<|return|>"], IDS["<|call|>"]} == {*reference.encoding().stop_tokens_for_assistant_actions()}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedTokenizer:
    directory: Path = tmp_path_factory.mktemp("harmony")
    return load(write_directory(directory, byte_level(tuple(IDS), added=()), chat_template=HARMONY))


def call(name: str, arguments: dict[str, Any], call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


ASK: Final = ChatMessage("user", "Hello")
LOOP: Final = (
    ASK,
    ChatMessage("assistant", None, reasoning="Hm.", tool_calls=[call("weather", {"city": "Köln"}, "1")]),
    ChatMessage("tool", '{"sun": "ja"}', tool_call_id="1"),
)
PARALLEL: Final = (
    ASK,
    ChatMessage("assistant", "", reasoning="Hm.", tool_calls=[call("weather", {}, "1"), call("now", {"a": [1]}, "2")]),
    ChatMessage("tool", "noon", tool_call_id="2"),
    ChatMessage("tool", "sunny", tool_call_id="1"),
)
ANSWER: Final = ChatMessage("assistant", "Sunny.", reasoning="So.")


@pytest.mark.parametrize(
    "messages", [(ASK,), LOOP, PARALLEL, (*LOOP, ANSWER, ASK), (*LOOP, ANSWER, *LOOP), (*PARALLEL, ANSWER, ASK)]
)
def test_a_prompt_has_the_messages_of_the_reference(loaded: LoadedTokenizer, messages: tuple[ChatMessage, ...]) -> None:
    (encoded,) = loaded.encoder.encode([generate_of(id=b"a" * 16, messages=messages)])
    text = b"".join(loaded.token_bytes.name(token) for token in encoded).decode()  # type: ignore[union-attr]
    tokens = reference.encoding().encode(text, allowed_special="all")
    head = reference.encoding().encode("<|start|>assistant", allowed_special="all")
    wanted = reference.prompt(as_reference(messages))
    assert tokens[-len(head) :] == wanted[-len(head) :] == head
    assert as_plain(reference.parsed(tokens[: -len(head)])[1:]) == as_plain(reference.parsed(wanted[: -len(head)]))


def as_reference(messages: tuple[ChatMessage, ...]) -> list[Any]:
    """Return the messages of the conversation as a program writes them that knows nothing of templates. The reference
    leaves reasoning before the last answer out only where nothing follows but messages of users; templates, always."""
    found: list[Any] = []
    results = {message.tool_call_id: message.content for message in messages if message.role == "tool"}
    answers = [at for at, message in enumerate(messages) if message.role == "assistant" and not message.tool_calls]
    for at, message in enumerate(messages):
        if message.role == "user":
            found.append(reference.message(message.content or "", role="user"))
        if message.reasoning and at > max(answers, default=-1):
            found.append(reference.message(message.reasoning, "analysis"))
        for made in message.tool_calls or ():
            name = f"functions.{made['function']['name']}"
            found.append(reference.message(json.dumps(made["function"]["arguments"]), "commentary", name))
            result = reference.message(results[made["id"]] or "", "commentary", "assistant", role="tool", name=name)
            found.append(result)
        if message.role == "assistant" and message.content:
            found.append(reference.message(message.content, "final"))
    return found


def as_plain(messages: list[Any]) -> list[tuple[Any, ...]]:
    """Return what matters of messages: the template writes results as JSON strings."""

    def content(message: Any) -> Any:
        text = reference.text_of(message)
        is_written = message.recipient == "assistant" and text.startswith('"')
        return json.loads(text) if is_written or (message.recipient or "").startswith("functions.") else text

    return [
        (message.author.role, message.author.name, message.channel, message.recipient, content(message))
        for message in messages
    ]
