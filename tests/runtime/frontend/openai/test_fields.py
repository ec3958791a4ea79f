"""Every field of a body has an effect: two values have different outcomes, at the scheduler or in the response."""

from __future__ import annotations

import json
import time
from operator import attrgetter
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from starlette.datastructures import Headers

from minisgl.frontend.generation.request import deadline_ms, derived_seed
from minisgl.frontend.native.requests import parse_native
from minisgl.frontend.openai.bodies import ChatBody, CompletionBody
from minisgl.frontend.openai.requests import parse_chat, parse_completion
from minisgl.wire.messages import SamplingParams, Submit
from minisgl.wire.text import SamplingDefaults
from support.frontend.fake_scheduler import answer_with
from support.frontend.field_values import (
    DIFFERING_CHAT,
    DIFFERING_COMPLETION,
    NEEDED,
    NEEDED_COMPLETION,
    NOT_AT_THE_SCHEDULER,
    NOT_AT_THE_SCHEDULER_CHAT,
    REFUSED_CHAT,
    REFUSED_COMPLETION,
    WITHOUT_EFFECT,
    WITHOUT_EFFECT_COMPLETION,
)
from support.frontend.scored_answers import scored_answer
from support.frontend.stack import EOS, TOKENIZER, FrontendStack, ids
from support.messages import without_seed

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"prompt": "Hi"}
BOTH = pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)], ids=["chat", "completion"]
)


def ask(stack: FrontendStack, path: str, body: dict[str, Any], **headers: str) -> tuple[httpx.Response, list[Submit]]:
    """Return the response and the requests at the scheduler."""
    stack.scheduler.reset()
    stack.scheduler.answer = scored_answer([*ids("one two"), -EOS])
    response = stack.http.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response, stack.scheduler.received(Submit)


def text_of(answer: dict[str, Any], choice: int = 0) -> str:
    chosen = answer["choices"][choice]
    text: str = chosen["text"] if "text" in chosen else chosen["message"]["content"]
    return text


@BOTH
@pytest.mark.parametrize(
    ("field", "values", "attribute", "outcomes"),
    [
        ("temperature", (0, 1.5), "params.temperature", (0.0, 1.5)),
        ("temperature", (None, 2), "params.temperature", (0.6, 2.0)),
        ("top_p", (None, 0.25), "params.top_p", (0.95, 0.25)),
        ("top_k", (None, 3), "params.top_k", (20, 3)),
        ("top_k", (-1, 0), "params.top_k", (0, 0)),
        ("min_p", (None, 0.5), "params.min_p", (0.0, 0.5)),
        ("seed", (7, -(2**63)), "params.seed", (7, -(2**63))),
        ("max_tokens", (1, 9), "params.max_tokens", (1, 9)),
        ("min_tokens", (None, 2), "params.min_tokens", (0, 2)),
        ("ignore_eos", (False, True), "params.ignore_eos", (False, True)),
        ("stop_token_ids", (None, [5, 6]), "params.stop_token_ids", ((), (5, 6))),
        ("presence_penalty", (None, -2), "params.presence_penalty", (0.0, -2.0)),
        ("frequency_penalty", (0.5, 2), "params.frequency_penalty", (0.5, 2.0)),
        ("repetition_penalty", (None, 1.25), "params.repetition_penalty", (1.0, 1.25)),
        ("logit_bias", ({}, {"5": 1.5, "6": -1000}), "params.logit_bias", ({}, {5: 1.5, 6: -100.0})),
        ("allowed_token_ids", (None, [5, 6]), "params.allowed_token_ids", ((), (5, 6))),
        ("bad_words", ([], ["é"]), "constraint.bad_words", ((), (tuple(ids("é")), tuple(ids(" é"))))),
        ("priority", (None, -3), "priority", (0, -3)),
        ("cache_salt", (None, "tenant"), "cache_salt", (b"", b"tenant")),
    ],
)
def test_parameters_reach_the_scheduler(
    stack: FrontendStack,
    path: str,
    body: dict[str, Any],
    field: str,
    values: tuple[Any, Any],
    attribute: str,
    outcomes: tuple[Any, Any],
) -> None:
    for value, outcome in zip(values, outcomes, strict=True):
        _, (submit,) = ask(stack, path, body | {field: value})
        assert attrgetter(attribute)(submit) == outcome


