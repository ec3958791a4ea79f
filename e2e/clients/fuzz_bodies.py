"""Send thousands of broken request bodies to a running server, the same ones for the same seed, and count the answers.

    minisgl serve MODEL --port 8000
    python e2e/clients/fuzz_bodies.py http://127.0.0.1:8000 --launcher PID

Each is a valid body that was damaged: fields deleted, duplicated or of another type, huge or invalid numbers, deep
nesting, unusual Unicode, invalid UTF-8, truncated JSON, other content types. The exit code is 1 if an answer has a
status of 500 or more, takes longer than --hang seconds or lacks its error object, if a process of the server exits, or
if a valid request fails afterwards. Requires only Python and Linux.
"""

from __future__ import annotations

import argparse
import copy
import http.client
import json
import random
import sys
import threading
import time
import urllib.parse
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ANSWER_TOKENS: Final = 4
"""Limit of generated tokens, so that bodies that stay valid are answered soon."""

SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 20, "pattern": "^[a-z]+$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "kind": {"enum": ["a", "b", None]},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 3},
        "either": {"anyOf": [{"const": 1}, {"type": "boolean"}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"part": {"type": "object", "properties": {"part": {"$ref": "#/$defs/part"}}}},
}
FUNCTION: Final[dict[str, Any]] = {"name": "weather", "description": "Weather", "parameters": SCHEMA, "strict": True}
CALL: Final[dict[str, Any]] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "bonn", "days": 2}'},
}

VALID: Final[list[tuple[str, dict[str, Any]]]] = [
    (
        "/v1/chat/completions",
        {
            "model": "default",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "What is a page?"}], "name": "ann"},
                {"role": "assistant", "content": "A page.", "tool_calls": None},
                {"role": "user", "content": "And a block?"},
            ],
            "max_tokens": ANSWER_TOKENS,
            "max_completion_tokens": ANSWER_TOKENS,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "seed": 7,
            "n": 2,
            "stop": ["###", "\n\n"],
            "stop_token_ids": [3, 5],
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.1,
            "logit_bias": {"7": -5.0, "9": 3},
            "logprobs": True,
            "top_logprobs": 2,
            "stop_regex": ["#{3,}", "\\d{9}"],
            "bad_words": ["zebra", "é"],
            "skip_special_tokens": False,
            "prompt_logprobs": 1,
            "return_token_ids": True,
            "stream": False,
            "stream_options": {"include_usage": True},
            "priority": 1,
            "timeout": 20.0,
            "cache_salt": "salt",
            "user": "ann",
            "metadata": {"a": "b"},
            "response_format": {"type": "text"},
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": ["A page", "The house"],
            "max_tokens": ANSWER_TOKENS,
            "min_tokens": 1,
            "temperature": 0.0,
            "logprobs": 2,
            "echo": True,
            "n": 1,
            "best_of": 1,
            "stop": "###",
            "seed": 1,
            "include_stop_str_in_output": True,
            "ignore_eos": True,
            "logit_bias": {"1": 1},
            "allowed_token_ids": [5, 6, 7, 8, 9],
            "logprob_token_ids": [5, 6],
            "return_tokens_as_token_ids": True,
            "stop_regex": "(a|b)*###",
            "stream": True,
        },
    ),
    ("/v1/completions", {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 1, "echo": True, "logprobs": 1}),
    (
        "/generate",
        {
            "text": ["A page", "The house"],
            "sampling_params": {
                "max_new_tokens": ANSWER_TOKENS,
                "min_new_tokens": 1,
                "temperature": 0.7,
                "top_p": 0.9,
                "stop": ["###"],
                "sampling_seed": 3,
                "n": 2,
                "no_stop_trim": True,
                "stop_regex": "#+",
                "logit_bias": {"7": -5.0},
            },
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "return_text_in_logprobs": True,
            "rid": "mine",
            "stream": False,
        },
    ),
    ("/generate", {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": ANSWER_TOKENS}, "stream": True}),
    ("/generate", {"prompt": "A page", "max_tokens": ANSWER_TOKENS, "ignore_eos": True}),
    (
        "/tokenize",
        {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": True, "return_token_strs": True},
    ),
    ("/tokenize", {"prompt": "What is a page?", "add_special_tokens": False}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": None, "reasoning_content": "Bonn.", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "parallel_tool_calls": False,
            "reasoning_effort": "low",
            "thinking_token_budget": 2,
            "chat_template_kwargs": {"levels": [1, {"a": None}]},
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "logprobs": True,
            "max_tokens": ANSWER_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "echo": True,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
            "prompt_logprobs": 1,
            "truncate_prompt_tokens": 5,
            "include_reasoning": False,
            "separate_reasoning": True,
            "max_tokens": ANSWER_TOKENS,
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": "A page",
            "structured_outputs": {"json": SCHEMA},
            "allowed_token_ids": [5, 6, 7, 8],
            "bad_words": ["house"],
            "stop_regex": ["[0-9]{3}"],
            "skip_special_tokens": False,
            "max_tokens": ANSWER_TOKENS,
        },
    ),
    ("/v1/completions", {"prompt": "A", "guided_regex": "(a|b){2,9}c?", "max_tokens": ANSWER_TOKENS, "stream": True}),
    (
        "/v1/completions",
        {"prompt": "A", "guided_grammar": 'root ::= "a" [0-9]+ root?', "max_tokens": ANSWER_TOKENS},
    ),
    ("/v1/completions", {"prompt": "A", "structured_outputs": {"choice": ["one", "two"]}, "max_tokens": ANSWER_TOKENS}),
    (
        "/generate",
        {
            "text": "A page",
            "sampling_params": {"max_new_tokens": ANSWER_TOKENS, "json_schema": json.dumps(SCHEMA), "stop_regex": "x+"},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "return_text_in_logprobs": True,
            "rid": "mine",
        },
    ),
    (
        "/v1/responses",
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Bonn."}]},
                {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
                {"type": "custom_tool_call", "call_id": "call_2", "name": "patch", "input": "x"},
                {
                    "type": "custom_tool_call_output",
                    "call_id": "call_2",
                    "output": [{"type": "input_text", "text": "y"}],
                },
            ],
            "tools": [
                {"type": "function", **FUNCTION},
                {
                    "type": "custom",
                    "name": "patch",
                    "format": {"type": "grammar", "syntax": "regex", "definition": "a+"},
                },
                {
                    "type": "namespace",
                    "name": "web",
                    "description": "Web",
                    "tools": [{"type": "function", "name": "get"}],
                },
                {"type": "web_search"},
            ],
            "tool_choice": {"type": "function", "name": "weather"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
            "store": False,
            "prompt_cache_key": "key",
            "max_output_tokens": ANSWER_TOKENS,
            "stream": True,
        },
    ),
    (
        "/v1/responses",
        {
            "input": "Hi",
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}, "verbosity": "low"},
            "max_output_tokens": ANSWER_TOKENS,
            "top_logprobs": 1,
        },
    ),
    (
        "/v1/messages",
        {
            "max_tokens": ANSWER_TOKENS,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "Weather?"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Bonn.", "signature": ""},
                        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "bonn", "days": 2}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"}]},
            ],
            "tools": [{"name": "weather", "input_schema": SCHEMA, "strict": True}],
            "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 2},
            "metadata": {"user_id": "ann"},
            "stop_sequences": ["###"],
            "stream": True,
        },
    ),
    (
        "/v1/messages",
        {
            "max_tokens": ANSWER_TOKENS,
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A"}],
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
        },
    ),
    (
        "/v1/messages/count_tokens",
        {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"name": "weather", "input_schema": SCHEMA}]},
    ),
]

