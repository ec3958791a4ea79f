from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from minisgl.errors import PromptError
from minisgl.parsing.detect import find_formats
from minisgl.parsing.names import Parsers
from minisgl.tokenizer.file_hashes import hash_tokenizer_files
from minisgl.tokenizer.model_files import load_model_files
from minisgl.tokenizer.prompt_encoder import PromptEncoder
from minisgl.wire.messages import SamplingParams
from minisgl.wire.text import ChatMessage, Generate, ToolOptions
from support.frontend.chat_templates import AGENT, LLAMA3, MISTRAL
from support.messages import generate_of
from support.tiny_tokenizers import CHATML, byte_fallback, byte_level, write_directory

LLAMA3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_end|>")
HELLO = (ChatMessage("user", "Hello"),)


def llama3() -> Tokenizer:
    tokenizer = byte_level(LLAMA3_TOKENS)
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    return tokenizer


def encoder(path: Path, tokenizer: Tokenizer, template: str | None = CHATML, **config: Any) -> PromptEncoder:
    return PromptEncoder(load_model_files(write_directory(path, tokenizer, chat_template=template, config=config)))


def test_calls_and_results_become_texts_of_a_template_that_knows_only_two_roles(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    files = load_model_files(write_directory(tmp_path, byte_fallback(), chat_template=MISTRAL, config=config))
    described = PromptEncoder(files, find_formats(Parsers(tool_calls="llama3_json"), MISTRAL, {}))
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    broken = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{bad"}}
    messages = (
        *HELLO,
        ChatMessage("assistant", None, tool_calls=[call, broken]),
        ChatMessage("tool", "cold", tool_call_id="c1"),
        ChatMessage("tool", "warm", tool_call_id="c2"),
        ChatMessage("user", "So?"),
    )
    text = byte_fallback().decode(ids(described, messages=messages), skip_special_tokens=False)
    assert text.startswith("<s> [INST] Hello [/INST]")
    assert '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": "{bad"}</s>' in text
    assert text.endswith("[INST] Result of f:\ncold\n\nResult of g:\nwarm\n\nSo? [/INST]")
    assert error(encoder(tmp_path, byte_fallback(), MISTRAL), messages=messages).param == "messages[1].tool_calls"


def request(**prompt: Any) -> Generate:
    return generate_of(id=b"i" * 16, params=SamplingParams(), **prompt)


def ids(encoder: PromptEncoder, **prompt: Any) -> list[int]:
    (result,) = encoder.encode([request(**prompt)])
    assert not isinstance(result, PromptError), result.message
    return result.tolist()


def error(encoder: PromptEncoder, **prompt: Any) -> PromptError:
    (result,) = encoder.encode([request(**prompt)])
    assert isinstance(result, PromptError)
    return result


@pytest.mark.parametrize("template", [LLAMA3, LLAMA3.replace("bos_token + text", "text")], ids=["template", "default"])
def test_exactly_one_bos_in_a_chat(tmp_path: Path, template: str) -> None:
    bos = llama3().token_to_id("<|begin_of_text|>")
    chat = ids(encoder(tmp_path, llama3(), template, bos_token="<|begin_of_text|>"), messages=HELLO)
    assert chat.count(bos) == 1
    assert chat[0] == bos


def test_exactly_one_bos_in_a_sentencepiece_chat(tmp_path: Path) -> None:
    chat = ids(encoder(tmp_path, byte_fallback(), MISTRAL, bos_token="<s>", eos_token="</s>"), messages=HELLO)
    assert chat.count(1) == 1
    assert chat[0] == 1


def test_exactly_one_bos_in_a_completion(tmp_path: Path) -> None:
    tokenizer = llama3()
    hello = tokenizer.encode("Hello", add_special_tokens=False).ids
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    made = encoder(tmp_path, tokenizer, bos_token="<|begin_of_text|>")
    assert ids(made, prompt="Hello") == [bos, *hello] == ids(made, prompt="<|begin_of_text|>Hello")


def test_no_bos_where_the_tokenizer_adds_none(tmp_path: Path) -> None:
    tokenizer = byte_level()
    made = encoder(tmp_path, tokenizer, bos_token="<|endoftext|>")
    assert ids(made, prompt="Hello") == tokenizer.encode("Hello").ids


@pytest.mark.parametrize("add", [True, False])
def test_an_explicit_setting_overrides_the_tokenizer(tmp_path: Path, add: bool) -> None:
    tokenizer = byte_level() if add else llama3()
    bos = "<|endoftext|>" if add else "<|begin_of_text|>"
    hello = tokenizer.encode("Hello", add_special_tokens=False).ids
    made = encoder(tmp_path, tokenizer, bos_token=bos, add_bos_token=add)
    assert ids(made, prompt="Hello") == ([tokenizer.token_to_id(bos)] if add else []) + hello


def test_completion_prompts_are_encoded_as_written(tmp_path: Path) -> None:
    tokenizer = byte_level()
    text = "<|im_start|>user\nHello<|im_end|>"
    assert ids(encoder(tmp_path, tokenizer), prompt=text) == tokenizer.encode(text).ids


def test_token_ids_pass_unchanged(tmp_path: Path) -> None:
    assert ids(encoder(tmp_path, llama3()), tokens=array("i", [5, 6, 7]).tobytes()) == [5, 6, 7]


def test_an_empty_prompt_is_the_bos_or_an_error(tmp_path: Path) -> None:
    tokenizer = byte_level()
    bos = tokenizer.token_to_id("<|endoftext|>")
    assert ids(encoder(tmp_path / "a", tokenizer, bos_token="<|endoftext|>"), prompt="") == [bos]
    assert error(encoder(tmp_path / "b", tokenizer), prompt="").code == "empty_prompt"
    assert error(encoder(tmp_path / "c", tokenizer), tokens=b"").code == "empty_prompt"


def test_a_model_without_a_chat_template_refuses_chats(tmp_path: Path) -> None:
    failed = error(encoder(tmp_path, byte_level(), None), messages=HELLO)
    assert failed.code == "no_chat_template"
    assert "/v1/completions" in failed.message


def test_a_bad_request_does_not_fail_its_batch(tmp_path: Path) -> None:
    template = "{% if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    made = encoder(tmp_path, byte_level(), template)
    good = request(messages=HELLO)
    results = made.encode(
        [
            good,
            request(messages=(ChatMessage("user", "bad"),)),
            request(messages=(ChatMessage("user", "<|im_end|>"),)),
            request(prompt="lone \ud800 surrogate"),
            request(tokens=b"123"),
            request(prompt=""),
            good,
        ]
    )
    codes = [result.code if isinstance(result, PromptError) else None for result in results]
    expected = [None, "chat_template_error", None, "invalid_prompt", "invalid_prompt", "empty_prompt", None]
    assert codes == expected
    assert results[0] == results[-1] == made.encode([good])[0]


def test_chat_with_template_variables(tmp_path: Path) -> None:
    tokenizer = byte_level()
    made = encoder(tmp_path, tokenizer, "{{ mode }}{{ messages[0].content }}")
    assert ids(made, messages=HELLO, template_variables={"mode": "x"}) == tokenizer.encode("xHello").ids


def test_the_choices_of_a_request_are_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = encoder(tmp_path, byte_level())
    rendered, texts = [], []
    assert made._template is not None
    render, encode_texts = made._template.render, made._encode_texts
    monkeypatch.setattr(made._template, "render", lambda *args, **more: rendered.append(args) or render(*args, **more))
    monkeypatch.setattr(made, "_encode_texts", lambda them: texts.extend(them) or encode_texts(them))
    forged = (ChatMessage("user", "<|im_end|>"),)
    asked = [request(prompt="Hi")] * 3 + [request(messages=forged)] * 3 + [request(prompt="Hi"), request(prompt="")] * 2
    results = made.encode(asked)
    assert texts == ["Hi", "Hi", "", "Hi", ""]
    assert len(rendered) == 1
    singly = [made.encode([one])[0] for one in asked]
    assert list(map(str, results)) == list(map(str, singly))


def test_prompts_that_a_template_renders_differently_are_encoded_separately(tmp_path: Path) -> None:
    made = encoder(tmp_path, byte_level(), "{{ mode }}{{ messages[0].content }}")
    one, true = (request(messages=HELLO, template_variables={"mode": mode}) for mode in (1, True))
    assert made.encode([one, true]) == [made.encode([one])[0], made.encode([true])[0]]


def test_everything_that_a_template_gets_tells_prompts_apart(tmp_path: Path) -> None:
    made = encoder(tmp_path, byte_level(), AGENT)
    tool = {"type": "function", "function": {"name": "f"}}
    asked = [
        request(messages=HELLO, **change)
        for change in (
            {},
            {"tools": ToolOptions(definitions=(tool,))},
            {"documents": [{"title": "a", "text": "b"}]},
            {"thinking": False},
            {"add_generation_prompt": False},
            {"add_generation_prompt": False, "continue_final_message": True},
            {"template_variables": {"note": ["a"]}},
        )
    ]
    results = made.encode(asked)
    assert results == [made.encode([one])[0] for one in asked]
    assert len({str(result) for result in results}) == len(asked)


def test_special_tokens_can_be_left_out(tmp_path: Path) -> None:
    tokenizer = llama3()
    made = encoder(tmp_path, tokenizer, bos_token="<|begin_of_text|>")
    bare = tokenizer.encode("Hello", add_special_tokens=False).ids
    with_bos, without = made.encode([request(prompt="Hello"), request(prompt="Hello", add_special_tokens=False)])
    assert with_bos == array("i", [tokenizer.token_to_id("<|begin_of_text|>"), *bare])
    assert without == array("i", bare)


@pytest.mark.parametrize("named", [True, False])
def test_a_template_of_its_own_for_tools(tmp_path: Path, named: bool) -> None:
    """As Hermes 2 Pro and Command R have it; transformers chooses by the same rule."""
    templates = [
        {"name": "default", "template": "plain {{ messages[0].content }}"},
        {"name": "tool_use", "template": "{{ tools[0].function.name }} {{ messages[0].content }}"},
    ]
    made = encoder(tmp_path, byte_level(), None, chat_template=templates[: 1 + named])
    tools = ToolOptions(definitions=({"type": "function", "function": {"name": "f"}},))
    assert ids(made, messages=HELLO) == byte_level().encode("plain Hello").ids
    if named:
        assert ids(made, messages=HELLO, tools=tools) == byte_level().encode("f Hello").ids
    else:
        assert ids(made, messages=HELLO, tools=tools) == ids(made, messages=HELLO)
        required = ToolOptions(definitions=tools.definitions, choice="required")
        assert error(made, messages=HELLO, tools=required).param == "tools"


def test_a_template_for_tools_in_a_file_of_its_own(tmp_path: Path) -> None:
    """As transformers writes several templates; others than that for tools have no effect."""
    made = tmp_path / "model"
    write_directory(made, byte_level(), chat_template="plain {{ messages[0].content }}")
    (made / "additional_chat_templates").mkdir()
    before = hash_tokenizer_files(made)
    (made / "additional_chat_templates" / "rag.jinja").write_text("rag")
    assert hash_tokenizer_files(made) == before
    (made / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].function.name }}")
    files = load_model_files(made)
    assert files.hashes != before, "frontends in other pods need it too"
    tools = ToolOptions(definitions=({"type": "function", "function": {"name": "f"}},))
    assert ids(PromptEncoder(files), messages=HELLO) == byte_level().encode("plain Hello").ids
    assert ids(PromptEncoder(files), messages=HELLO, tools=tools) == byte_level().encode("f").ids
    (made / "chat_template.jinja").unlink()
    (made / "tokenizer_config.json").write_text('{"chat_template": "old {{ messages[0].content }}"}')
    encoder = PromptEncoder(load_model_files(made))
    assert ids(encoder, messages=HELLO) == byte_level().encode("old Hello").ids
    assert ids(encoder, messages=HELLO, tools=tools) == byte_level().encode("f").ids
