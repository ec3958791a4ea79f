"""First tokens of requests with many tools and without any: `python benchmarks/first_tool_call.py --url URL`.

Sends requests to a running server one after the other, each for one token: without tools, with tools that the server
has never seen, and with tools that it knows. Prompts have about the same number of tokens, and no two have a prefix in
common that may come from the cache. A call is required, so the grammar of the answer covers all tools.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

from minisgl.bench.report import Metric, report
from minisgl.flags.arguments import Parser, add_json_argument, integer

_WORDS: Final = ("account", "city", "customer", "date", "document", "invoice", "message", "order", "project", "user")
_KINDS: Final[tuple[dict[str, Any], ...]] = (
    {"type": "string", "description": "Name or identifier"},
    {"type": "integer", "minimum": 0},
    {"type": "boolean"},
    {"enum": ["low", "medium", "high"]},
    {"type": "array", "items": {"type": "number"}, "maxItems": 5},
)


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description="First token of requests with new and known tools, and without tools.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--tools", type=integer(1), default=128, metavar="N", help="tools of a request")
    parser.add_argument("--requests", type=integer(1), default=20, metavar="N", help="requests of each kind")
    add_json_argument(parser)
    return parser.parse_args()


class _Server:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=120)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = self._connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
        if response.status != 200:
            raise SystemExit(f"{path} answered {response.status}: {answer}")
        return answer

    def count(self, body: dict[str, Any]) -> int:
        """Number of tokens of a chat's prompt."""
        return int(self.post("/tokenize", body)["count"])


def main() -> None:
    args = parse_arguments()
    server = _Server(args.url)
    known = _tools(args.tools, "k0")

    def with_new_tools(number: int) -> dict[str, Any]:
        return {**_chat(f"Request {number}"), "tools": _tools(args.tools, f"n{number}"), "tool_choice": "required"}

    def with_known_tools(number: int) -> dict[str, Any]:
        return {**_chat(f"Request {number}"), "tools": known, "tool_choice": "required"}

    def without_tools(number: int) -> dict[str, Any]:
        return _chat(_text(server, with_new_tools(number), number))

    kinds: dict[str, Callable[[int], dict[str, Any]]] = {
        "without_tools": without_tools,
        "new_tools": with_new_tools,
        "known_tools": with_known_tools,
    }
    milliseconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    tokens: dict[str, list[int]] = {kind: [] for kind in kinds}
    # The first round warms up. Kinds take turns, so that drifts of the machine fall on all of them.
    for number in range(args.requests + 1):
        for kind, make in kinds.items():
            salt = f"{kind} {number} {time.time_ns()}"
            body = {**make(number), "model": "default", "max_tokens": 1, "cache_salt": salt}
            began = time.perf_counter()
            answer = server.post("/v1/chat/completions", body)
            seconds = time.perf_counter() - began
            if number:
                milliseconds[kind].append(seconds * 1000)
                tokens[kind].append(answer["usage"]["prompt_tokens"])
    figures: dict[str, Metric] = {}
    for kind, values in milliseconds.items():
        figures[f"{kind}_p50_ms"] = round(statistics.median(values), 1)
        figures[f"{kind}_max_ms"] = round(max(values), 1)
        figures[f"{kind}_prompt_tokens"] = round(statistics.mean(tokens[kind]))
    for kind in ("new_tools", "known_tools"):
        later = statistics.median(milliseconds[kind]) - statistics.median(milliseconds["without_tools"])
        figures[f"{kind}_later_ms"] = round(later, 1)
    report("first tool call", figures, {}, args.json)


def _chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _tools(count: int, prefix: str) -> list[dict[str, Any]]:
    """Definitions of tools with four parameters each, unlike those of another prefix."""
    draw = random.Random(prefix)
    tools = []
    for number in range(count):
        properties = {f"{draw.choice(_WORDS)}_{i}": _KINDS[i % len(_KINDS)] for i in range(4)}
        parameters = {"type": "object", "properties": properties, "required": list(properties)[:2]}
        name = f"{prefix}_{draw.choice(_WORDS)}_{number}"
        function = {"name": name, "description": f"Changes the {draw.choice(_WORDS)}", "parameters": parameters}
        tools.append({"type": "function", "function": function})
    return tools


def _text(server: _Server, like: dict[str, Any], number: int) -> str:
    """A text that makes a prompt of about as many tokens as `like`."""
    wanted = server.count(like)
    text = f"Text {number}. " + json.dumps(like["tools"])
    while (count := server.count(_chat(text))) < wanted:
        text += text[: max(len(text) * (wanted - count) // count, 16)]
    for _ in range(4):
        text = text[: len(text) * wanted // server.count(_chat(text))]
    return text


if __name__ == "__main__":
    main()