BOUNDED: Final = ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens")
"""Fields that are neither deleted nor set to large values, because valid answers would be long."""


class Verbatim:
    """Text that is inserted into the JSON unchanged, valid or not."""

    def __init__(self, text: str) -> None:
        self.text = text


ODD_VALUES: Final[list[Any]] = [
    *(None, True, False, "", "x", [], {}, [[]], [None], {"": None}, {"type": "image_url"}, [{"type": "text"}]),
    *(0, -1, 1, 2, 0.5, -0.0, 1e308, 5e-324, 2**31, 2**31 - 1, 2**63, -(2**63), 2**64, -(2**64), 10**400),
    *(Verbatim("NaN"), Verbatim("-Infinity"), Verbatim("1e999"), Verbatim("-"), Verbatim("01"), Verbatim("1.")),
    *("\x00", "\ufeff", "\u202e", "e\u0301" * 50, "\U0001f469\u200d\U0001f680" * 20, "\uffff", "\x7f\x80", "%s%n{}{0}"),
    *(Verbatim(r'"\ud800"'), Verbatim(r'"\udc00\ud800"'), Verbatim('"\x01"'), Verbatim(r'"\u00"'), Verbatim(r'"\x41"')),
    *("<|im_end|>", "<|endoftext|>", "{{ 1/0 }}", "{% raise %}", "a" * 5000, " " * 300, "\n" * 300),
    *(["x"] * 200, [0] * 2000, [1.5], [True], [-1], [2**40], [[1], "x"], [[1], [2.5]], [{}]),
    *({str(i): i for i in range(1100)}, {"-1": 1}, {"1": "x"}, {"a": 1}, {"1.5": 1}, {"99999999999999999999": 1}),
    Verbatim("[" * 300 + "]" * 300),
    Verbatim("[" * 20_000),
    Verbatim('{"a":' * 500 + "1" + "}" * 500),
    *({"$ref": "#"}, {"$ref": "#/$defs/part"}, {"not": {}}, {"allOf": [{"$ref": "#"}]}, {"enum": list(range(20_000))}),
    *("(a|b)*a(a|b){30}", "(" * 500, "((((a{1,99}){1,99}){1,99}){1,99})", "(?=a)b", r"(a)\1", "[" * 99, "a{99999999}"),
    *("root ::= root", "start: start", 'root ::= "a" | root root', "root ::= " + '"a"? ' * 900, "%llguidance {}"),
]

