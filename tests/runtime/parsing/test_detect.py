"""Formats are found from the chat template, else from the vocabulary; a name overrides both."""

from __future__ import annotations

from typing import Final

import pytest

from minisgl.flags.arguments import Parser, add_options, filled
from minisgl.parsing.detect import find_formats
from minisgl.parsing.names import Parsers

# The parts of templates by which families differ, written for these tests.
QWEN25: Final = """{% if tools %}# Tools in <tools></tools>. For each call, write {"name": NAME, "arguments": ARGUMENTS}
in <tool_call></tool_call>.{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}{% endfor %}"""
QWEN3: Final = (
    QWEN25
    + """{% if '</think>' in content %}{{ content.split('</think>')[-1] }}{% endif %}
{% if enable_thinking is false %}<think></think>{% endif %}"""
)
CODER: Final = """{% for tool in tools %}{{ tool }}{% endfor %}Write <tool_call><function=NAME><parameter=KEY>VALUE
</parameter></function></tool_call>"""
LLAMA31: Final = """{% if tools is not none %}Environment: ipython{% endif %}
Respond as {"name": function name, "parameters": dictionary}{% for t in tools %}{{ t | tojson }}{% endfor %}"""
LLAMA32_LIST: Final = (
    "{% for t in tools %}{{ t }}{% endfor %}Use [func_name1(params_name1=params_value1), func_name2()]"
)
MISTRAL: Final = "[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS]{{ '[TOOL_CALLS]' + calls }}"
MAGISTRAL: Final = MISTRAL + "{{ '[THINK]' + reasoning + '[/THINK]' }}"
R1: Final = "{% if '</think>' in content %}{% endif %}{{ '<think>\\n' }}"
GLM: Final = "{% for t in tools %}{% endfor %}<tool_call>NAME<arg_key>KEY</arg_key></tool_call> </think>"
GPT_OSS: Final = (
    """{%- if tools %}{% endif %}{{ "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking }}"""
)
PLAIN: Final = "{% for message in messages %}{{ message.content }}{% endfor %}"
OWN: Final = "{{ tools | tojson }}{% for message in messages %}{{ message.content }}{% endfor %}"

QWEN_TOKENS: Final = {"<tool_call>": 151657, "</tool_call>": 151658}
THINK_TOKENS: Final = {"<think>": 151667, "</think>": 151668}
LLAMA_TOKENS: Final = {"<|python_tag|>": 128010, "<|eom_id|>": 128008}
MISTRAL_TOKENS: Final = {"[TOOL_CALLS]": 9, "[ARGS]": 32, "[CALL_ID]": 33}
HARMONY_TOKENS: Final = {"<|channel|>": 200005, "<|start|>": 200006, "<|end|>": 200007, "<|message|>": 200008}
MISTRAL_THINK: Final = {"[THINK]": 34, "[/THINK]": 35}


@pytest.mark.parametrize(
    ("template", "tokens", "tools", "reasoning"),
    [
        (QWEN25, QWEN_TOKENS, "hermes", None),
        (QWEN3, QWEN_TOKENS | THINK_TOKENS, "hermes", "qwen3"),
        (CODER, QWEN_TOKENS, "qwen3_coder", None),
        (CODER, QWEN_TOKENS | THINK_TOKENS, "qwen3_coder", "qwen3"),
        (LLAMA31, LLAMA_TOKENS, "llama3_json", None),
        (LLAMA32_LIST, LLAMA_TOKENS, "pythonic", None),
        (MISTRAL, {"[TOOL_CALLS]": 5}, "mistral", None),
        (MAGISTRAL, MISTRAL_TOKENS | MISTRAL_THINK, "mistral", "mistral"),
        (R1, {}, None, "qwen3"),
        (GLM, QWEN_TOKENS, "glm45", "qwen3"),
        (GPT_OSS, HARMONY_TOKENS, "harmony", "harmony"),
        (GPT_OSS, {}, "harmony", "harmony"),
        (PLAIN, QWEN_TOKENS, None, None),
        (OWN, QWEN_TOKENS, "hermes", None),
        (OWN, LLAMA_TOKENS, "llama3_json", None),
        (OWN, MISTRAL_TOKENS | MISTRAL_THINK, "mistral", "mistral"),
        (OWN, {}, None, None),
        (None, THINK_TOKENS, None, "qwen3"),
    ],
)
def test_formats_of_known_families(
    template: str | None, tokens: dict[str, int], tools: str | None, reasoning: str | None
) -> None:
    found = find_formats(Parsers(), template, tokens)
    assert (found.tools.name if found.tools else None) == tools
    assert (found.reasoning.name if found.reasoning else None) == reasoning
    assert {marker.text: token for token, marker in found.by_token.items()}.items() <= tokens.items()


def test_markers_are_tokens_where_the_vocabulary_has_them() -> None:
    found = find_formats(Parsers(), QWEN3, QWEN_TOKENS | THINK_TOKENS)
    assert found.by_token.keys() == {*QWEN_TOKENS.values(), *THINK_TOKENS.values()}
    assert found.reasoning_tokens == (151667, 151668)
    found = find_formats(Parsers(), QWEN3, {"<think>": 7})
    assert found.markers["<tool_call>"].token is None
    assert found.reasoning_tokens is None


@pytest.mark.parametrize(
    ("name", "format"),
    [
        *(("hermes", "hermes"), ("qwen", "hermes"), ("qwen25", "hermes"), ("qwen3_xml", "qwen3_coder")),
        *(("qwen3_coder", "qwen3_coder"), ("llama3_json", "llama3_json"), ("llama4_pythonic", "pythonic")),
        *(("pythonic", "pythonic"), ("mistral", "mistral"), ("none", None)),
        *(("gpt-oss", "harmony"), ("openai", "harmony")),
    ],
)
def test_names_override_what_is_found(name: str, format: str | None) -> None:
    found = find_formats(flags("--tool-call-parser", name, "--reasoning-parser", "none"), QWEN3, QWEN_TOKENS)
    assert (found.tools.name if found.tools else None) == format
    assert found.reasoning is None


@pytest.mark.parametrize(
    ("name", "format"),
    [("deepseek_r1", "deepseek_r1"), ("deepseek-r1", "deepseek_r1"), ("glm45", "qwen3"), ("openai_gptoss", "harmony")],
)
def test_names_of_reasoning_parsers(name: str, format: str) -> None:
    found = find_formats(flags("--reasoning-parser", name), None, {})
    assert found.reasoning is not None
    assert found.reasoning.name == format


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_unknown_names_are_refused_with_all_known_ones(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        flags(flag, "unknown")
    error = capsys.readouterr().err
    assert "mistral" in error
    assert "unknown" in error


def flags(*arguments: str) -> Parsers:
    parser = Parser()
    add_options(parser, Parsers())
    return filled(parser.parse_args(arguments), Parsers())
