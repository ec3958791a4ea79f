"""/tokenize, /detokenize, /tokenizer_info, /generate, /version and /openapi.json."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from minisgl import __version__
from minisgl.frontend.native.bodies import NativeSampling
from minisgl.wire.messages import Submit
from support.frontend import stack as frontend_stack
from support.frontend.fake_scheduler import answer_with
from support.frontend.scored_answers import scored_answer
from support.frontend.stack import EOS, TEMPLATE, TOKENIZER, FrontendStack, ids
from support.tiny_tokenizers import byte_fallback


def post(stack: FrontendStack, path: str, body: dict[str, Any], status: int = 200) -> Any:
    response = stack.http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def test_tokenize_a_text(stack: FrontendStack) -> None:
    answer = post(stack, "/tokenize", {"prompt": "Hello é", "return_token_strs": True, "model": "org/tiny"})
    assert answer["tokens"] == ids("Hello é")
    assert (answer["count"], answer["max_model_len"]) == (len(ids("Hello é")), 256)
    assert "".join(answer["token_strs"]) == "Hello bytes:\\xc3bytes:\\xa9"
    assert post(stack, "/tokenize", {"prompt": ""})["tokens"] == []


@pytest.mark.parametrize("begun", [True, False])
def test_tokenize_messages(stack: FrontendStack, begun: bool) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": begun}
    text = "<|im_start|>user\nHi<|im_end|>\n" + "<|im_start|>assistant\n" * begun
    assert post(stack, "/tokenize", body)["tokens"] == ids(text)


def test_special_tokens(make_stack: Callable[..., FrontendStack], monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a text has those of the tokenizer, and messages have those of the template."""
    tokenizer = byte_fallback()
    monkeypatch.setattr(frontend_stack, "TOKENIZER", tokenizer)
    stack = make_stack()
    bos = tokenizer.token_to_id("<s>")
    for body, default in (({"prompt": "Hi"}, True), ({"messages": [{"role": "user", "content": "Hi"}]}, False)):
        bare = post(stack, "/tokenize", body | {"add_special_tokens": False})["tokens"]
        assert bare and bos not in bare
        assert post(stack, "/tokenize", body | {"add_special_tokens": True})["tokens"] == [bos, *bare]
        assert post(stack, "/tokenize", body)["tokens"] == [bos, *bare][not default :]


def test_template_variables_reach_the_template_of_tokenize(stack: FrontendStack) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert post(stack, "/tokenize", body)["tokens"] == ids(text)
    assert post(stack, "/tokenize", body | {"chat_template_kwargs": {"note": "Be brief."}})["tokens"] == ids(
        f"Be brief.{text}"
    )


def test_detokenize(stack: FrontendStack) -> None:
    text = "<|im_start|>user\nHi é"
    assert post(stack, "/detokenize", {"tokens": ids(text)}) == {"prompt": text, "text": text}
    assert post(stack, "/detokenize", {"tokens": []}) == {"prompt": "", "text": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "bad"}]}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [100_000]}, 400, "tokens"),
        ("/generate", {}, 400, "text"),
        ("/generate", {"text": "a", "input_ids": [1]}, 400, "input_ids"),
        ("/generate", {"text": "a", "return_logprob": True}, 400, "return_logprob"),
        ("/generate", {"text": "a", "sampling_params": {"regex": "(?=x)"}}, 400, "sampling_params.regex"),
        ("/generate", {"text": "a", "sampling_params": {"temperature": -1}}, 400, "sampling_params.temperature"),
        ("/generate", {"input_ids": [5, "a"]}, 400, "input_ids"),
    ],
)
def test_invalid_bodies(stack: FrontendStack, path: str, body: dict[str, Any], status: int, param: str) -> None:
    assert post(stack, path, body, status)["error"]["param"] == param


def test_tokenizer_info(stack: FrontendStack) -> None:
    info = stack.http.get("/tokenizer_info").json()
    assert info["chat_template"] == TEMPLATE
    assert info["model_max_length"] == 256
    assert {"bos_token", "eos_token", "pad_token"} < info.keys()


def test_version(stack: FrontendStack) -> None:
    assert stack.http.get("/version").json() == {"version": __version__}


def test_openapi_describes_what_is_checked(stack: FrontendStack) -> None:
    document = stack.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert {"/v1/chat/completions", "/v1/completions", "/generate", "/tokenize"} < document["paths"].keys()
    assert {"messages", "n", "logit_bias", "stop"} < schemas["ChatBody"]["properties"].keys()
    assert schemas["ChatBody"]["required"] == ["messages"]


