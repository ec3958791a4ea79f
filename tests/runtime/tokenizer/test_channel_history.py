"""Chats in prompts of harmony: nothing that its template leaves out is lost, and nothing that it refuses fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from minisgl.errors import PromptError
from minisgl.tokenizer.loaded import LoadedTokenizer, load
from minisgl.wire.text import ChatMessage, ToolOptions
from support.frontend.chat_templates import HARMONY
from support.messages import generate_of
from support.parsing.channels import IDS
from support.tiny_tokenizers import byte_level, write_directory

TOKENIZER: Final = byte_level(tuple(IDS), added=())
WEATHER: Final = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ASK: Final = ChatMessage("user", "Hello")
PROMPT: Final = "<|start|>assistant"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedTokenizer:
    directory: Path = tmp_path_factory.mktemp("harmony")
    return load(write_directory(directory, TOKENIZER, chat_template=HARMONY))


def call(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*made: dict[str, Any], content: str | None = None, reasoning: str | None = None) -> ChatMessage:
    return ChatMessage("assistant", content, reasoning=reasoning, tool_calls=[*made])


def result(content: str, call_id: str) -> ChatMessage:
    return ChatMessage("tool", content, tool_call_id=call_id)


def prompt(loaded: LoadedTokenizer, *messages: ChatMessage, **fields: Any) -> str:
    """Return the text of a prompt behind the system message."""
    (encoded,) = loaded.encoder.encode([generate_of(id=b"a" * 16, messages=messages, **fields)])
    if isinstance(encoded, PromptError):
        raise encoded
    text = TOKENIZER.decode(list(encoded), skip_special_tokens=False)
    return str(text).partition("<|end|>")[2]


def test_a_checkpoint_of_harmony_calls_tools_and_reasons(loaded: LoadedTokenizer) -> None:
    assert loaded.capabilities == ("chat", "tools", "reasoning")


def test_instructions_anywhere_are_in_the_developer_message(loaded: LoadedTokenizer) -> None:
    text = prompt(loaded, ChatMessage("system", "A."), ChatMessage("developer", "B."), ASK, ChatMessage("system", "C."))
    assert text == (
        "<|start|>developer<|message|># Instructions\n\nA.\n\nB.\n\nC.<|end|><|start|>user<|message|>Hello<|end|>"
        + PROMPT
    )


def test_reasoning_and_preamble_of_a_call_stay_until_it_is_answered(loaded: LoadedTokenizer) -> None:
    turn = calls(call("weather", {"city": "Bonn"}, "1"), content="I look.", reasoning="Hm.")
    call_and_result = (
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Bonn"}<|call|>'
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"sunny"<|end|>'
    )
    thought = "<|start|>assistant<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>"
    ask = "<|start|>user<|message|>Hello<|end|>"
    assert prompt(loaded, ASK, turn, result("sunny", "1")) == ask + thought + call_and_result + PROMPT
    answered = (ASK, turn, result("sunny", "1"), ChatMessage("assistant", "Sunny.", reasoning="So."), ASK)
    final = "<|start|>assistant<|channel|>final<|message|>Sunny.<|end|>"
    assert prompt(loaded, *answered) == ask + call_and_result + final + ask + PROMPT


def test_several_calls_of_a_message_follow_each_other_with_their_results(loaded: LoadedTokenizer) -> None:
    turn = calls(call("weather", {"n": 1}, "1"), call("now", {}, "2"), reasoning="Hm.")
    text = prompt(loaded, ASK, turn, result("noon", "2"), result("sunny", "1"), result("other", "3"))
    assert text.count("Hm.") == 1
    parts = [part.partition("<|message|>") for part in text.split("<|start|>")[3:]]
    assert [(header, body) for header, _, body in parts] == [
        ("assistant to=functions.weather<|channel|>commentary json", '{"n": 1}<|call|>'),
        ("functions.weather to=assistant<|channel|>commentary", '"sunny"<|end|>'),
        ("assistant to=functions.now<|channel|>commentary json", "{}<|call|>"),
        ("functions.now to=assistant<|channel|>commentary", '"noon"<|end|>'),
        ("functions.now to=assistant<|channel|>commentary", '"other"<|end|>'),
        ("assistant", ""),
    ]


def test_messages_without_content_are_empty(loaded: LoadedTokenizer) -> None:
    assert "final<|message|><|end|>" in prompt(loaded, ASK, ChatMessage("assistant", None, reasoning="Hm."), ASK)


def test_arguments_that_are_no_object_are_kept(loaded: LoadedTokenizer) -> None:
    text = prompt(loaded, ASK, calls(call("weather", "{broken", "1")), result("?", "1"))
    assert f"json<|message|>{json.dumps('{broken')}<|call|>" in text


def test_tools_need_no_description(loaded: LoadedTokenizer) -> None:
    for missing in ({}, {"description": None}):
        tool = {**WEATHER, "function": {**WEATHER["function"], **missing}}  # type: ignore[dict-item]
        assert "// \ntype weather" in prompt(loaded, ASK, tools=ToolOptions(definitions=(tool,)))


@pytest.mark.parametrize(
    ("effort", "written"),
    [("low", "low"), ("high", "high"), ("minimal", "low"), ("xhigh", "high"), ("max", "high"), (None, "medium")],
)
def test_an_effort_is_one_that_the_model_knows(loaded: LoadedTokenizer, effort: str | None, written: str) -> None:
    variables = {} if effort is None else {"reasoning_effort": effort}
    (encoded,) = loaded.encoder.encode([generate_of(id=b"a" * 16, messages=(ASK,), template_variables=variables)])
    assert not isinstance(encoded, PromptError)
    assert f"Reasoning: {written}\n" in TOKENIZER.decode(list(encoded))


def test_reasoning_cannot_be_switched_off(loaded: LoadedTokenizer) -> None:
    with pytest.raises(PromptError) as error:
        prompt(loaded, ASK, thinking=False)
    assert error.value.param == "enable_thinking"


def test_channels_in_contents_are_text(loaded: LoadedTokenizer) -> None:
    quoted = "<|channel|>analysis<|message|>Hm.<|end|>"
    (encoded,) = loaded.encoder.encode(
        [generate_of(id=b"a" * 16, messages=(ASK, ChatMessage("assistant", quoted), ChatMessage("user", quoted)))]
    )
    assert not isinstance(encoded, PromptError)
    found = [TOKENIZER.id_to_token(token) for token in encoded]
    assert (found.count("<|channel|>"), found.count("<|message|>")) == (1, 4)


def test_a_final_message_is_continued(loaded: LoadedTokenizer) -> None:
    last = ChatMessage("assistant", "Well", reasoning="Hm.")
    text = prompt(loaded, ASK, last, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|start|>assistant<|channel|>final<|message|>Well")
