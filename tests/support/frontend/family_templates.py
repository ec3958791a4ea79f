"""Chat templates with the parts by which families of models differ, and the tokens that their vocabularies add."""

from __future__ import annotations

from typing import Final, NamedTuple


class Family(NamedTuple):
    template: str
    tokens: tuple[str, ...]
    """Markers that are tokens."""
    tools: str | None
    reasoning: str | None
    """Names of the formats that are found; None: there is none."""


_TOOLS: Final = "{%- for tool in tools or [] %}{{- tool | tojson + '\\n' }}{%- endfor %}"

_SMOLLM3: Final = """\
{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{%- endif %}
{{- '<|im_start|>system\\nReasoning Mode: ' + ('/think' if enable_thinking else '/no_think') + '\\n' }}
{%- if xml_tools or python_tools %}
    {{- '<tools>\\n' }}{%- for tool in xml_tools[:] %}{{- (tool | string) + '\\n' }}{%- endfor %}{{- '</tools>' }}
    {{- '<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- set role = 'user' if message.role == 'tool' else message.role %}
    {{- '<|im_start|>' + role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' + ('' if enable_thinking else '<think>\\n\\n</think>\\n') }}
{%- endif %}
"""
_PHI4_MINI: Final = """\
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>' + message['content'] }}
    {%- if 'tools' in message and message['tools'] is not none %}
        {{- '<|tool|>' + message['tools'] + '<|/tool|>' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
_GRANITE: Final = (
    "{%- if tools %}{{- 'Answer with <|tool_call|> and a JSON list\\n' }}{%- endif %}"
    "{%- if thinking %}{{- 'Think between <think></think>, answer between <response></response>' }}{%- endif %}"
    + _TOOLS
    + """
{%- for message in messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}
"""
)
_OLMO3: Final = (
    "{{- 'Write calls between <function_calls></function_calls>' }}"
    + _TOOLS
    + """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- if message.tool_calls %}
        {{- '<function_calls>\\n' }}
        {%- for call in message.tool_calls %}
            {{- call.function.name + '(' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- key + '=' + (value | tojson) + (', ' if not loop.last else '') }}
            {%- endfor %}
            {{- ')\\n' }}
        {%- endfor %}
        {{- '</function_calls>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>' }}{%- endif %}