@BOTH
@pytest.mark.parametrize(
    ("change", "text", "reason"),
    [
        ({}, "one two", "stop"),
        ({"max_tokens": 2}, TOKENIZER.decode(ids("one two")[:2]), "length"),
        ({"stop": "e"}, "on", "stop"),
        ({"stop": ["x", " t"]}, "one", "stop"),
        ({"stop": "e", "include_stop_str_in_output": True}, "one", "stop"),
        ({"stop": "e", "min_tokens": len(ids("one two"))}, "one two", "stop"),
        ({"stop_regex": r"\s\w"}, "one", "stop"),
        ({"stop_regex": ["z", "[e-g]"], "include_stop_str_in_output": True}, "one", "stop"),
        ({"stop_regex": "e t.o", "stop": "tw"}, "one ", "stop"),
        ({"stop_regex": "e", "min_tokens": len(ids("one two"))}, "one two", "stop"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "one two<|im_end|>", "stop"),
        ({"skip_special_tokens": False}, "one two", "stop"),
    ],
)
def test_end_of_the_text(
    stack: FrontendStack, path: str, body: dict[str, Any], change: dict[str, Any], text: str, reason: str
) -> None:
    answer = ask(stack, path, body | change)[0].json()
    assert (text_of(answer), answer["choices"][0]["finish_reason"]) == (text, reason)


def _parsed(api: str, fields: dict[str, Any], defaults: SamplingDefaults) -> SamplingParams:
    """Parameters of a request of an API with these sampling fields."""
    if api == "native":
        return parse_native(json.dumps({"text": "x", "sampling_params": fields}).encode(), defaults).params
    if api == "chat":
        return parse_chat(json.dumps(CHAT | fields).encode(), defaults).params
    return parse_completion(json.dumps(COMPLETION | fields).encode(), defaults).params


@pytest.mark.parametrize("api", ["chat", "completion", "native"])
@pytest.mark.parametrize(
    ("name", "default", "others"),
    [
        ("temperature", 0.7, (0, 1, 2)),
        ("temperature", 0.0, (1, 0.5)),
        ("top_k", 20, (0, -1, 1)),
        ("top_k", 0, (5,)),
        ("top_p", 0.8, (1, 0.1)),
        ("min_p", 0.1, (0, 1)),
        ("repetition_penalty", 1.05, (1, 0.5)),
    ],
)
def test_the_checkpoint_gives_defaults_that_a_request_can_change(
    api: str, name: str, default: Any, others: tuple[Any, ...]
) -> None:
    defaults = SamplingDefaults(**{name: default})
    assert getattr(_parsed(api, {}, defaults), name) == default
    assert getattr(_parsed(api, {name: None}, defaults), name) == default
    for value in others:
        assert getattr(_parsed(api, {name: value}, defaults), name) == value, "0 is a value, too"


def test_the_default_number_of_tokens(stack: FrontendStack) -> None:
    _, (chat,) = ask(stack, "/v1/chat/completions", CHAT)
    assert chat.params.max_tokens == 256 - len(chat.prompt) // 4
    _, (chat,) = ask(stack, "/v1/chat/completions", CHAT | {"max_tokens": 5, "max_completion_tokens": 7})
    assert chat.params.max_tokens == 7
    # The other one is ignored.
    _, (chat,) = ask(stack, "/v1/chat/completions", CHAT | {"max_tokens": 0, "max_completion_tokens": 5})
    assert chat.params.max_tokens == 5
    assert ask(stack, "/v1/completions", COMPLETION)[1][0].params.max_tokens == 16


@BOTH
def test_the_scheduler_learns_which_requests_stream(stack: FrontendStack, path: str, body: dict[str, Any]) -> None:
    streams = [ask(stack, path, body | change)[1][0].stream for change in ({}, {"stream": False}, {"stream": True})]
    assert streams == [False, False, True]