def test_generate(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with([*ids("one two"), -EOS], cached=1)
    answer = post(stack, "/generate", {"text": "Hi", "sampling_params": {"temperature": 0, "max_new_tokens": 9}})
    assert answer["text"] == "one two"
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "stop"}
    counts = (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"])
    assert counts == (len(ids("Hi")), len(ids("one two")) + 1, 1)
    (submit,) = stack.scheduler.received(Submit)
    assert (submit.temperature, submit.max_tokens) == (0, 9)


SAMPLING: dict[str, tuple[Any, Any]] = {
    "max_new_tokens": (1, 2),
    "min_new_tokens": (None, 2),
    "temperature": (0, 1),
    "top_p": (0.5, 1),
    "top_k": (-1, 1),
    "min_p": (0, 0.5),
    "sampling_seed": (1, 2),
    "n": (1, 2),
    "stop": (None, "e"),
    "stop_token_ids": ([], [5]),
    "ignore_eos": (False, True),
    "presence_penalty": (0, 1),
    "frequency_penalty": (0, 1),
    "repetition_penalty": (1, 2),
    "no_stop_trim": (False, True),
    "json_schema": ('{"type": "integer"}', {"type": "string"}),
    "regex": (None, "a+"),
    "ebnf": (None, 'root ::= "a"'),
    "structural_tag": (None, {"format": {"type": "any_text"}}),
}
"""Pairs of values that must have different outcomes."""


def test_every_sampling_parameter_of_generate_has_an_effect_or_is_rejected_by_name(stack: FrontendStack) -> None:
    def outcome(name: str, value: Any) -> Any:
        sampling = {"stop": "e"} if name == "no_stop_trim" else {}
        stack.scheduler.reset()
        stack.scheduler.answer = answer_with([*ids("one two"), -EOS])
        answers = post(stack, "/generate", {"text": "Hi", "sampling_params": sampling | {name: value}})
        answers = answers if isinstance(answers, list) else [answers]
        submits = stack.scheduler.received(Submit)
        seeds = [submit.seed for submit in submits] if name == "sampling_seed" else []
        requests = [msgspec.structs.replace(submit, id=b"", seed=0) for submit in submits]
        return requests, seeds, [(answer["text"], answer["meta_info"]["finish_reason"]) for answer in answers]

    assert sorted(SAMPLING) == sorted(NativeSampling.__struct_fields__)
    for name, (one, other) in SAMPLING.items():
        assert outcome(name, one) == outcome(name, one), f"{name}: nothing else differs"
        assert outcome(name, one) != outcome(name, other), name


def test_generate_lists(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with(ids("one"))
    sampling = {"n": 2, "max_new_tokens": 1, "sampling_seed": 3}
    answers = post(stack, "/generate", {"input_ids": [ids("a"), ids("b")], "sampling_params": sampling})
    assert len(answers) == 4
    assert answers[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
    assert len(post(stack, "/generate", {"text": ["a"], "sampling_params": {"max_new_tokens": 1}})) == 1


def test_generate_streams_the_whole_text_so_far(stack: FrontendStack) -> None:
    stack.scheduler.answer = scored_answer([*ids("one two"), -EOS])
    response = stack.http.post("/generate", json={"text": "Hi", "stream": True})
    *parts, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    decoded = [msgspec.json.decode(part) for part in parts]
    assert decoded[-1]["text"] == "one two"
    assert decoded[-1]["meta_info"]["finish_reason"] == {"type": "stop"}
    assert all(last["text"].startswith(part["text"]) for part, last in itertools.pairwise(decoded))


def test_generate_of_a_prompt_streams_plain_text(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with([TOKENIZER.token_to_id("Ċ"), *ids("on")])
    response = stack.http.post("/generate", json={"prompt": "Hi", "max_tokens": 3, "ignore_eos": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    text = "".join(
        "\n".join(line.removeprefix("data: ") for line in event.split("\n"))
        for event in response.text.split("\n\n")[:-2]
    )
    assert text.startswith("\n") and response.text.endswith("data: [DONE]\n\n")
    (submit,) = stack.scheduler.received(Submit)
    assert (submit.temperature, submit.max_tokens, submit.ignore_eos) == (0, 3, True)