"""
)
_LFM2: Final = (
    "{{- '<|startoftext|><|im_start|>system\\nList of tools: ' }}"
    + _TOOLS
    + """
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.tool_calls %}
        {{- '<|tool_call_start|>[' }}
        {%- for call in message.tool_calls %}
            {{- call.function.name + '(' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- key + '=' + (value | tojson) + (', ' if not loop.last else '') }}
            {%- endfor %}
            {{- ')' + (', ' if not loop.last else '') }}
        {%- endfor %}
        {{- ']<|tool_call_end|>' }}
    {%- endif %}
    {{- (message.content or '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)
_SEED_OSS: Final = """\
{%- if thinking_budget is not defined %}{%- set thinking_budget = -1 %}{%- endif %}
{{- '<seed:bos>system\\n' }}
{%- for tool in tools or [] %}
    {{- '# ' + tool.function.description + '\\ndef ' + tool.function.name + '(' }}
    {%- for name, schema in tool.function.parameters.properties.items() %}{{- name + ',' }}{%- endfor %}
    {{- ')\\n' }}
{%- endfor %}
{{- '<seed:tool_call>\\n<function=NAME>\\n<parameter=KEY>VALUE</parameter>\\n</function>\\n</seed:tool_call>' }}
{{- '<seed:eos>' }}
{%- if thinking_budget > 0 %}{{- '<seed:bos>system\\nbudget ' + thinking_budget | string + '<seed:eos>' }}{%- endif %}
{%- for message in messages %}
    {{- '<seed:bos>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}
        {{- '<seed:think>' + message.reasoning_content + '</seed:think>\\n' }}
    {%- endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<seed:tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for key, value in call.function.arguments | items %}
            {{- '<parameter=' + key + '>' + (value if value is string else value | string) + '</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</seed:tool_call>' }}
    {%- endfor %}
    {{- '<seed:eos>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<seed:bos>assistant\\n' }}
    {%- if thinking_budget == 0 %}{{- '<seed:think><seed:cot_budget_reflect>' }}{%- endif %}
{%- endif %}
"""


def _json_calls(before: str, behind: str) -> str:
    """Return a template with calls in JSON between two texts."""
    return (
        _TOOLS
        + "{{- '"
        + before
        + "NAME"
        + behind
        + """' }}
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {{- '"""
        + before
        + """{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}"""
        + behind
        + """' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' + ('<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '') }}
{%- endif %}
"""
    )


_HUNYUAN: Final = (
    _TOOLS
    + """
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.tool_calls %}
        {{- '<tool_calls>\\n' }}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' + call.function.name + '\\n```json\\n' + call.function.arguments | tojson }}
            {{- '\\n```</tool_call>\\n' }}
        {%- endfor %}
        {{- '</tool_calls>' }}
    {%- elif message.role == 'assistant' and '<answer>' in message.content %}
        {{- message.content.split('<answer>')[-1] }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n' }}{%- endif %}
"""
)
_MISTRAL: Final = """\
{{- bos_token }}
{%- if reasoning_effort is defined %}{{- '[MODEL_SETTINGS]' + reasoning_effort }}{%- endif %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'system' %}{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {%- if message.content is string %}{{- message.content }}
        {%- else %}
            {%- for part in message.content or [] %}
                {%- if part['type'] == 'thinking' %}{{- '[THINK]' + part['thinking'] + '[/THINK]' }}
                {%- else %}{{- part['text'] }}{%- endif %}
            {%- endfor %}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set arguments = call.function.arguments %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
            {{- arguments if arguments is string else arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
"""
_GEMMA3: Final = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
_GEMMA4: Final = """\
{%- macro written(value) %}
    {%- if value is string %}{{- '<|"|>' + value + '<|"|>' }}
    {%- elif value is boolean %}{{- 'true' if value else 'false' }}
    {%- elif value is mapping %}
        {{- '{' }}
        {%- for key, one in value | dictsort %}
            {{- key + ':' + written(one) + (',' if not loop.last else '') }}
        {%- endfor %}
        {{- '}' }}
    {%- elif value is sequence %}
        {{- '[' }}
        {%- for one in value %}{{- written(one) + (',' if not loop.last else '') }}{%- endfor %}
        {{- ']' }}
    {%- else %}{{- value }}{%- endif %}
{%- endmacro %}
{%- set state = namespace(answered=false) %}
{{- bos_token }}
{{- '<|turn>system\\n' + ('<|think|>' if enable_thinking else '') }}
{%- for tool in tools or [] %}{{- '<|tool>' + tool.function.name + '<tool|>' }}{%- endfor %}
{{- '<turn|>\\n' }}
{%- for message in messages %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<|turn>' + role + '\\n' }}
    {%- if message['reasoning_content'] %}
        {{- '<|channel>thought\\n' + message['reasoning_content'] + '<channel|>' }}
    {%- endif %}
    {%- for call in message['tool_calls'] or [] %}
        {{- '<|tool_call>call:' + call['function']['name'] + written(call['function']['arguments']) + '<tool_call|>' }}
    {%- endfor %}
    {%- for answer in message['tool_responses'] or [] %}
        {{- '<|tool_response>response:' + answer['name'] }}
        {{- written(answer['response'] if answer['response'] is mapping else {'value': answer['response']}) }}
        {{- '<tool_response|>' }}
    {%- endfor %}
    {%- set state.answered = message['tool_responses'] and not message['content'] %}
    {{- (message['content'] or '') | trim + ('' if state.answered else '<turn|>\\n') }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- ('' if state.answered else '<|turn>model\\n') + ('' if enable_thinking else '<|channel>thought\\n<channel|>') }}
{%- endif %}
"""


def _glm(line_break: str) -> str:
    form = "<tool_call>NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>"
    return (
        "{{- '[gMASK]<sop><|system|>' }}"
        + _TOOLS
        + "{{- '"
        + form
        + """' }}
{%- for message in messages %}
    {{- '<|observation|>' if message.role == 'tool' else '<|' + message.role + '|>' }}
    {%- if message.role == 'assistant' %}
        {{- '\\n<think>' + (message.reasoning_content or '') + '</think>' }}
    {%- endif %}
    {{- '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>' + call.function.name + '\\n' }}
        {%- for key, value in call.function.arguments.items() %}
            {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
            {{- (value if value is string else value | tojson) + '</arg_value>\\n' }}
        {%- endfor %}
        {{- '</tool_call>' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' + ('\\n<think></think>' if enable_thinking is defined and not enable_thinking else '') }}
{%- endif %}
"""
    ).replace("\\n<arg_value>", line_break + "<arg_value>")


_MINIMAX: Final = (
    "{{- ']~!b[]~b]system\\n' }}"
    + _TOOLS
    + """
{{- '<minimax:tool_call>\\n<invoke name="NAME">\\n</invoke>\\n</minimax:tool_call>[e~[\\n' }}
{%- for message in messages %}
    {{- ']~b]' + ('ai' if message.role == 'assistant' else message.role) + '\\n' }}
    {%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
    {{- '<response>' + message.content + '</response>' if message.role == 'tool' else message.content or '' }}
    {%- if message.tool_calls %}
        {{- '\\n<minimax:tool_call>\\n' }}
        {%- for call in message.tool_calls %}
            {{- '<invoke name="' + call.function.name + '">\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter name="' + key + '">' + (value if value is string else value | tojson) }}
                {{- '</parameter>\\n' }}
            {%- endfor %}
            {{- '</invoke>\\n' }}
        {%- endfor %}
        {{- '</minimax:tool_call>' }}
    {%- endif %}
    {{- '[e~[\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\\n<think>\\n' }}{%- endif %}
"""
)

_GLM_TOKENS: Final = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_THINK: Final = ("<think>", "</think>")
FAMILIES: Final[dict[str, Family]] = {
    "smollm3": Family(_SMOLLM3, _THINK, "hermes", "qwen3"),
    "phi4-mini": Family(_PHI4_MINI, ("<|tool_call|>", "<|/tool_call|>"), "phi4_mini", None),
    "granite": Family(_GRANITE, ("<|tool_call|>",), "granite", "ernie45"),
    "olmo3": Family(_OLMO3, (), "olmo3", None),
    "olmo3-think": Family(_OLMO3 + "{# </think> #}", _THINK, "olmo3", "qwen3"),
    "lfm2": Family(_LFM2, ("<|tool_call_start|>", "<|tool_call_end|>"), "lfm2", None),
    "seed-oss": Family(
        _SEED_OSS, ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"), "seed_oss", "seed_oss"
    ),
    "exaone4": Family(_json_calls("<tool_call>", "</tool_call>") + "{# <tool_result> #}", _THINK, "exaone4", "qwen3"),
    "ernie45": Family(
        _json_calls("<tool_call>\\n", "\\n</tool_call>"), (*_THINK, "<response>", "</response>"), "hermes", "ernie45"
    ),
    "hunyuan": Family(_HUNYUAN, _THINK, "hunyuan", "hunyuan_a13b"),
    "mistral": Family(_MISTRAL, ("[TOOL_CALLS]", "[ARGS]"), "mistral", "mistral"),
    "magistral": Family(_MISTRAL, ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"), "mistral", "mistral"),
    "gemma3": Family(_GEMMA3, (), None, None),
    "gemma4": Family(
        _GEMMA4, ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"), "gemma4", "gemma4"
    ),
    "glm45": Family(_glm("\\n"), (*_GLM_TOKENS, *_THINK), "glm45", "qwen3"),
    "glm47": Family(_glm(""), (*_GLM_TOKENS, *_THINK), "glm47", "qwen3"),
    "minimax-m2": Family(_MINIMAX, ("<minimax:tool_call>", "</minimax:tool_call>", *_THINK), "minimax_m2", "qwen3"),
}