@BOTH
def test_the_earliest_timeout_is_the_deadline(stack: FrontendStack, path: str, body: dict[str, Any]) -> None:
    def seconds(change: dict[str, Any], **headers: str) -> float:
        _, (submit,) = ask(stack, path, body | change, **headers)
        return submit.remaining_ms / 1000

    assert seconds({}, **{"x-stainless-read-timeout": "None"}) == 0
    assert 90_000 < seconds({"timeout": 100_000}) <= 100_000
    assert 90_000 < seconds({"timeout": 200_000}, **{"x-request-timeout-ms": "100000000"}) <= 100_000
    assert 90_000 < seconds({"timeout": 200_000}, **{"x-stainless-read-timeout": "100000"}) <= 100_000.5
    # A stream sends bytes long before its end.
    assert seconds({"stream": True}, **{"x-stainless-read-timeout": "50000"}) == 0
    response = stack.http.post(path, json=body, headers={"x-request-timeout-ms": "soon"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-timeout-ms")


def test_the_timeout_of_a_client_comes_before_the_deadline_that_it_causes() -> None:
    request = parse_completion(json.dumps(COMPLETION).encode(), SamplingDefaults())
    before = time.time()
    assert deadline_ms(request, Headers({"x-stainless-read-timeout": "60"})) / 1000 >= before + 60.499


@BOTH
def test_n_choices(stack: FrontendStack, path: str, body: dict[str, Any]) -> None:
    response, submits = ask(stack, path, body | {"n": 3, "seed": 11})
    seeds = {submit.params.seed for submit in submits}
    assert len(seeds) == 3
    assert seeds == {11, derived_seed(11, 1), derived_seed(11, 2)}
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == len(submits[0].prompt) // 4
    assert answer["usage"]["completion_tokens"] == 3 * (len(ids("one two")) + 1)
    _, unseeded = ask(stack, path, body | {"n": 2})
    assert len({submit.params.seed for submit in unseeded}) == 2


def test_n_choices_of_several_prompts(stack: FrontendStack) -> None:
    prompts: list[Any] = ["one", ids("two"), "three"]
    body = {"prompt": prompts, "n": 2, "echo": True, "seed": 1}
    response, submits = ask(stack, "/v1/completions", body)
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    echoed = ["one", "one", "two", "two", "three", "three"]
    assert [choice["text"] for choice in answer["choices"]] == [prompt + "one two" for prompt in echoed]
    assert answer["usage"]["prompt_tokens"] == sum(len(submit.prompt) // 4 for submit in submits) // 2


def test_model_names(stack: FrontendStack) -> None:
    for name in ("org/tiny", "default"):
        assert ask(stack, "/v1/chat/completions", CHAT | {"model": name})[0].json()["model"] == name
        assert stack.http.get(f"/v1/models/{name}").json()["id"] == "org/tiny"
    assert ask(stack, "/v1/chat/completions", CHAT | {"model": None})[0].json()["model"] == "org/tiny"


def test_template_variables_reach_the_template(stack: FrontendStack) -> None:
    prompts = []
    for variables in ({}, {"note": "two"}, {"bos_token": "x"}):
        _, (submit,) = ask(stack, "/v1/chat/completions", CHAT | {"chat_template_kwargs": variables})
        prompts.append(submit.prompt)
    assert prompts[0] != prompts[1]
    assert prompts[0] == prompts[2], "a request does not replace variables of the server"


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt", "chat_template"])
def test_template_variables_do_not_replace_fields(stack: FrontendStack, name: str) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/tokenize", CHAT), ("/v1/responses", {"input": "Hi"})):
        response = stack.http.post(path, json=body | {"chat_template_kwargs": {name: None}})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("chat_template_kwargs", "invalid_value")
        assert name in error["message"]


def test_tool_messages_reach_the_template(stack: FrontendStack) -> None:
    messages = [*CHAT["messages"], {"role": "tool", "content": "42", "tool_call_id": "1"}]
    _, (submit,) = ask(stack, "/v1/chat/completions", {"messages": messages})
    text = TOKENIZER.decode(np.frombuffer(submit.prompt, "<i4").tolist(), skip_special_tokens=False)
    assert "<|im_start|>tool\n42<|im_end|>" in text


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_named_in_a_header(
    stack: FrontendStack, path: str, body: dict[str, Any], stream: bool
) -> None:
    change = {"mirostat": {}, "x\r\ny": 1, "stream": stream, "user": "me"}
    response, _ = ask(stack, path, body | change)
    assert response.headers["x-ignored-params"] == "mirostat, ?"
    response, _ = ask(stack, path, body | {"stream": stream})
    assert "x-ignored-params" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_nested_fields_are_named_in_a_header(stack: FrontendStack, stream: bool) -> None:
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    # Null fields ask for nothing, as in messages that the official client returns.
    turn = {"role": "assistant", "content": "Ho", "refusal": None, "annotations": []}
    messages = [{"role": "user", "content": [part], "mood": "good"}, turn, *CHAT["messages"]]
    body = {"messages": messages, "stream": stream, "stream_options": {"include_usage": True, "every": 1}, "gone": None}
    response, _ = ask(stack, "/v1/chat/completions", body)
    assert response.headers["x-ignored-params"].split(", ") == [
        "messages[0].content[0].cache_control",
        "messages[0].mood",
        "messages[1].annotations",
        "stream_options.every",
    ]
    response, _ = ask(stack, "/generate", {"text": "Hi", "sampling_params": {"n": 1, "regexp": "a"}})
    assert response.headers["x-ignored-params"] == "sampling_params.regexp"
    response = stack.http.post("/tokenize", json={"messages": [CHAT["messages"][0] | {"x" * 100: 1}], "y": 1})
    assert response.headers["x-ignored-params"] == f"messages[0].{'x' * 64}, y"


@BOTH
def test_strict_handling_rejects_unknown_fields(stack: FrontendStack, path: str, body: dict[str, Any]) -> None:
    strict = {"prefer": "respond-async, handling=strict"}
    ask(stack, path, body | {"user": "me", "unknown": None}, **strict)
    stack.scheduler.reset()
    response = stack.http.post(path, json=body | {"max_token": 5}, headers=strict)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("max_token", "unknown_parameter")
    assert not stack.scheduler.received(Submit)
    in_lines = [("prefer", "respond-async"), ("prefer", "handling=strict")]
    refused = stack.http.post("/tokenize", json={"prompt": "a", "promt": "b"}, headers=in_lines)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "promt")
    response, _ = ask(stack, path, body | {"max_token": 5}, prefer="handling=lenient")
    assert response.headers["x-ignored-params"] == "max_token"


# Log-probabilities


def test_logprobs_of_a_chat(stack: FrontendStack) -> None:
    path = "/v1/chat/completions"
    assert ask(stack, path, CHAT | {"logprobs": False})[0].json()["choices"][0]["logprobs"] is None
    for top in (None, 0, 2):
        response, (submit,) = ask(stack, path, CHAT | {"logprobs": True, "top_logprobs": top})
        assert submit.params.logprobs == (top or 0)
        content = response.json()["choices"][0]["logprobs"]["content"]
        assert [entry["logprob"] for entry in content] == [-token / 8 for token in ids("one two")]
        assert bytes(byte for entry in content for byte in entry["bytes"]) == b"one two"
        assert [len(entry["top_logprobs"]) for entry in content] == [top or 0] * len(content)
    assert content[0]["top_logprobs"][1] == {"token": "b", "logprob": -2.0, "bytes": [98]}


def test_bytes_of_partial_characters(stack: FrontendStack) -> None:
    stack.scheduler.answer = scored_answer([*ids("🙂"), -EOS])
    body = CHAT | {"logprobs": True}
    content = stack.http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]) == "🙂".encode()
    body = {"prompt": "a", "logprobs": 0}
    logprobs = stack.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "".join(f"bytes:\\x{byte:02x}" for byte in "🙂".encode())
    assert logprobs["text_offset"] == [0] * len(logprobs["tokens"])


