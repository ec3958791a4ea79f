"""Features of a chat template that its requests may need, found from its variables and by rendering small chats."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from minisgl.errors import PromptError
from minisgl.tokenizer.compiled_template import CompiledTemplate
from minisgl.wire.text import BUDGET_VARIABLE, THINKING_VARIABLES

_COMMON_ROLES: Final = frozenset(("system", "developer", "user", "assistant"))
"""Roles that every template is expected to render or to refuse; see `knows_developer`."""
_PROBE: Final = "probe7b1e"
"""Text that no template contains."""

TOOL_VARIABLES: Final = ("tools", "xml_tools")
"""Variables in which templates take the definitions of tools: checkpoints have one of them."""
_TOOLS_OF_MESSAGE: Final = re.compile(r"""message(\[['"]tools['"]\]|\.tools\b)""")
_REASONING_FIELD: Final = re.compile(r"""reasoning_content|(\.reasoning|\[['"]reasoning['"]\])(?!\w)""")
_REASONING: Final = re.compile(
    r"<[/|]?(seed:)?think|\[/?THINK|think▷|reasoning_content|message\.(reasoning|thinking)\b|thought process|<\|channel"
)


class TemplateFeatures:
    """`special_tokens` are those that the template may use, by the names of their variables."""

    def __init__(self, template: CompiledTemplate, special_tokens: Mapping[str, str]) -> None:
        self._template = template
        self._special_tokens = special_tokens

    @property
    def takes_tools(self) -> bool:
        return not self._template.variables.isdisjoint(TOOL_VARIABLES) or self.takes_tools_in_message

    @property
    def takes_tools_in_message(self) -> bool:
        """Tools are a text of the system message, a JSON list of functions (Phi-4-mini)."""
        return _TOOLS_OF_MESSAGE.search(self._template.source) is not None

    @property
    def takes_documents(self) -> bool:
        return "documents" in self._template.variables

    @property
    def takes_tool_calls(self) -> bool:
        return "tool_calls" in self._template.source

    @cached_property
    def needs_whole_tools(self) -> bool:
        """Tools must have a description and parameters, also empty ones (Seed-OSS)."""
        user = [{"role": "user", "content": "a"}]
        bare = {"type": "function", "function": {"name": "f"}}
        return self._render(user, [bare]) is None and self._render(user, [whole_tool(bare)]) is not None

    @cached_property
    def takes_tool_responses(self) -> bool:
        """Results of tools belong to the message with their calls (Gemma 4), and have no message of their own."""
        return "tool_responses" in self._template.source and not self._names("tool")

    @cached_property
    def takes_reasoning_as_part(self) -> bool:
        """Reasoning is a part of an answer's content (Magistral), and no field of its message."""
        if _REASONING_FIELD.search(self._template.source) or not self._names("thinking"):
            return False
        parts = [{"type": "thinking", "thinking": _PROBE}, {"type": "text", "text": "a"}]
        rendered = self._render([{"role": "user", "content": "a"}, {"role": "assistant", "content": parts}])
        return rendered is not None and _PROBE in rendered

    @property
    def takes_thinking_budget(self) -> bool:
        return BUDGET_VARIABLE in self._template.variables

    @property
    def thinks(self) -> bool:
        """The template has markers of reasoning."""
        return _REASONING.search(self._template.source) is not None

    @property
    def can_switch_thinking(self) -> bool:
        """A variable of the template decides whether the model reasons."""
        return not self._template.variables.isdisjoint((*THINKING_VARIABLES, BUDGET_VARIABLE))

    def takes_role(self, role: str) -> bool:
        """Return whether messages of the role are rendered: a template may skip those that it does not know."""
        return role in _COMMON_ROLES or self._names(role) or self._takes_any_role

    @property
    def knows_developer(self) -> bool:
        return "developer" in self._template.source

    @cached_property
    def wants_text_arguments(self) -> bool:
        """The template inserts the arguments of a tool call as they are, so they must be JSON text. Others write them
        as JSON themselves, and some read their fields."""
        as_text = self._render(_call(f'{{"{_PROBE}": "{_PROBE}"}}'))
        as_object = self._render(_call({_PROBE: _PROBE}))
        wrong = as_object is None or f"'{_PROBE}'" in as_object
        return wrong and as_text is not None and f'{{"{_PROBE}": "{_PROBE}"}}' in as_text

    @cached_property
    def takes_text_arguments(self) -> bool:
        """The template renders arguments of a tool call that are a text. Others read the fields of an object."""
        rendered = self._render(_call(_PROBE))
        return rendered is not None and _PROBE in rendered

    @cached_property
    def _takes_any_role(self) -> bool:
        role = f"{_PROBE}role"
        rendered = self._render([{"role": "user", "content": "a"}, {"role": role, "content": _PROBE}])
        return rendered is not None and role in rendered and _PROBE in rendered.replace(role, "")

    def _names(self, role: str) -> bool:
        return f"'{role}'" in self._template.source or f'"{role}"' in self._template.source

    def _render(
        self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str | None:
        """Return the rendered turns; None if the template does not accept them."""
        values = {**dict.fromkeys(TOOL_VARIABLES, tools), **self._special_tokens}
        try:
            return self._template.render({**values, "messages": turns, "add_generation_prompt": False})
        except PromptError:
            return None


def whole_tool(definition: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definition of a tool with a description and parameters."""
    empty = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return {**definition, "function": {**empty, **definition["function"]}}


def _call(arguments: Any) -> list[dict[str, Any]]:
    """Return a chat with one tool call."""
    # Nine characters, as Mistral's templates require.
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "b", "name": "f", "tool_call_id": "abcdefghi"},
    ]
