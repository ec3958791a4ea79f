"""Tool calls as text in each format, as a model would write them, for prompts whose chat template writes none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from minisgl.parsing import hermes, mistral, qwen_xml
from minisgl.parsing.answer_format import AnswerFormat

Call: TypeAlias = tuple[str, Any]
"""Name of a function, and its arguments: an object, or their text where that is not valid JSON."""


def call_text(answers: AnswerFormat, calls: Sequence[Call]) -> str:
    """Return the text of calls that follow each other."""
    assert answers.tools is not None and calls
    return _WRITERS[answers.tools.name](answers, calls)


def _hermes(_: AnswerFormat, calls: Sequence[Call]) -> str:
    return "\n".join(f"{hermes.START}\n{_object(call, 'arguments')}\n{hermes.END}" for call in calls)


def _qwen_xml(_: AnswerFormat, calls: Sequence[Call]) -> str:
    def parameter(name: str, value: Any) -> str:
        text = value if isinstance(value, str) else _json(value)
        return f"{qwen_xml.PARAMETER}{name}>\n{text}\n{qwen_xml.END_PARAMETER}\n"

    def function(name: str, arguments: Any) -> str:
        parameters = "".join(parameter(*item) for item in _items(arguments))
        return f"{qwen_xml.FUNCTION}{name}>\n{parameters}{qwen_xml.END_FUNCTION}"

    return "\n".join(f"{qwen_xml.START}\n{function(*call)}\n{qwen_xml.END}" for call in calls)


def _llama_json(_: AnswerFormat, calls: Sequence[Call]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


def _pythonic(_: AnswerFormat, calls: Sequence[Call]) -> str:
    def function(name: str, arguments: Any) -> str:
        return f"{name}({', '.join(f'{key}={_json(value)}' for key, value in _items(arguments))})"

    return f"[{', '.join(function(*call) for call in calls)}]"


def _mistral(answers: AnswerFormat, calls: Sequence[Call]) -> str:
    if answers.markers[mistral.ARGS].token is not None:
        return "".join(f"{mistral.START}{name}{mistral.ARGS}{_json(arguments)}" for name, arguments in calls)
    return f"{mistral.START}[{', '.join(_object(call, 'arguments') for call in calls)}]"


def _object(call: Call, key: str) -> str:
    name, arguments = call
    return f'{{"name": {_json(name)}, "{key}": {_json(arguments)}}}'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _items(arguments: Any) -> list[tuple[str, Any]]:
    return [*arguments.items()] if isinstance(arguments, dict) else []


_WRITERS: Final[Mapping[str, Callable[[AnswerFormat, Sequence[Call]], str]]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen_xml,
    "llama3_json": _llama_json,
    "pythonic": _pythonic,
    "mistral": _mistral,
}
