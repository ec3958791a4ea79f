"""Schemas and grammars that were made to cost much, against a complete server with a tiny model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from support.frontend.served import ONE_START, Served, eventually
from support.tiny_checkpoint import tiny_checkpoint

SECONDS = 3.0
"""Limit of an answer: three times what the server promises, on a machine with other work."""


def doubled(keyword: str, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {keyword: [schema, schema]}
    return schema


SCHEMAS: dict[str, dict[str, Any]] = {
    "depth of definitions": {
        **{"$ref": "#/$defs/a0"},
        "$defs": {f"a{n}": {"type": "array", "items": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(900)},
    },
    "loop": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "loop of all": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "loop of any": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "endless": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "pattern of 1 MB": {"type": "string", "pattern": "(a|b)?" * 170_000},
    "pattern with a look ahead": {"type": "string", "pattern": "(?=a)" * 1000},
    "name of 1 MB": {"type": "object", "properties": {"x" * 1_000_000: {"type": "string"}}},
    "oneOf, exponential": doubled("oneOf", 12),
    "allOf, exponential": doubled("allOf", 13) | {"minLength": 10**9},
    "oneOf, wide": {"oneOf": [{"type": "object", "properties": {f"k{i}": {}}} for i in range(1000)]},
    "oneOf of patterns": {"oneOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}b.*$"} for i in range(20)]},
    "allOf of patterns": {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(15, 21)]},
    "values": {"enum": [f"v{i}" for i in range(100_000)]},
    "properties": {"type": "object", "properties": {f"p{i}": {} for i in range(5000)}},
    "items": {"type": "array", "minItems": 10**9},
}
GRAMMARS = {
    "loop": "root ::= root",
    "nesting": "root ::= " + "(" * 2000 + '"a"' + ")" * 2000,
    "size": 'root ::= "' + "a" * 1_000_000 + '"',
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    served = Served(tiny_checkpoint(), tmp_path_factory.mktemp("h"), *ONE_START)
    served.wait_until_ready()
    before = served.children().items()
    yield served.url
    after = served.children().items()
    served.popen.terminate()
    served.popen.wait(60)
    assert before <= after, "a process was restarted"


@contextmanager
def streaming(url: str) -> Iterator[None]:
    """Keep a stream open, which must go on meanwhile and afterwards."""
    chunks, stopping = 0, threading.Event()

    def read() -> None:
        nonlocal chunks
        body = {"prompt": "A", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        while not stopping.is_set():
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
                for _ in response.iter_lines():
                    chunks += 1
                    if stopping.is_set():
                        break

    def goes_on() -> None:
        begin = chunks
        eventually(lambda: chunks > begin + 2)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        goes_on()
        yield
        goes_on()
    finally:
        stopping.set()
        thread.join()


def refusal(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the error of a request, which must come in time."""
    content = json.dumps(body)
    begin = time.monotonic()
    response = httpx.post(f"{url}{path}", content=content, headers={"content-type": "application/json"}, timeout=60)
    seconds = time.monotonic() - begin
    assert response.status_code == 400, response.text
    assert seconds < SECONDS
    error: dict[str, Any] = response.json()["error"]
    assert len(error["message"]) < 2000
    return error


USER = [{"role": "user", "content": "Hi"}]
CODES = {"unsupported_schema", "grammar_too_complex", "invalid_grammar"}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_hostile_schema_is_refused_in_a_second(url: str, name: str) -> None:
    schema = SCHEMAS[name]
    chat = {
        "messages": USER,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    }
    native = {"text": "Hi", "sampling_params": {"json_schema": json.dumps(schema)}}
    responses = {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}
    messages = {
        "messages": USER,
        "max_tokens": 4,
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }
    with streaming(url):
        for path, body in {
            "/v1/chat/completions": chat,
            "/v1/completions": {"prompt": "Hi", "guided_json": schema},
            "/generate": native,
            "/v1/responses": responses,
            "/v1/messages": messages,
        }.items():
            assert refusal(url, path, body)["code"] in CODES


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_hostile_grammar_is_refused_in_a_second(url: str, name: str) -> None:
    body = {"prompt": "Hi", "structured_outputs": {"grammar": GRAMMARS[name]}}
    with streaming(url):
        assert refusal(url, "/v1/completions", body)["code"] in CODES


def test_json_that_is_nested_too_deeply_is_refused(url: str) -> None:
    text = '{"a":' * 100_000 + "1" + "}" * 100_000
    native = {"text": "Hi", "sampling_params": {"json_schema": text}}
    with streaming(url):
        assert refusal(url, "/generate", native)["code"] in CODES | {"invalid_value"}
        content = f'{{"prompt": "Hi", "guided_json": {text}}}'.encode()
        response = httpx.post(f"{url}/v1/completions", content=content, timeout=60)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
