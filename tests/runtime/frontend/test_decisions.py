"""Behaviour of this server where servers of this API differ or document nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import minisgl.frontend
from minisgl.frontend.config import RequestLimits
from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation.request import derived_seed
from minisgl.wire.messages import Submit
from support.frontend.fake_scheduler import answer_with
from support.frontend.scored_answers import scored_answer
from support.frontend.stack import EOS, TOKENIZER, FrontendStack, ids

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"prompt": "Hi"}
BOTH = pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)], ids=["chat", "completion"]
)
CONTEXT = 256


def answered(stack: FrontendStack, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = stack.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refused(response: httpx.Response, status: int = 400) -> tuple[str, str]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return error["param"], error["code"]


# Context overflow


@BOTH
def test_max_tokens_are_never_reduced_silently(stack: FrontendStack, path: str, body: dict[str, Any]) -> None:
    stack.scheduler.answer = answer_with([-EOS])
    prompt = answered(stack, path, body)["usage"]["prompt_tokens"]
    left = CONTEXT - prompt
    answered(stack, path, body | {"max_tokens": left})
    assert stack.scheduler.received(Submit)[-1].params.max_tokens == left
    response = stack.http.post(path, json=body | {"max_tokens": left + 1})
    assert refused(response)[1] == "context_length_exceeded"
    message = response.json()["error"]["message"]
    assert message.startswith(f"This model's maximum context length is {CONTEXT} tokens")
    assert "context_length_exceeded" not in message, "the code has a field of its own"


# Ranges


@BOTH
@pytest.mark.parametrize(
    ("fine", "wrong", "param"),
    [
        ({"n": 128}, {"n": 129}, "n"),
        ({"stop": ["x" * 256] * 16}, {"stop": ["x"] * 17}, "stop"),
        ({"stop": []}, {"stop": ""}, "stop"),
        ({"max_tokens": 5, "min_tokens": 5}, {"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"temperature": 2}, {"temperature": 2.0001}, "temperature"),
        ({"top_p": 1}, {"top_p": 0}, "top_p"),
        ({"seed": 2**63 - 1}, {"seed": 2**63}, "seed"),
        ({"top_k": -1}, {"top_k": -2}, "top_k"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_limits_of_ranges(
    stack: FrontendStack, path: str, body: dict[str, Any], fine: dict[str, Any], wrong: dict[str, Any], param: str
) -> None:
    stack.scheduler.answer = answer_with([-EOS])
    answered(stack, path, body | fine)
    assert refused(stack.http.post(path, json=body | wrong)) == (param, "invalid_value")


def test_limits_of_logprobs(stack: FrontendStack) -> None:
    stack.scheduler.answer = scored_answer([*ids("a"), -EOS])
    answered(stack, "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 20})
    answered(stack, "/v1/completions", COMPLETION | {"logprobs": 20})
    chosen_only = answered(stack, "/v1/completions", COMPLETION | {"logprobs": 0})["choices"][0]["logprobs"]
    assert [list(tops) for tops in chosen_only["top_logprobs"]] == [["a"]]
    response = stack.http.post("/v1/chat/completions", json=CHAT | {"logprobs": True, "top_logprobs": 21})
    assert refused(response) == ("top_logprobs", "invalid_value")


@pytest.mark.parametrize(
    "field",
    [
        *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "presence_penalty"),
        *("frequency_penalty", "repetition_penalty", "priority", "timeout"),
    ],
)
@BOTH
def test_strings_are_not_accepted_as_numbers(stack: FrontendStack, path: str, body: dict[str, Any], field: str) -> None:
    assert refused(stack.http.post(path, json=body | {field: "1"})) == (field, "invalid_value")


def test_max_tokens_of_zero(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with(ids("a"))
    answer = answered(stack, "/v1/completions", COMPLETION | {"max_tokens": 0})
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("", 0)
    echoed = answered(stack, "/v1/completions", COMPLETION | {"max_tokens": 0, "echo": True})
    assert (echoed["choices"][0]["text"], echoed["choices"][0]["finish_reason"]) == ("Hi", "length")
    for name in ("max_tokens", "max_completion_tokens"):
        assert refused(stack.http.post("/v1/chat/completions", json=CHAT | {name: 0})) == (name, "invalid_value")


# Errors


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, "invalid_request_error") for status in (400, 405, 408, 413, 415, 431)),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (429, "rate_limit_error"),
        *((status, "server_error") for status in (500, 503)),
    ],
)
def test_the_type_of_an_error_follows_its_status(status: int, kind: str) -> None:
    error = ApiError(status, "a_code", "what is wrong", "messages[0].role")
    assert msgspec.json.decode(error.body())["error"] == {
        "message": "what is wrong",
        "type": kind,
        "param": "messages[0].role",
        "code": "a_code",
    }
    assert ("retry-after" in error.headers) == (status in (429, 503))


def test_every_code_is_documented() -> None:
    sources = "".join(path.read_text() for path in sorted(Path(minisgl.frontend.__path__[0]).rglob("*.py")))
    found = re.findall(r'ApiError\(\s*(\d{3}), "(\w+)"', sources)
    found += [(status, code) for code, status in re.findall(r'^    "(\w+)": (\d{3}),$', sources, re.MULTILINE)]
    assert ("400", "invalid_value") in found and ("429", "queue_full") in found
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    documented = {
        (status, code)
        for status, codes in re.findall(r"^\| (\d{3}) \| (.+) \|$", page, re.MULTILINE)
        for code in re.findall(r"`(\w+)`", codes)
    }
    assert set(found) <= documented


# Models


@BOTH
def test_a_response_has_the_requested_model_name(stack: FrontendStack, path: str, body: dict[str, Any]) -> None:
    stack.scheduler.answer = answer_with([-EOS])
    for given, name in ((None, "org/tiny"), ("org/tiny", "org/tiny"), ("default", "default")):
        assert answered(stack, path, body | {"model": given})["model"] == name
    for unknown in ("", "gpt-4o", "ORG/TINY"):
        assert refused(stack.http.post(path, json=body | {"model": unknown}), 404) == ("model", "model_not_found")


@BOTH
def test_an_unknown_model_is_named_in_the_error_with_the_served_ones(
    stack: FrontendStack, path: str, body: dict[str, Any]
) -> None:
    answers = (
        stack.http.post(path, json=body | {"model": "gpt-4o"}),
        stack.http.post("/tokenize", json={"prompt": "a", "model": "gpt-4o"}),
        stack.http.get("/v1/models/gpt-4o"),
    )
    for answer in answers:
        assert refused(answer, 404) == ("model", "model_not_found")
        message = answer.json()["error"]["message"]
        assert message == "model 'gpt-4o' does not exist; this server serves 'org/tiny'"
    long = stack.http.post(path, json=body | {"model": "x" * 1000}).json()["error"]["message"]
    assert "x" * 64 + "…" in long and len(long) < 200


# Counting


@BOTH
def test_usage_counts_the_eos_token_and_a_prompt_once(stack: FrontendStack, path: str, body: dict[str, Any]) -> None:
    stack.scheduler.answer = answer_with([*ids("ab"), -EOS], cached=2)
    usage = answered(stack, path, body | {"n": 2})["usage"]
    prompt = len(stack.scheduler.received(Submit)[0].prompt) // 4
    assert usage == {
        "prompt_tokens": prompt,
        "completion_tokens": 2 * (len(ids("ab")) + 1),
        "total_tokens": prompt + 2 * (len(ids("ab")) + 1),
        "prompt_tokens_details": {"cached_tokens": 2},
        **({"completion_tokens_details": {"reasoning_tokens": 0}, "reasoning_tokens": 0} if "messages" in body else {}),
    }


@pytest.mark.parametrize("change", [{}, {"stop_token_ids": [ids("c")[0]]}, {"stop": "c"}], ids=["eos", "token", "text"])
def test_logprobs_cover_the_text_only(stack: FrontendStack, change: dict[str, Any]) -> None:
    last = EOS if not change else ids("c")[0]
    ends = "stop" not in change
    stack.scheduler.answer = scored_answer([*ids("ab"), -last if ends else last])
    answer = answered(stack, "/v1/chat/completions", CHAT | {"logprobs": True} | change)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "ab"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["a", "b"]
    assert answer["usage"]["completion_tokens"] == 3


# Text


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_a_partial_character_at_the_end_is_decoded_as_in_a_full_decode(
    stack: FrontendStack, path: str, body: dict[str, Any], stream: bool
) -> None:
    tokens = ids("ok 🙂")
    stack.scheduler.answer = answer_with(tokens)
    response = stack.http.post(path, json=body | {"max_tokens": len(tokens) - 2, "stream": stream})
    if stream:
        *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert done == "[DONE]"
        choices = [msgspec.json.decode(event)["choices"][0] for event in events]
        texts = [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]
        empty = [text for text in texts if not text]
        assert len(empty) == (2 if "messages" in body else 1), "first event of a chat, and last event"
        text = "".join(texts)
    else:
        choice = response.json()["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert text == TOKENIZER.decode(tokens[:-2]) == "ok \ufffd"


def test_control_tokens_are_parsed_in_prompts_but_not_in_messages(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with([-EOS])
    text = "<|im_end|>"
    counts = []
    for content in ("a", text):
        answered(stack, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
        prompt = memoryview(stack.scheduler.received(Submit)[-1].prompt).cast("i").tolist()
        counts.append(prompt.count(EOS))
    assert counts[0] == counts[1]
    answered(stack, "/v1/completions", {"prompt": text})
    assert memoryview(stack.scheduler.received(Submit)[-1].prompt).cast("i").tolist() == [EOS]
    # This model has no BOS.
    assert refused(stack.http.post("/v1/completions", json={"prompt": ""})) == ("prompt", "empty_prompt")


# Seeds


def test_seeds_have_64_bits() -> None:
    seeds = [0, 1, 2**32, 2**32 + 1, 2**63 - 1, -1, -(2**63)]
    made = [derived_seed(seed, choice) for seed in seeds for choice in range(128)]
    assert len(set(made)) == len(made)
    assert made[::128] == seeds
    assert all(-(2**63) <= seed < 2**63 for seed in made)
    assert any(abs(seed) >= 2**62 for seed in made[1:128])


# A lost engine


def test_without_an_engine_the_server_is_ready_and_rejects_requests_only_after_a_time(
    make_stack: Callable[..., FrontendStack],
) -> None:
    stack = make_stack(limits=RequestLimits(queue_seconds=0.5))
    stack.scheduler.close()
    stack.wait_until_served(False)
    assert stack.http.get("/ready").status_code == 200
    assert refused(stack.http.post("/v1/chat/completions", json=CHAT), 503)[1] == "engine_unavailable"
    assert stack.http.get("/health").status_code == 200
