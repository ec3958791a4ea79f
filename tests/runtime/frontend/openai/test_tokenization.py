"""/tokenize, /detokenize, /tokenizer_info, /generate, /version and /openapi.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minisgl import __version__
from minisgl.wire.messages import Submit
from support.frontend import stack as frontend_stack
from support.frontend.fake_scheduler import answer_with
from support.frontend.stack import EOS, TEMPLATE, FrontendStack, ids
from support.tiny_tokenizers import byte_fallback

MESSAGES = [{"role": "user", "content": "a"}]


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


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"continue_final_message": True}, "<|im_start|>user\nHi"),
        ({"enable_thinking": False}, "{turn}<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ({"reasoning_effort": "none"}, "{turn}<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ({"reasoning_effort": "low"}, "{turn}<|im_start|>assistant\n<effort>low</effort>\n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "add_generation_prompt": False}, "{tools}{turn}"),
        ({"documents": [{"title": "a", "text": "b"}], "add_generation_prompt": False}, "{document}{turn}"),
        ({"chat_template_kwargs": {"note": "n"}, "add_generation_prompt": False}, "n{turn}"),
    ],
)
def test_tokenize_takes_all_that_changes_a_prompt(
    agent_stack: FrontendStack, change: dict[str, Any], text: str
) -> None:
    parts = {
        "turn": "<|im_start|>user\nHi<|im_end|>\n",
        "tools": '<|im_start|>system\n<tools>\n{"type": "function", "function": {"name": "f"}}\n</tools><|im_end|>\n',
        "document": "<|im_start|>document\na: b<|im_end|>\n",
    }
    for name, part in parts.items():
        text = text.replace(f"{{{name}}}", part)
    body = {"messages": [{"role": "user", "content": "Hi"}]} | change
    tokens = post(agent_stack, "/tokenize", body)["tokens"]
    assert tokens == ids(text)
    # A chat has the same prompt.
    agent_stack.scheduler.answer = answer_with([-EOS])
    post(agent_stack, "/v1/chat/completions", body)
    assert np.frombuffer(agent_stack.scheduler.received(Submit)[-1].prompt, "<i4").tolist() == tokens


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


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "Hi é"}), ("/detokenize", {"tokens": ids("Hi é")})]
)
def test_tokenization_has_a_second_name(stack: FrontendStack, path: str, body: dict[str, Any]) -> None:
    assert post(stack, f"/v1{path}", body) == post(stack, path, body)
    assert post(stack, f"/v1{path}", {}, 400)["error"]["param"] == post(stack, path, {}, 400)["error"]["param"]


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
        ("/tokenize", {"messages": MESSAGES, "tools": [{"type": "x"}]}, 400, "tools[0].type"),
        ("/tokenize", {"messages": MESSAGES, "documents": [{}]}, 400, "documents"),
        (
            "/tokenize",
            {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
            400,
            "continue_final_message",
        ),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [100_000]}, 400, "tokens"),
        ("/generate", {}, 400, "text"),
        ("/generate", {"text": "a", "input_ids": [1]}, 400, "input_ids"),
        ("/generate", {"text": "a", "image_data": "x"}, 400, "image_data"),
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
