"""What the agent model answers without a server, read from its text by patterns of their own, for comparison with what
the server's parsers make of it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from minisgl.toy.agent_world import TOOLS
from support.agent_checkpoints import agent_checkpoints
from support.offline import Chat, Offline, Written

_CALLS: Final = {
    "hermes": r'<tool_call>\n\{"name": "(\w+)", "arguments": (\{.*\})\}\n</tool_call>',
    "qwen3_coder": r"<tool_call>\n<function=(\w+)>\n(<parameter=.*</parameter>\n)</function>\n</tool_call>",
    "llama3_json": r'\{"name": "(\w+)", "parameters": (\{.*\})\}',
    "mistral": r"\[TOOL_CALLS\](\w+)\[ARGS\](\{.*\})",
}
_PARAMETER: Final = r"<parameter=(\w+)>\n(.*?)\n</parameter>\n"


class Answer(NamedTuple):
    finish_reason: str
    reasoning: str
    content: str
    calls: list[tuple[str, str]]
    """Names, and arguments in JSON."""


def chat(question: str, tools: Sequence[str], *, thinks: bool = True) -> Chat:
    """Return a chat that begins with the question; `tools` are offered."""
    return Chat([{"role": "user", "content": question}], [TOOLS[name].definition for name in tools], thinks)


class OfflineAgent:
    """The agent model in one format."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._offline = Offline(agent_checkpoints()[name])

    def answers(self, chats: Sequence[Chat]) -> list[Answer | None]:
        """Return the answers; None where rounding decides between two, and for text in no format."""
        return [self._read(*pair) for pair in zip(chats, self._offline.written(chats), strict=True)]

    def _read(self, asked: Chat, written: Written) -> Answer | None:
        thought, _, text = written.text.rpartition("\n</think>\n\n")
        if not written.is_decided or thought.startswith("<think>\n") != asked.thinks:
            return None
        reasoning = thought.removeprefix("<think>\n")
        found = re.fullmatch(_CALLS[self._name], text, re.DOTALL)
        if found is None:
            return None if re.search(r"[{<\[]", text) else Answer("stop", reasoning, text, [])
        offered = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in asked.tools}
        name, body = found.groups()
        try:
            properties = offered[name]
            arguments = _parameters(body, properties) if self._name == "qwen3_coder" else json.loads(body)
        except (KeyError, ValueError):
            return None
        if arguments.keys() != properties.keys():
            return None
        return Answer("tool_calls", reasoning, "", [(name, json.dumps(arguments))])


def _parameters(body: str, properties: Any) -> dict[str, Any]:
    """Return parameters in XML by the types of their schema. Raises KeyError for one that there is not, ValueError."""
    return {
        key: value if properties[key]["type"] == "string" else json.loads(value)
        for key, value in re.findall(_PARAMETER, body, re.DOTALL)
    }
