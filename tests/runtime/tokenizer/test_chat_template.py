from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from minisgl.errors import PromptError
from minisgl.tokenizer.chat_template import ChatTemplate
from minisgl.tokenizer.model_files import load_model_files
from minisgl.tokenizer.prompt_encoder import PromptEncoder
from minisgl.wire.messages import SamplingParams
from minisgl.wire.text import ChatMessage
from support.frontend.chat_templates import CHATML, FAMILIES, LLAMA3, MISTRAL, QWEN3, TEXT_ARGUMENTS, TOOL_FAMILIES
from support.messages import generate_of
from support.tiny_tokenizers import byte_level, write_directory

SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|eot_id|>"}

CONVERSATIONS = {
    "one turn": [ChatMessage("user", "Hello")],
    "system and history": [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "  1 < 2 & 'so' \"on\"  "),
        ChatMessage("assistant", "<think>\nhm\n</think>\n\nYes – ja. \n"),
        ChatMessage("user", "日本語 🙂\n"),
    ],
}


@pytest.fixture(scope="module")
def reference() -> Any:
    """Return the template as transformers renders it."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), **SPECIAL)

    def render(template: str, messages: list[ChatMessage], **variables: Any) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        text = tokenizer.apply_chat_template(
            turns, chat_template=template, tokenize=False, add_generation_prompt=True, **variables
        )
        assert isinstance(text, str)
        return text

    return render


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_renders_what_transformers_renders(reference: Any, family: str, conversation: str) -> None:
    template, messages = FAMILIES[family], CONVERSATIONS[conversation]
    assert ChatTemplate(template, SPECIAL).render(messages) == reference(template, messages)


@pytest.mark.parametrize("family", ["chatml", "llama3", "qwen3"])
def test_encodes_what_transformers_encodes(tmp_path: Path, family: str) -> None:
    from transformers import PreTrainedTokenizerFast

    markers = ("<|begin|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|im_start|>", "<|im_end|>")
    tokenizer = byte_level(markers)
    template = FAMILIES[family]
    messages = CONVERSATIONS["system and history"]
    turns = [{"role": message.role, "content": message.content} for message in messages]
    expected = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).apply_chat_template(
        turns, chat_template=template, add_generation_prompt=True, return_dict=False
    )
    files = load_model_files(write_directory(tmp_path, tokenizer, chat_template=template, config=SPECIAL))
    request = generate_of(id=b"i" * 16, messages=tuple(messages), params=SamplingParams())
    (prompt,) = PromptEncoder(files).encode([request])
    assert not isinstance(prompt, PromptError)
    assert prompt.tolist() == expected


@pytest.mark.parametrize("thinking", [True, False])
def test_template_variables(reference: Any, thinking: bool) -> None:
    messages = CONVERSATIONS["system and history"]
    rendered = ChatTemplate(QWEN3, SPECIAL).render(messages, {"enable_thinking": thinking})
    assert rendered == reference(QWEN3, messages, enable_thinking=thinking)
    assert rendered.endswith("<think>\n\n</think>\n\n") == (not thinking)
    assert "hm" not in rendered


def test_the_current_date_is_available() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}", {})
    assert int(template.render([])) in range(datetime.now().year - 1, datetime.now().year + 1)


def test_developer_is_system_where_the_template_has_no_developer() -> None:
    messages = [ChatMessage("developer", "Be brief."), ChatMessage("user", "Hi")]
    assert "<|im_start|>system\nBe brief." in ChatTemplate(CHATML, {}).render(messages)
    knows = "{{ messages[0].role }}{# developer #}"
    assert ChatTemplate(knows, {}).render(messages) == "developer"


def test_a_missing_special_token_renders_as_nothing() -> None:
    rendered = ChatTemplate(LLAMA3, {}).render
    with pytest.raises(PromptError):
        rendered([ChatMessage("user", "Hi")])  # undefined + text is an error in jinja, as in transformers
    assert ChatTemplate("{{ bos_token }}x", {}).render([]) == "x"


def fails(source: str) -> PromptError:
    with pytest.raises(PromptError) as raised:
        ChatTemplate(source, SPECIAL).render([ChatMessage("user", "Hi"), ChatMessage("user", "again")])
    assert raised.value.code == "chat_template_error"
    return raised.value


def test_the_error_of_a_template_reaches_the_client() -> None:
    assert "Roles must alternate" in fails(MISTRAL).message


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ nothing.of.this }}",
        "{% if %}",
        "{{ messages | unknown_filter }}",
        "{{ raise_exception('a' * 100000) }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_bad_template_fails_the_request_alone(source: str) -> None:
    assert len(fails(source).message) < 500


def test_the_output_is_limited() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}"
    assert "characters" in fails(endless).message


@pytest.mark.parametrize("written", ['{"city": "Os', "{bad", "null", "[1]", '"s"', "Ünï"])
@pytest.mark.parametrize("items", ["call.function.arguments | items", "call.function.arguments.items()"])
def test_a_conversation_goes_on_behind_a_call_without_an_object(written: str, items: str) -> None:
    """Its template reads the fields of arguments."""
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for call in m.tool_calls or [] %}"
        f"<{{% for key, value in {items} %}}{{{{ key }}}}={{{{ value }}}}{{% endfor %}}>"
        "{% endfor %};{% endfor %}",
        {},
    )

    def chat(arguments: Any) -> list[ChatMessage]:
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        return [ChatMessage("assistant", "", tool_calls=[call]), ChatMessage("tool", "2", tool_call_id="1")]

    assert template.render(chat({"a": 1})) == "assistant:<a=1>;tool:2;"
    assert template.render(chat(written)) == f"assistant:<arguments={written}>;tool:2;"


@pytest.mark.parametrize("source", [TOOL_FAMILIES["agent"], TOOL_FAMILIES["llama"], TEXT_ARGUMENTS])
def test_templates_that_take_texts_get_broken_arguments_as_they_are(source: str) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": "{bad"}}
    messages = [ChatMessage("user", "Hi"), ChatMessage("assistant", "", tool_calls=[call])]
    rendered = ChatTemplate(source, SPECIAL).render(messages)
    assert "{bad" in rendered and '"arguments": {"arguments"' not in rendered


def test_tool_calls_and_variables_of_the_request() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_call_id }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
        ";{% endfor %}{{ mood }}{{ 'go' if add_generation_prompt }}",
        {},
    )
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [ChatMessage("assistant", "", tool_calls=[call]), ChatMessage("tool", "2", tool_call_id="1")]
    assert template.render(messages, {"mood": "calm"}) == 'assistant:add{"a": 1};tool:21;calmgo'
    assert template.render(messages, {"messages": []}, add_generation_prompt=False).endswith("tool:21;")
