"""Chat templates of the agent model, one for each format of tool calls. They differ in how they write calls and
results, and name their format in the system turn: the weights are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CONTROL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "[ARGS]")
MARKERS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens that remain in the text when control tokens are left out of it, as in Qwen's vocabularies."""

_TEMPLATE: Final = """\
{%- set first = namespace(system='') %}
{%- if messages[0].role in ['system', 'developer'] %}{% set first.system = messages[0].content %}{% endif %}
{%- if first.system or tools %}
    {{- '<|im_start|>system\\n' + first.system }}
    {%- if tools %}
        {{- ('\\n' if first.system else '') + 'Tools (FORMAT):\\n' }}
        {%- for tool in tools %}{{- '- ' + tool.function.name + '\\n' }}{% endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>RESULT\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- set name, arguments = call.function.name, call.function.arguments %}
            {{- '\\n' if not loop.first }}CALL
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif not loop.first or message.role == 'user' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

_HERMES: Final = """
            {{- '<tool_call>\\n{"name": "' + name + '", "arguments": ' + arguments | tojson + '}\\n</tool_call>' }}"""
_QWEN_XML: Final = """
            {{- '<tool_call>\\n<function=' + name + '>\\n' }}
            {%- for key, value in arguments.items() %}
                {{- '<parameter=' + key + '>\\n' }}
                {{- (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}"""
_LLAMA_JSON: Final = """
            {{- '{"name": "' + name + '", "parameters": ' + arguments | tojson + '}' }}"""
_MISTRAL: Final = """
            {{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments | tojson }}"""


def _template(name: str, call: str, result: str = "tool") -> str:
    return _TEMPLATE.replace("FORMAT", name).replace("RESULT", result).replace("CALL", call)


TEMPLATES: Final[Mapping[str, str]] = {
    "hermes": _template("hermes", _HERMES),
    "qwen3_coder": _template("xml", _QWEN_XML),
    "llama3_json": _template("llama", _LLAMA_JSON, "ipython"),
    "mistral": _template("mistral", _MISTRAL),
}
"""Chat templates by the name of the format, as `--tool-call-parser` takes it."""
