"""Renders chats with a checkpoint's template to the same text as transformers. What a template would leave out without
an error, such as tools that it does not know, is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from minisgl.errors import PromptError
from minisgl.tokenizer.compiled_template import CompiledTemplate
from minisgl.tokenizer.template_features import TOOL_VARIABLES, TemplateFeatures, whole_tool
from minisgl.wire.text import BUDGET_VARIABLE, THINKING_VARIABLES, ChatMessage, ToolOptions

_END_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the final message, as in transformers. A template that trims contents removes its space."""

_REASONING_NAMES: Final = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates read the reasoning of earlier answers."""

_WRITTEN: Final = "arguments"
"""Field of what a model wrote in place of an object, for templates that take nothing else."""


class ChatTemplate:
    """Chat template with the Jinja source of a checkpoint and the special tokens that it may use (`bos_token` …)."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self.source = source
        self._special_tokens = special_tokens
        self._template = CompiledTemplate(source)
        self.features = TemplateFeatures(self._template, special_tokens)

    def render(
        self,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        tools: ToolOptions | None = None,
        documents: Sequence[dict[str, Any]] | None = None,
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt's text, by default with the beginning of the assistant's turn. `variables` are further
        variables of the template; they cannot replace the standard ones. The other arguments are those of
        `Generate`. Raises PromptError."""
        definitions = self._tools(tools)
        if documents is not None and not self.features.takes_documents:
            raise _refused("the model's chat template does not support documents; put them into a message", "documents")
        final = (messages[-1].content or "") if continue_final_message else ""
        if continue_final_message:
            messages = [*messages[:-1], msgspec.structs.replace(messages[-1], content=final + _END_MARK)]
        turns = [self._turn(message, n) for n, message in enumerate(messages)]
        if self.features.takes_tool_responses:
            turns = _with_responses(turns)
        if definitions and self.features.takes_tools_in_message:
            turns = _with_tools(turns, definitions)
        switches = {**self._thinking(thinking, variables), **variables}
        if not switches.get(THINKING_VARIABLES[0], True):
            switches.setdefault(BUDGET_VARIABLE, 0)
        text = self._template.render(
            {
                **dict.fromkeys(TOOL_VARIABLES, definitions),
                **switches,
                **self._special_tokens,
                "messages": turns,
                "tools": definitions,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut(text, final) if continue_final_message else text

    def _tools(self, tools: ToolOptions | None) -> Sequence[dict[str, Any]] | None:
        if tools is None:
            return None
        if self.features.takes_tools:
            whole = self.features.needs_whole_tools
            return [whole_tool(definition) if whole else definition for definition in tools.definitions]
        if tools.choice in ("none", "auto"):
            # The model cannot call what it does not see, nor has it to; see `AnswerFormat.ignores_tools`.
            return None
        raise _refused(
            "the model's chat template does not support tools, so no call can be required; set `tool_choice` to "
            '"auto" or "none"',
            "tools",
        )

    def _thinking(self, thinking: bool | None, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables that switch reasoning."""
        if thinking is None:
            return {}
        features = self.features
        if not features.can_switch_thinking and thinking != features.thinks:
            problem = "cannot switch reasoning off" if features.thinks else "has no reasoning"
            raise _refused(
                f"the model's chat template {problem}; leave `enable_thinking` and the effort out", "enable_thinking"
            )
        return dict.fromkeys(THINKING_VARIABLES, thinking)

    def _turn(self, message: ChatMessage, number: int) -> dict[str, Any]:
        role: str = message.custom_role or message.role
        if role == "developer" and not self.features.knows_developer:
            role = "system"
        if role == "tool" and self.features.takes_tools_in_message:
            role = "tool_response"
        if not self.features.takes_role(role):
            raise _refused(
                f"the model's chat template does not support the role {role!r}; use another one",
                f"messages[{number}].role",
            )
        turn: dict[str, Any] = {"role": role, "content": message.content}
        if message.name is not None:
            turn["name"] = message.name
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        if message.reasoning and self.features.takes_reasoning_as_part:
            turn["content"] = [{"type": "thinking", "thinking": message.reasoning}]
            if message.content:
                turn["content"].append({"type": "text", "text": message.content})
        elif message.reasoning is not None:
            turn |= dict.fromkeys(_REASONING_NAMES, message.reasoning)
        if message.tool_calls:
            if not self.features.takes_tool_calls:
                raise _refused(
                    "the model's chat template does not support tool calls; remove them",
                    f"messages[{number}].tool_calls",
                )
            turn["tool_calls"] = [self._call(call) for call in message.tool_calls]
        return turn

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return a tool call with its arguments as the template takes them."""
        if self.features.wants_text_arguments:
            return _with_text(call)
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str) and not self.features.takes_text_arguments:
            # The model wrote no JSON object, and cannot take that back: the conversation goes on with what it wrote.
            return {**call, "function": {**call["function"], "arguments": {_WRITTEN: arguments}}}
        return call


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as JSON text."""
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _with_responses(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with results of tools in the message with their calls."""
    merged: list[dict[str, Any]] = []
    for turn in turns:
        if turn["role"] != "tool" or not merged or not merged[-1].get("tool_calls"):
            merged.append(turn)
            continue
        caller = merged[-1]
        names = {call.get("id"): call["function"]["name"] for call in caller["tool_calls"]}
        name = names.get(turn.get("tool_call_id"), turn.get("name", "unknown"))
        response = {"name": name, "response": _object_or_text(turn["content"] or "")}
        merged[-1] = {**caller, "tool_responses": [*caller.get("tool_responses", ()), response]}
    return merged


def _object_or_text(content: str) -> Any:
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.MsgspecError:
        return content


def _with_tools(turns: list[dict[str, Any]], definitions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the functions as a text of the system message, which comes first."""
    functions = json.dumps([tool["function"] for tool in definitions], ensure_ascii=False)
    if not turns or turns[0]["role"] != "system":
        turns = [{"role": "system", "content": ""}, *turns]
    return [{**turns[0], "tools": functions}, *turns[1:]]


def _cut(text: str, content: str) -> str:
    """Return the rendered text up to the end of the final message, whose content is `content`."""
    end = text.rfind(_END_MARK.strip())
    if end < 0 or content.strip() not in text:
        raise _refused(
            "the model's chat template does not render the last message as it is, so the answer cannot continue it",
            "continue_final_message",
        )
    if text.startswith(_END_MARK, end):
        return text[:end]
    # The template has trimmed the content together with the space of the mark.
    return text[:end].rstrip()


def _refused(problem: str, param: str) -> PromptError:
    return PromptError("chat_template_error", problem, param)
