"""Chat templates like those of well-known model families, each with the features that its family uses."""

from __future__ import annotations

CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """\
{%- set ns = namespace(first=true) %}
{%- for message in messages %}
    {%- set text = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim %}
    {%- if loop.index0 == 0 %}
        {%- set text = bos_token + text %}
    {%- endif %}
    {{- text + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] + '\\n\\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set turns = messages %}
{%- endif %}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant/user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

QWEN3 = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

GENERATION_TAG = """\
{% for message in messages %}
{% if message.role == 'assistant' %}
<|assistant|>
{% generation %}
{{ message.content }}{{ eos_token }}
{% endgeneration %}
{% else %}
{{ '<|' + message.role + '|>' }}
{{ message.content }}
{% endif %}
{% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{{ messages | map(attribute='content') | list | tojson }}
{{ dict(a='<é>') | tojson(indent=2) }}
{% if tools is none %}no tools{% endif %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""

AGENT = """\
{{- note or '' }}
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for document in documents or [] %}
    {{- '<|im_start|>document\\n' + document.title + ': ' + document.text + '<|im_end|>\\n' }}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if reasoning_effort is defined %}{{ '<effort>' + reasoning_effort + '</effort>\\n' }}{%- endif %}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
"""As Qwen3's, with documents and levels of effort."""

LLAMA_TOOLS = """\
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('only one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role in ['system', 'user', 'assistant'] %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if tools is not none and loop.first %}
            {%- for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
        {%- endif %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
"""As Llama 3.1's: results of tools have another role, and other roles are skipped without an error."""

MISTRAL_TOOLS = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if loop.last and tools %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('identifiers of calls have 9 characters') }}
            {%- endif %}
            {%- set text = call.function | tojson %}
            {{- text[:-1] + ', "id": "' + call.id + '"}' + (']' + eos_token if loop.last else ', ') }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- else %}
        {{- raise_exception('only user, assistant and tool') }}
    {%- endif %}
{%- endfor %}
"""

TEXT_ARGUMENTS = """\
{%- for tool in tools or [] %}{{ tool.function.name + ';' }}{% endfor %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}{{ call.function.name + '\\n' + call.function.arguments }}{% endfor %}
{%- endfor %}
"""
"""As DeepSeek V3's, which joins texts of arguments."""

TOOL_FAMILIES = {
    "agent": AGENT,
    "llama": LLAMA_TOOLS,
    "mistral": MISTRAL_TOOLS,
    "text": TEXT_ARGUMENTS,
}

FAMILIES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen3": QWEN3,
    "generation-tag": GENERATION_TAG,
    "agent": AGENT,
}

HARMONY = """\
{{- '<|start|>system<|message|>You are ChatGPT.\\nReasoning: ' + (reasoning_effort | default('medium')) }}
{{- '\\n\\n# Valid channels: analysis, commentary, final.' }}
{%- if tools %}{{ "\\nTools belong to the channel 'commentary'." }}{% endif %}
{{- '<|end|>' }}
{%- set instructed = messages[0].role in ['system', 'developer'] %}
{%- if instructed or tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- if instructed %}{{ '# Instructions\\n\\n' + messages[0].content }}{% endif %}
    {%- for tool in tools or [] %}
        {{- '\\n\\n# Tools\\n\\n// ' + tool.function.description + '\\ntype ' + tool.function.name }}
        {{- ' = ' + (tool.function.parameters or {}) | tojson }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- set turns = messages[1:] if instructed else messages %}
{%- set last = namespace(tool=none) %}
{%- for turn in turns %}
    {%- if turn.role == 'user' %}{{ '<|start|>user<|message|>' + turn.content + '<|end|>' }}
    {%- elif turn.role == 'tool' %}
        {%- if last.tool is none %}{{ raise_exception('a result without a call') }}{% endif %}
        {{- '<|start|>functions.' + last.tool + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- turn.content | tojson + '<|end|>' }}
    {%- elif turn.role == 'assistant' %}
        {%- if '<|channel|>' in turn.content %}{{ raise_exception('channels in the content') }}{% endif %}
        {%- if 'tool_calls' in turn %}
            {%- set later = turns[loop.index:] | selectattr('role', 'eq', 'assistant') %}
            {%- set answered = later | rejectattr('tool_calls', 'defined') | list %}
            {%- if turn.content and turn.thinking %}{{ raise_exception('content and thinking') }}{% endif %}
            {%- set thought = turn.content or turn.thinking %}
            {%- if thought and not answered %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}
            {%- endif %}
            {%- set last.tool = turn.tool_calls[0].function.name %}
            {{- '<|start|>assistant to=functions.' + last.tool + '<|channel|>commentary json<|message|>' }}
            {{- turn.tool_calls[0].function.arguments | tojson + '<|call|>' }}
        {%- else %}
            {%- set last.tool = none %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + turn.content }}
            {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
"""Renders and refuses what gpt-oss's template does, in other words: only the first message has instructions, of several
calls of a message it has the first, results bear the name of the last call, reasoning is left out before an answer."""
