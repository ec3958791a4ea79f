"""Tool calls as text in each format, as a model would write them, for prompts whose chat template writes none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from minisgl.parsing import gemma_call, harmony, hunyuan, marked_json, mistral, pythonic, xml_call
from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.marked_json import JsonSyntax
from minisgl.parsing.xml_call import XmlSyntax

Call: TypeAlias = tuple[str, Any]
"""Name of a function, and its arguments: an object, or their text where that is not valid JSON."""


def call_text(answers: AnswerFormat, calls: Sequence[Call]) -> str:
    """Return the text of calls that follow each other."""
    assert answers.tools is not None and calls
    return _WRITERS[answers.tools.name](answers, calls)


def _marked_json(syntax: JsonSyntax, _: AnswerFormat, calls: Sequence[Call]) -> str:
    bodies = [_object(call, "arguments") for call in calls]
    if syntax.is_list:
        bodies = [f"[{', '.join(bodies)}]"]
    marked = [f"{syntax.start}{syntax.around}{body}{syntax.end and syntax.around + syntax.end}" for body in bodies]
    return syntax.between.join(marked)


def _xml(syntax: XmlSyntax, _: AnswerFormat, calls: Sequence[Call]) -> str:
    def parameter(name: str, value: Any) -> str:
        text = value if isinstance(value, str) else _json(value)
        key = f"{syntax.key[0]}{name}{syntax.key[1]}{syntax.behind_key}"
        return f"{key}{text.join((syntax.around_value,) * 2).join(syntax.value)}{syntax.behind_value}"

    def function(name: str, arguments: Any) -> str:
        parameters = "".join(parameter(*item) for item in _items(arguments))
        return f"{name.join(syntax.name)}{syntax.behind_name}{parameters}{syntax.end_function}"

    begin, end = syntax.start + syntax.behind_start, syntax.behind_function + syntax.end
    functions = [function(*call) for call in calls]
    if syntax.has_shared_markers:
        return f"{begin}{syntax.between.join(functions)}{end}"
    return syntax.between.join(f"{begin}{function}{end}" for function in functions)


def _llama_json(_: AnswerFormat, calls: Sequence[Call]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


def _pythonic(_: AnswerFormat, calls: Sequence[Call]) -> str:
    return f"[{', '.join(_python_call(*call) for call in calls)}]"


def _pythonic_marked(answers: AnswerFormat, calls: Sequence[Call]) -> str:
    return f"{pythonic.LIST_START}{_pythonic(answers, calls)}{pythonic.LIST_END}"


def _pythonic_lines(_: AnswerFormat, calls: Sequence[Call]) -> str:
    return "\n".join((pythonic.START, *(_python_call(*call) for call in calls), pythonic.END))


def _python_call(name: str, arguments: Any) -> str:
    return f"{name}({', '.join(f'{key}={_json(value)}' for key, value in _items(arguments))})"


def _hunyuan(_: AnswerFormat, calls: Sequence[Call]) -> str:
    def function(name: str, arguments: Any) -> str:
        return f"{hunyuan.CALL}{name}{hunyuan.OPEN}{_json(arguments)}{hunyuan.CLOSE}{hunyuan.END_CALL}"

    return "\n".join((hunyuan.START, *(function(*call) for call in calls), hunyuan.END))


def _hunyuan_list(_: AnswerFormat, calls: Sequence[Call]) -> str:
    return f"{hunyuan.START}[{', '.join(_object(call, 'arguments') for call in calls)}]{hunyuan.END}"


def _gemma(_: AnswerFormat, calls: Sequence[Call]) -> str:
    def text(value: Any) -> str:
        match value:
            case str():
                return f"{gemma_call.QUOTE}{value}{gemma_call.QUOTE}"
            case list():
                return f"[{','.join(map(text, value))}]"
            case dict():
                return f"{{{','.join(f'{key}:{text(one)}' for key, one in value.items())}}}"
        return _json(value)

    begin = gemma_call.START + gemma_call.CALL
    return "".join(f"{begin}{name}{text(dict(_items(arguments)))}{gemma_call.END}" for name, arguments in calls)


def _mistral(answers: AnswerFormat, calls: Sequence[Call]) -> str:
    if answers.markers[mistral.ARGS].token is not None:
        return "".join(f"{mistral.START}{name}{mistral.ARGS}{_json(arguments)}" for name, arguments in calls)
    return f"{mistral.START}[{', '.join(_object(call, 'arguments') for call in calls)}]"


def _harmony(_: AnswerFormat, calls: Sequence[Call]) -> str:
    def message(name: str, arguments: Any) -> str:
        header = f"{harmony.CHANNEL}commentary to={harmony.NAMESPACE}{name} {harmony.CONSTRAIN}json"
        return f"{header}{harmony.MESSAGE}{_json(arguments)}{harmony.CALL}"

    return f"{harmony.START}{harmony.ROLE}".join(message(*call) for call in calls)


def _object(call: Call, key: str) -> str:
    name, arguments = call
    return f'{{"name": {_json(name)}, "{key}": {_json(arguments)}}}'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _items(arguments: Any) -> list[tuple[str, Any]]:
    return [*arguments.items()] if isinstance(arguments, dict) else []


_WRITERS: Final[Mapping[str, Callable[[AnswerFormat, Sequence[Call]], str]]] = {
    **{name: partial(_marked_json, syntax) for name, syntax in marked_json.SYNTAXES.items()},
    **{name: partial(_xml, syntax) for name, syntax in xml_call.SYNTAXES.items()},
    "llama3_json": _llama_json,
    "pythonic": _pythonic,
    "lfm2": _pythonic_marked,
    "olmo3": _pythonic_lines,
    "hunyuan": _hunyuan,
    "hunyuan_a13b": _hunyuan_list,
    "gemma4": _gemma,
    "mistral": _mistral,
    "harmony": _harmony,
}
