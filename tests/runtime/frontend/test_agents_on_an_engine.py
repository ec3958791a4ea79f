"""Constraints, reasoning and tool calls of a complete server with a tiny model, through the official clients, streamed
and not. The weights are random: nothing but the server makes the answers valid."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from minisgl.toy.tiny import write_tiny_checkpoint
from support.frontend.chat_templates import AGENT
from support.frontend.served import ONE_START, Served

USER: Any = [{"role": "user", "content": "Hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Bonn"]}, "days": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "x" ("y" | "z"){1,9} "."'
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "done"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
EACH_FORM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("agents")
    model = write_tiny_checkpoint(folder / "model", "qwen3", config_extra={"vocab_size": 640})
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text) for text in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(AGENT)
    served = Served(model, folder, *ONE_START, "--audit")
    served.wait_until_ready()
    yield served.url
    served.popen.terminate()
    served.popen.wait(60)


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def claude(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)


def is_valid(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def chat(client: openai.OpenAI, stream: bool, **fields: Any) -> list[Any]:
    """Return the message of each choice, as the client's helper joins them, if all have ended by themselves."""
    fields = {"model": "default", "messages": USER, "seed": 5, "max_tokens": 300, "n": 2} | fields
    if stream:
        with client.chat.completions.stream(**fields) as events:
            choices: Any = events.get_final_completion().choices
    else:
        choices = client.chat.completions.create(**fields).choices
    assert [choice.finish_reason for choice in choices] in (["stop"] * 2, ["tool_calls"] * 2)
    return [choice.message for choice in choices]


CONSTRAINTS: dict[str, tuple[dict[str, Any], Any]] = {
    "structured_outputs.json": ({"structured_outputs": {"json": SCHEMA}}, is_valid),
    "structured_outputs.regex": ({"structured_outputs": {"regex": "[ab]{3,9}c"}}, "[ab]{3,9}c"),
    "structured_outputs.choice": ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
    "structured_outputs.grammar": ({"structured_outputs": {"grammar": GRAMMAR}}, r"x[yz]{1,9}\."),
    "structured_outputs.structural_tag": ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "done"),
    "guided_json": ({"guided_json": SCHEMA}, is_valid),
    "guided_regex": ({"guided_regex": "[0-9]{2}"}, "[0-9]{2}"),
    "guided_choice": ({"guided_choice": ["red", "green"]}, "red|green"),
    "guided_grammar": ({"guided_grammar": GRAMMAR}, r"x[yz]{1,9}\."),
    "json_schema": ({"json_schema": SCHEMA}, is_valid),
    "regex": ({"regex": "[0-9]{2}"}, "[0-9]{2}"),
    "ebnf": ({"ebnf": GRAMMAR}, r"x[yz]{1,9}\."),
    "structural_tag": ({"structural_tag": json.dumps(TAG)}, "done"),
    "response_format": ({"response_format": FORMAT}, is_valid),
}


def holds(expected: Any, text: str) -> bool:
    return bool(re.fullmatch(expected, text)) if isinstance(expected, str) else bool(expected(text))


@EACH_FORM
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_every_constraint_holds_in_chats_and_completions(client: openai.OpenAI, name: str, stream: bool) -> None:
    fields, expected = CONSTRAINTS[name]
    sampling = {"top_k": 50, "min_p": 0.001, "repetition_penalty": 1.1, **fields}
    options: dict[str, Any] = {"top_p": 0.95, "presence_penalty": 0.5, "stop": ["never"], "extra_body": sampling}
    thinking = {"reasoning_effort": "none"}
    for message in chat(client, stream, **options, **thinking, logprobs=True):
        assert holds(expected, message.content)
    made: Any = client.completions.create(
        model="default", prompt="Hello", seed=5, max_tokens=300, logprobs=1, n=2, stream=stream, **options
    )
    texts = ["", ""]
    for choice in [choice for chunk in made for choice in chunk.choices] if stream else made.choices:
        texts[choice.index] += choice.text
    assert all(holds(expected, text) for text in texts)


@EACH_FORM
@pytest.mark.parametrize("budget", [0, 5])
def test_reasoning_ends_at_its_budget_and_the_schema_begins_behind_it(
    client: openai.OpenAI, stream: bool, budget: int
) -> None:
    # The first token of the answer is the marker, which random weights would hardly choose.
    begin = {"logit_bias": {str(_token(client, "<think>")): 100}, "min_tokens": 2} if budget else {}
    body = {"thinking_token_budget": budget, "enable_thinking": True, **begin}
    for message in chat(client, stream, response_format=FORMAT, extra_body=body):
        assert is_valid(message.content)
        reasoning = [getattr(message, name, None) for name in ("reasoning", "reasoning_content")]
        assert reasoning[0] == reasoning[1] and bool(reasoning[0]) == bool(budget)


def _token(client: openai.OpenAI, text: str) -> int:
    answer: Any = client.post("../tokenize", body={"prompt": text, "add_special_tokens": False}, cast_to=object)
    (token,) = answer["tokens"]
    return int(token)


def tool(name: str, **fields: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **fields}}


TOOLS = [tool("book"), tool("cancel", strict=True)]


@EACH_FORM
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"book", "cancel"}), ({"type": "function", "function": {"name": "cancel"}}, {"cancel"})],
)
def test_calls_that_must_come_are_valid(client: openai.OpenAI, stream: bool, choice: Any, names: set[str]) -> None:
    """Also with a format for texts: the answer has no text that it could apply to."""
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "reasoning_effort": "none"}
    for extra in ({}, {"response_format": FORMAT}):
        for message in chat(client, stream, parallel_tool_calls=False, **options, **extra):
            (call,) = message.tool_calls
            assert call.function.name in names and is_valid(call.function.arguments)
            assert not message.content


@EACH_FORM
def test_responses_have_valid_texts_and_calls(client: openai.OpenAI, stream: bool) -> None:
    request: dict[str, Any] = {"model": "default", "input": "Hello", "reasoning": {"effort": "none"}}

    def ask(**fields: Any) -> Any:
        if not stream:
            return client.responses.create(**request, **fields)
        with client.responses.stream(**request, **fields) as events:
            return events.get_final_response()

    text_format = {"type": "json_schema", "name": "trip", "schema": SCHEMA}
    assert is_valid(ask(text={"format": text_format}, max_output_tokens=300).output_text)
    tools = [{"name": "book", "type": "function", "parameters": SCHEMA, "strict": True}]
    (call,) = ask(tools=tools, tool_choice="required", parallel_tool_calls=False, max_output_tokens=300).output
    assert call.name == "book" and is_valid(call.arguments)


@EACH_FORM
def test_messages_have_valid_texts_and_calls(claude: anthropic.Anthropic, stream: bool) -> None:
    request: dict[str, Any] = {"model": "default", "messages": USER, "max_tokens": 300}

    def ask(**fields: Any) -> Any:
        if not stream:
            return claude.messages.create(**request, **fields)
        with claude.messages.stream(**request, **fields) as events:
            return events.get_final_message()

    (text,) = ask(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}).content
    assert is_valid(text.text)
    tools = [{"name": "book", "input_schema": SCHEMA}, {"name": "cancel", "input_schema": SCHEMA, "strict": True}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "cancel"}):
        message = ask(tools=tools, tool_choice={**choice, "disable_parallel_tool_use": True})
        (use,) = message.content
        assert use.type == "tool_use" and is_valid(json.dumps(use.input))
        assert message.stop_reason == "tool_use"