def test_logprobs_of_a_completion(stack: FrontendStack) -> None:
    assert ask(stack, "/v1/completions", COMPLETION)[0].json()["choices"][0]["logprobs"] is None
    for top in (0, 2):
        response, (submit,) = ask(stack, "/v1/completions", COMPLETION | {"logprobs": top})
        assert (submit.params.logprobs, submit.params.prompt_logprobs) == (top, None)
        logprobs = response.json()["choices"][0]["logprobs"]
        tokens = ids("one two")
        assert "".join(logprobs["tokens"]) == "one two"
        assert logprobs["token_logprobs"] == [-token / 8 for token in tokens]
        assert [len(tops) for tops in logprobs["top_logprobs"]] == [top + 1] * len(tokens)
        assert logprobs["text_offset"] == [len(TOKENIZER.decode(tokens[:n])) for n in range(len(tokens))]


@pytest.mark.parametrize("prompt", ["Hello é🙂 world", ids("Hello é🙂 world")], ids=["text", "ids"])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(stack: FrontendStack, prompt: Any, stream: bool) -> None:
    """As lm-eval scores: the tokens of the prompt, and one more."""
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    response, (submit,) = ask(stack, "/v1/completions", body | {"stream": stream})
    assert (submit.params.logprobs, submit.params.prompt_logprobs, submit.params.max_tokens) == (1, 1, 1)
    if stream:
        parts = [part["choices"][0] for part in events(response) if part["choices"]]
        text = "".join(part["text"] for part in parts)
        logprobs = {
            key: [value for part in parts if part["logprobs"] for value in part["logprobs"][key]]
            for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
    else:
        choice = response.json()["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
    tokens = [*ids("Hello é🙂 world"), ids("one two")[0]]
    assert text == TOKENIZER.decode(tokens)
    assert logprobs["token_logprobs"] == [None, *(-token / 8 for token in tokens[1:])]
    assert logprobs["top_logprobs"][0] is None
    assert all(isinstance(tops, dict) for tops in logprobs["top_logprobs"][1:])
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[-1] == len("Hello é🙂 world")


def test_scoring_a_prompt_without_generation(stack: FrontendStack) -> None:
    body = {"prompt": ["Hello", "x"], "echo": True, "logprobs": 0, "max_tokens": 0}
    response, submits = ask(stack, "/v1/completions", body)
    assert [submit.params.max_tokens for submit in submits] == [1, 1]
    answer = response.json()
    assert [choice["text"] for choice in answer["choices"]] == ["Hello", "x"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(ids("Hello"))
    assert answer["usage"]["completion_tokens"] == 0


def test_missing_logprobs_of_the_engine_are_an_error(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with([*ids("one"), -EOS])
    for body in ({"prompt": "a", "logprobs": 1}, {"prompt": "ab", "logprobs": 1, "echo": True}):
        response = stack.http.post("/v1/completions", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")


# Streams


def events(response: httpx.Response) -> list[dict[str, Any]]:
    *data, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [msgspec.json.decode(event) for event in data]


@BOTH
def test_usage_in_streams(stack: FrontendStack, path: str, body: dict[str, Any]) -> None:
    def parts(options: dict[str, Any] | None) -> list[dict[str, Any]]:
        return events(ask(stack, path, body | {"stream": True, "stream_options": options})[0])

    assert all("usage" not in part for part in parts(None))
    assert all("usage" not in part for part in parts({"include_usage": False, "continuous_usage_stats": True}))
    *before, last = parts({"include_usage": True})
    assert all(part["usage"] is None for part in before)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], len(ids("one two")) + 1)
    *running, final = parts({"include_usage": True, "continuous_usage_stats": True})
    counts = [part["usage"]["completion_tokens"] for part in running]
    assert counts == sorted(counts)
    assert counts[-1] == final["usage"]["completion_tokens"] == len(ids("one two")) + 1


@BOTH
def test_every_choice_of_a_stream_has_one_end(stack: FrontendStack, path: str, body: dict[str, Any]) -> None:
    response, _ = ask(stack, path, body | {"stream": True, "n": 3, "logprobs": 1 if "prompt" in body else True})
    parts = [part["choices"][0] for part in events(response)]
    for index in range(3):
        mine = [part for part in parts if part["index"] == index]
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + ["stop"]
        texts = [part["text"] if "text" in part else part["delta"].get("content", "") for part in mine]
        assert "".join(texts) == "one two"
    assert len({part["id"] for part in events(response)}) == 1


@pytest.mark.parametrize(
    "arguments", ['{"a": 1}', "{", "[1]", '{"a": %s}' % ("9" * 40), '{"a":' * 300 + "1" + "}" * 300]
)
def test_unusual_tool_calls_are_passed_to_the_template(stack: FrontendStack, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    response = stack.http.post("/v1/chat/completions", json={"messages": messages})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "chat_template_error")


def test_template_variables_are_limited_to_64_bit_integers(stack: FrontendStack) -> None:
    path = "/v1/chat/completions"
    largest = 2**63 - 1
    _, (submit,) = ask(stack, path, CHAT | {"chat_template_kwargs": {"note": largest}})
    assert str(largest) in TOKENIZER.decode(np.frombuffer(submit.prompt, "<i4").tolist())
    stack.scheduler.reset()
    for number in (largest + 1, -largest - 2, 10**30):
        response = stack.http.post(path, json=CHAT | {"chat_template_kwargs": {"note": number}})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("chat_template_kwargs", "invalid_value")
    assert not stack.scheduler.received(Submit)


# All fields


def outcome(stack: FrontendStack, path: str, body: dict[str, Any]) -> Any:
    """Return all that a field can change, at the scheduler and in the response, without values that always differ."""
    response, submits = ask(stack, path, body)
    requests = [
        msgspec.structs.replace(
            without_seed(submit, submit.params.seed if body.get("seed") else 0),
            remaining_ms=bool(submit.remaining_ms),
        )
        for submit in submits
    ]
    assert "x-ignored-params" not in response.headers
    if body.get("stream"):
        # The number of tokens in one event depends on timing.
        return requests, [part["usage"] for part in events(response) if part.get("usage")]
    answer = response.json()
    return requests, answer["choices"], answer["usage"], answer["model"]


CASES = [
    ("/v1/chat/completions", CHAT, ChatBody, DIFFERING_CHAT, REFUSED_CHAT, WITHOUT_EFFECT),
    (
        *("/v1/completions", COMPLETION, CompletionBody),
        *(DIFFERING_COMPLETION, REFUSED_COMPLETION, WITHOUT_EFFECT_COMPLETION),
    ),
]


@pytest.mark.parametrize(
    ("path", "body", "kind", "differing", "refused", "without_effect"), CASES, ids=["chat", "text"]
)
def test_every_field_has_an_effect_or_is_rejected_by_name(
    agent_stack: FrontendStack,
    path: str,
    body: dict[str, Any],
    kind: Any,
    differing: dict[str, tuple[Any, Any]],
    refused: dict[str, tuple[Any, Any]],
    without_effect: dict[str, tuple[Any, Any]],
) -> None:
    stack = agent_stack
    parse, behind = (
        (parse_chat, NOT_AT_THE_SCHEDULER_CHAT) if kind is ChatBody else (parse_completion, NOT_AT_THE_SCHEDULER)
    )
    assert sorted([*differing, *behind, *refused, *without_effect]) == sorted(kind.__struct_encode_fields__)
    for name, (one, other) in behind.items():
        start = body | NEEDED.get(name, {})
        requests = [parse(json.dumps(start | {name: value}).encode(), SamplingDefaults()) for value in (one, other)]
        assert requests[0] != requests[1], name
    for name, (one, other) in differing.items():
        start = body | (NEEDED if kind is ChatBody else NEEDED_COMPLETION).get(name, {})
        first = outcome(stack, path, start | {name: one})
        assert first == outcome(stack, path, start | {name: one}), f"{name}: nothing else differs"
        assert first != outcome(stack, path, start | {name: other}), name
    plain = outcome(stack, path, body)
    for table, code in ((refused, "unsupported_parameter"), (without_effect, "invalid_value")):
        for name, (fine, wrong) in table.items():
            assert outcome(stack, path, body | {name: fine}) == plain, name
            stack.scheduler.reset()
            response = stack.http.post(path, json=body | {name: wrong})
            assert response.status_code == 400, name
            error = response.json()["error"]
            assert (error["param"], error["code"]) == (name, code)
            assert not stack.scheduler.received(Submit)


def test_chats_and_completions_know_the_fields_of_each_other() -> None:
    """A field that is not known is ignored, so it may not be one that changes the other answer."""
    assert {*ChatBody.__struct_fields__} == {*CompletionBody.__struct_fields__}


@pytest.mark.parametrize(("path", "body", "kind"), [case[:3] for case in CASES], ids=["chat", "text"])
def test_null_equals_leaving_a_field_out(stack: FrontendStack, path: str, body: dict[str, Any], kind: Any) -> None:
    optional = [name for name in kind.__struct_encode_fields__ if name not in body]
    plain = outcome(stack, path, body)
    assert outcome(stack, path, body | dict.fromkeys(optional)) == plain
    for name in optional:
        assert outcome(stack, path, body | {name: None}) == plain, name
