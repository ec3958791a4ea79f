"""Random answers with reasoning, text and tool calls, and their text in each format."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

TOOLS: Final[dict[str, dict[str, Any]]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "deep": {"$ref": "#/$defs/deep"},
            "list": {"type": "array"},
            "flag": {"type": "boolean"},
        },
        "$defs": {"deep": {"type": "object"}},
    },
    "search-web": {"properties": {"text": {"type": ["string", "null"]}}},
    "now": {},
}

_FRAGMENTS: Final = (
    *("a", "Bonn", " ", "\n", '"', "'", "\\", "{", "}", "[", "]", "(", ")", ",", ":", "=", "<", ">", ";", "/"),
    *("é", "🙂", "\u2028", "\t", "\\n", '\\"', "null", "12", "true", "</", "<b>", "\n\n", "//", "#"),
    *("<tool_call>", "</tool_call>", "<function=now>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"),
    *("<|python_tag|>", '{"name": "now"}', "[now()]", "```json\n", "</parameter>", "\n</parameter>\n"),
)
_XML_END: Final = re.compile(r"</parameter>\s*</tool_call>\s*<tool_call>|<parameter=|</function>")
"""What no string in Qwen3-Coder's format contains."""


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


class Answer(NamedTuple):
    """Parts of an answer: reasoning, then texts and lists of parallel calls in their order."""

    reasoning: str
    parts: tuple[str | tuple[Call, ...], ...]

    @property
    def text(self) -> str:
        return "\n".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[Call]:
        return [call for part in self.parts if not isinstance(part, str) for call in part]


def random_answer(rng: random.Random, *, with_call: bool = True) -> Answer:
    """Return an answer with up to four parts, among them at least one call by default."""
    reasoning = _words(rng).strip() if rng.random() < 0.5 else ""
    parts: list[str | tuple[Call, ...]] = []
    if rng.random() < 0.5:
        parts.append(_words(rng))
    if with_call or rng.random() < 0.5:
        parts.append(tuple(random_call(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))))
        if rng.random() < 0.3:
            parts.append(_words(rng))
            if rng.random() < 0.5:
                parts.append((random_call(rng),))
    return Answer(reasoning, tuple(parts))


def random_call(rng: random.Random) -> Call:
    name = rng.choice([*TOOLS])
    names = [*TOOLS[name].get("properties", {})]
    chosen = rng.sample(names, rng.randint(0, len(names)))
    return Call(name, {key: _value(rng, key) for key in chosen})


def _value(rng: random.Random, key: str) -> Any:
    match key:
        case "text" | "note":
            # The word null is the value null in formats without quotes.
            return None if key == "note" and rng.random() < 0.2 else _string(rng) + "."
        case "count":
            return rng.choice((0, 7, -12, 10**20))
        case "ratio":
            return rng.choice((0.5, -3.25e-7, 4, 1e100))
        case "deep":
            return {_string(rng): _nested(rng, 2) for _ in range(rng.randint(0, 2))}
        case "list":
            return [_nested(rng, 2) for _ in range(rng.randint(0, 3))]
    return rng.random() < 0.5


def _nested(rng: random.Random, depth: int) -> Any:
    if depth and rng.random() < 0.4:
        if rng.random() < 0.5:
            return [_nested(rng, depth - 1) for _ in range(rng.randint(0, 2))]
        return {_string(rng): _nested(rng, depth - 1) for _ in range(rng.randint(0, 2))}
    return rng.choice((None, True, False, 3, -0.25, _string(rng)))


def _string(rng: random.Random) -> str:
    text = "".join(rng.choice(_FRAGMENTS) for _ in range(rng.choice((0, 1, 2, 3, 8))))
    return text if not _XML_END.search(text) else "x"


def _words(rng: random.Random) -> str:
    """Return text that no format takes for calls, without spaces around it."""
    words = ("Let", "me", "look", "it", "up", "a < b", "{x}", "[1](2)", "é🙂", '"q"', "<b>", "f(x)", "…\nNow", "- {")
    return " ".join(rng.choice(words) for _ in range(rng.randint(1, 8)))


def hermes(answer: Answer, rng: random.Random) -> str:
    def call(one: Call) -> str:
        body = {"name": one.name, "arguments": one.arguments}
        if rng.random() < 0.2:
            body = dict(reversed(body.items()))
        return f"<tool_call>\n{_json(body, rng)}\n</tool_call>"

    return _joined(answer, rng, lambda calls: "\n".join(map(call, calls)))


def qwen_xml(answer: Answer, rng: random.Random) -> str:
    def value(value: Any) -> str:
        return value if isinstance(value, str) else _json(value, rng)

    def call(one: Call) -> str:
        parameters = "".join(f"<parameter={key}>\n{value(x)}\n</parameter>\n" for key, x in one.arguments.items())
        return f"<tool_call>\n<function={one.name}>\n{parameters}</function>\n</tool_call>"

    return _joined(answer, rng, lambda calls: "\n".join(map(call, calls)))


def llama_json(answer: Answer, rng: random.Random) -> str:
    def calls(calls: tuple[Call, ...]) -> str:
        tag = "<|python_tag|>" if rng.random() < 0.5 else ""
        bodies = [{"name": one.name, "parameters": one.arguments} for one in calls]
        return tag + rng.choice(("; ", ";", "\n")).join(_json(body, rng) for body in bodies)

    return _joined(answer, rng, calls)


def pythonic(answer: Answer, rng: random.Random) -> str:
    def call(one: Call) -> str:
        return f"{one.name}({', '.join(f'{key}={value!r}' for key, value in one.arguments.items())})"

    return _joined(answer, rng, lambda calls: f"[{', '.join(map(call, calls))}]")


def mistral_old(answer: Answer, rng: random.Random) -> str:
    def calls(calls: tuple[Call, ...]) -> str:
        return "[TOOL_CALLS]" + _json([{"name": one.name, "arguments": one.arguments} for one in calls], rng)

    return _joined(answer, rng, calls, ("[THINK]", "[/THINK]"))


def mistral_new(answer: Answer, rng: random.Random) -> str:
    def call(one: Call) -> str:
        call_id = "[CALL_ID]a1B2c3D4e" if rng.random() < 0.3 else ""
        return f"[TOOL_CALLS]{one.name}{call_id}[ARGS]{_json(one.arguments, rng)}"

    return _joined(answer, rng, lambda calls: "".join(map(call, calls)), ("[THINK]", "[/THINK]"))


WRITERS: Final[Mapping[str, tuple[str, Callable[[Answer, random.Random], str]]]] = {
    "hermes": ("hermes", hermes),
    "qwen_xml": ("qwen3_coder", qwen_xml),
    "llama_json": ("llama3_json", llama_json),
    "pythonic": ("pythonic", pythonic),
    "mistral_old": ("mistral", mistral_old),
    "mistral_new": ("mistral", mistral_new),
}
"""Names of the tool parser, and functions that write an answer, by format."""


def _json(value: Any, rng: random.Random) -> str:
    separators = rng.choice(((", ", ": "), (",", ":"), (" , ", " :\n")))
    return json.dumps(value, ensure_ascii=rng.random() < 0.3, separators=separators)


def _joined(
    answer: Answer,
    rng: random.Random,
    write: Callable[[tuple[Call, ...]], str],
    think: tuple[str, str] = ("<think>", "</think>"),
) -> str:
    parts = [part if isinstance(part, str) else write(part) for part in answer.parts]
    reasoning = f"{think[0]}\n{answer.reasoning}\n{think[1]}\n\n" if answer.reasoning else ""
    return reasoning + "\n".join(parts)
