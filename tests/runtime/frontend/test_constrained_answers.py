"""Constrained answers of a complete server with a tiny model, whose weights are random: nothing but the constraints
makes them valid."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from support.frontend.served import ONE_START, Served, eventually
from support.tiny_checkpoint import tiny_checkpoint

USER = [{"role": "user", "content": "Hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Ulm", "Bonn", "Kiel"]},
        "degrees": {"type": "integer", "minimum": -40, "maximum": 50},
        "sunny": {"type": "boolean"},
        "days": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "degrees", "sunny", "days"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module", params=["one rank", "two ranks"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ["--audit"] if request.param == "one rank" else ["--audit", "--tp", "2"]
    served = Served(tiny_checkpoint(), tmp_path_factory.mktemp("s"), *ONE_START, *options)
    served.wait_until_ready()
    yield served.url
    served.popen.terminate()
    served.popen.wait(60)


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def answers(client: openai.OpenAI, **fields: Any) -> list[tuple[str, str]]:
    """Text and finish reason of each choice, checked against the schema."""
    fields = {"max_tokens": 400, "response_format": FORMAT} | fields
    done = client.chat.completions.create(model="default", messages=USER, **fields)
    found = [(choice.message.content or "", choice.finish_reason) for choice in done.choices]
    for text, reason in found:
        check(text, reason)
    return found


def check(text: str, reason: str | None) -> None:
    if reason == "stop":
        jsonschema.validate(json.loads(text), SCHEMA)
    else:
        assert reason == "length"


def test_answers_under_a_schema_are_valid(client: openai.OpenAI) -> None:
    [(_, greedy)] = answers(client, temperature=0)
    several = answers(client, n=8, seed=3, top_p=0.9, temperature=1.3, logprobs=True, top_logprobs=2)
    assert len({text for text, _ in several}) > 1
    assert [reason for _, reason in several].count("stop") + (greedy == "stop") > 0
    penalized = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {"5": 20}}
    answers(client, n=3, seed=4, **penalized, extra_body={"top_k": 7, "min_p": 0.01, "repetition_penalty": 1.1})


def test_streamed_answers_are_the_same(client: openai.OpenAI) -> None:
    whole = answers(client, seed=9)
    stream = client.chat.completions.create(
        model="default", messages=USER, max_tokens=400, response_format=FORMAT, seed=9, stream=True
    )
    deltas = [chunk.choices[0] for chunk in stream]
    assert ("".join(delta.delta.content or "" for delta in deltas), deltas[-1].finish_reason) == whole[0]


def test_an_answer_does_not_depend_on_the_rest_of_the_batch(client: openai.OpenAI) -> None:
    def ask(number: int) -> Any:
        free = number % 2
        done = client.chat.completions.create(
            model="default",
            messages=USER,
            max_tokens=60,
            seed=number,
            temperature=1.2,
            top_p=0.95 if number % 3 else 1.0,
            **({} if free else {"response_format": FORMAT}),
        )
        return done.choices[0].message.content, done.choices[0].finish_reason

    alone = [ask(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "[ab]{3,20}c"}, "[ab]{3,20}c"),
        ({"choice": ["red", "green", "blue"]}, "red|green|blue"),
        ({"grammar": 'root ::= "x" ("y" | "z")+ "."'}, r"x[yz]+\."),
    ],
    ids=["regex", "choice", "grammar"],
)
def test_other_constraints(client: openai.OpenAI, constraint: dict[str, Any], pattern: str) -> None:
    for text, reason in _texts(client, n=4, max_tokens=30, extra_body={"structured_outputs": constraint}):
        assert re.fullmatch(pattern, text) or reason == "length"


def _texts(client: openai.OpenAI, **fields: Any) -> list[tuple[str, str | None]]:
    done = client.completions.create(model="default", prompt="Hello", seed=1, **fields)
    return [(choice.text, choice.finish_reason) for choice in done.choices]


def test_ignored_end_tokens_end_a_grammar_that_allows_nothing_else(client: openai.OpenAI) -> None:
    body = {"structured_outputs": {"choice": ["red"]}, "ignore_eos": True, "min_tokens": 20}
    assert _texts(client, max_tokens=30, extra_body=body) == [("red", "stop")]


def test_a_grammar_without_any_text_is_an_error_of_its_request(client: openai.OpenAI) -> None:
    [(free, _)] = _texts(client, max_tokens=4)
    with pytest.raises(openai.BadRequestError) as refused:
        _texts(client, extra_body={"structured_outputs": {"choice": ["red"]}, "allowed_token_ids": [3]}, max_tokens=4)
    assert refused.value.code == "no_allowed_token"
    assert _texts(client, max_tokens=4) == [(free, "length")]


def test_answers_outlive_the_death_of_a_rank(tmp_path: Path) -> None:
    served = Served(tiny_checkpoint(), tmp_path, "--tp", "2", "--max-running", "1")
    served.wait_until_ready()
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=240)
    running = client.completions.create(
        model="default", prompt="Hello", max_tokens=700, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(running))
    with ThreadPoolExecutor(1) as pool:
        # The only row is taken: this request has no token yet.
        queued = pool.submit(lambda: answers(client, seed=2))
        eventually(lambda: served.metric("vllm:num_requests_waiting") >= 1)
        os.kill(served.children()["rank1"], signal.SIGKILL)
        assert list(running)[-1].choices[0].finish_reason == "length"
        assert queued.result() == answers(client, seed=2)
    served.popen.terminate()
    served.popen.wait(60)