FIELDS: Final = ("extra", "", "mässig", "x" * 300, "messages", "prompt", "tools", "suffix")
"""Names of fields that are added in wrong places."""

ODD_BYTES: Final = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\x00", b"\xe2\x82")

CONTENT_TYPES: Final = [
    *("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "application/xml"),
    *("application/json; charset=latin-1", "APPLICATION/JSON", "application/json;", "json", "application/json, text/a"),
]


@dataclass
class Sent:
    path: str
    body: bytes
    content_type: str = "application/json"


@dataclass
class Tally:
    """Counts of answers, shared by all threads."""

    statuses: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    slowest_seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def damaged(seed: int) -> Sent:
    """Damaged request, determined by the seed."""
    random_ = random.Random(seed)
    path, valid = random_.choice(VALID)
    body = copy.deepcopy(valid)
    # Half of them are damaged only slightly, so that enough reach the tokenizer and the engine.
    touch = random_.choice([_touch, _damage])
    for _ in range(random_.choice([1, 1, 1, 2, 3, 6])):
        touch(random_, body)
    raw = _encode(body).encode("utf-8", "surrogatepass")
    sent = Sent(path, raw)
    kind = random_.random()
    if kind < 0.05:
        sent.body = raw[: random_.randrange(len(raw) + 1)]
    elif kind < 0.15:
        sent.body = _with_odd_bytes(random_, raw)
    elif kind < 0.18:
        sent.content_type = random_.choice(CONTENT_TYPES)
    elif kind < 0.19:
        sent.body = random_.randbytes(random_.randrange(200))
    elif kind < 0.20:
        sent.body = _encode(random_.choice(ODD_VALUES)).encode("utf-8", "surrogatepass")
    elif kind < 0.21:
        # The same body, sent to another path.
        sent.path = random_.choice(VALID)[0]
    return sent


def _touch(random_: random.Random, body: dict[str, Any]) -> None:
    """Delete a field, or replace a text."""
    holder, key = random_.choice(_places(body) or [(body, "extra")])
    if isinstance(holder.get(key) if isinstance(holder, dict) else holder[key], str):
        holder[key] = _text(random_)
    elif isinstance(holder, dict) and key not in BOUNDED:
        holder.pop(key, None)


def _damage(random_: random.Random, body: dict[str, Any]) -> None:
    holder, key = random_.choice(_places(body) or [(body, "extra")])
    holder_has_key = not isinstance(holder, dict) or key in holder
    bounded = key in BOUNDED
    match random_.randrange(6):
        case 0 if holder_has_key and not bounded:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[random_.choice(FIELDS)] = _odd(random_)
        case 2 if isinstance(holder, dict) and not bounded:
            # A duplicate key with another value: JSON does not define which one counts.
            holder[Twice(key)] = _odd(random_)
        case 3:
            holder[key] = _text(random_)
        case 4 if holder_has_key and not bounded:
            holder[key] = [holder[key]] * random_.randrange(3)
        case _:
            value = _odd(random_)
            while bounded and isinstance(value, int | float) and value > ANSWER_TOKENS:
                value = _odd(random_)
            # null means the default, which for chats is the rest of the context.
            holder[key] = "x" if bounded and value is None else value


class Twice(str):
    """Key that equals no other key of its dictionary."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """All (container, key or index) pairs below a value."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    places = [(value, key) for key in keys]
    for key in keys:
        places += _places(value[key])
    # Long lists of odd values would otherwise outnumber everything else.
    return places[:200]


def _odd(random_: random.Random) -> Any:
    return copy.deepcopy(random_.choice(ODD_VALUES))


def _text(random_: random.Random) -> str:
    highest = random_.choice([0x7F, 0x7FF, 0x10FFFF])
    return "".join(chr(random_.randrange(highest + 1)) for _ in range(random_.randrange(1, 40)))


def _encode(value: Any) -> str:
    match value:
        case Verbatim():
            return value.text
        case dict():
            return "{" + ",".join(f"{json.dumps(str(key))}:{_encode(one)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_encode, value)) + "]"
        case _:
            return json.dumps(value, ensure_ascii=False)


def _with_odd_bytes(random_: random.Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(random_.randrange(1, 4)):
        at = random_.randrange(len(changed) + 1)
        changed[at : at + random_.randrange(2)] = random_.choice(ODD_BYTES)
    return bytes(changed)


def send(address: tuple[str, int], sent: Sent, hang_seconds: float) -> tuple[int, bytes]:
    """Send a request; returns status and body. Raises OSError without a complete answer in time."""
    connection = http.client.HTTPConnection(*address, timeout=hang_seconds)
    try:
        connection.request("POST", sent.path, sent.body, {"Content-Type": sent.content_type})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def work(address: tuple[str, int], seeds: list[int], hang_seconds: float, tally: Tally) -> None:
    for seed in seeds:
        sent = damaged(seed)
        began = time.monotonic()
        code, wrong = "", ""
        try:
            status, body = send(address, sent, hang_seconds)
            outcome = str(status)
            if status >= 400:
                code = json.loads(body)["error"]["code"]
            # An error in a stream comes after its status.
            elif b'data: {"error"' in body or b'data: {"type":"error"' in body:
                last = next(
                    part for part in body.split(b"data: ") if part.startswith((b'{"error"', b'{"type":"error"'))
                )
                event = json.loads(last.partition(b"\n")[0])
                code = "in a stream: " + event.get("error", event)["code"]
                wrong = code
            if status >= 500:
                wrong = outcome
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            outcome = type(error).__name__
            wrong = f"{outcome}: {error}"
        seconds = time.monotonic() - began
        if seconds > hang_seconds:
            wrong = wrong or f"{seconds:.1f} s"
        with tally.lock:
            tally.statuses[outcome] += 1
            tally.codes[code] += bool(code)
            tally.slowest_seconds = max(tally.slowest_seconds, seconds)
            if wrong:
                tally.wrong.append(f"seed {seed}: {sent.path} {sent.content_type!r}: {wrong}: {sent.body[:300]!r}")


def _children(process: int | None) -> set[int]:
    if process is None:
        return set()
    # Children are listed per thread that started them.
    tasks = Path(f"/proc/{process}/task").iterdir()
    return {int(child) for task in tasks for child in (task / "children").read_text().split()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Send broken request bodies to a running server, and count the answers."
    )
    parser.add_argument("url", help="URL of the server, such as http://127.0.0.1:8000")
    parser.add_argument("--bodies", type=int, default=10_000, help="number of bodies (default: 10,000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first body; each next one is higher by one")
    parser.add_argument("--connections", type=int, default=8, help="concurrent connections (default: 8)")
    parser.add_argument("--hang", type=float, default=10.0, help="maximum time of an answer in seconds (default: 10)")
    parser.add_argument(
        "--launcher", type=int, help="process id of `minisgl serve`, whose child processes must not exit"
    )
    args = parser.parse_args()
    parts = urllib.parse.urlsplit(args.url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)

    tally = Tally()
    processes = _children(args.launcher)
    seeds = range(args.seed, args.seed + args.bodies)
    threads = [
        threading.Thread(target=work, args=(address, list(seeds[i :: args.connections]), args.hang, tally))
        for i in range(args.connections)
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began

    if (answered := sum(tally.statuses.values())) != args.bodies:
        tally.wrong.insert(0, f"{args.bodies - answered} bodies were not sent")
    after = send(address, Sent("/v1/completions", b'{"prompt": "A page", "max_tokens": 1}'), args.hang)
    if after[0] != 200:
        tally.wrong.insert(0, f"a valid request afterwards: {after[0]}")
    # New standby processes are fine.
    if gone := processes - _children(args.launcher):
        tally.wrong.insert(0, f"processes of the server exited: {sorted(gone)}")
    print(f"{answered:,} bodies in {seconds:.1f} s, slowest answer: {tally.slowest_seconds:.2f} s")
    print("statuses:", ", ".join(f"{name}: {count:,}" for name, count in sorted(tally.statuses.items())))
    print("codes:", ", ".join(f"{name}: {count:,}" for name, count in tally.codes.most_common() if name))
    for wrong in tally.wrong[:20]:
        print(wrong)
    print(f"{len(tally.wrong)} wrong")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
