from __future__ import annotations

import base64
from array import array
from typing import Any

import numpy as np
import openai
import pytest

from minisgl.frontend.pooling.bodies import MAX_INPUTS
from minisgl.wire.text import FromTokenizer, Generate, TextFailed
from support.frontend.pooled import SIZE, embedding, model, pooled, texts_of
from support.frontend.scripted import ScriptedStack

TEXTS = ["the fox", "a dog", "a much longer text"]


@pytest.fixture
def embeds(scripted: ScriptedStack) -> ScriptedStack:
    scripted.serve(model("embed"))
    scripted.script = pooled()
    return scripted


def vectors(body: dict[str, Any]) -> list[list[float]]:
    assert [item["index"] for item in body["data"]] == [*range(len(body["data"]))]
    assert {item["object"] for item in body["data"]} == {"embedding"}
    return [item["embedding"] for item in body["data"]]


def post(stack: ScriptedStack, **body: Any) -> dict[str, Any]:
    response = stack.http.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def error(stack: ScriptedStack, path: str = "/v1/embeddings", **body: Any) -> dict[str, Any]:
    response = stack.http.post(path, json=body)
    assert response.status_code == 400, response.text
    found: dict[str, Any] = response.json()["error"]
    return found


def test_embeddings_come_in_the_order_of_their_texts(embeds: ScriptedStack) -> None:
    embeds.script = pooled(last_first=len(TEXTS))
    body = post(embeds, input=TEXTS, model="org/tiny", user="u")
    assert vectors(body) == [pytest.approx(embedding(text)) for text in TEXTS]
    tokens = sum(map(len, TEXTS))
    assert (body["object"], body["model"]) == ("list", "org/tiny")
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == tokens
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": len(TEXTS)}
    assert body["id"].startswith("embd-")


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("fox", ["fox"]),
        ([5, 6], ["[5, 6]"]),
        ([[5, 6], [7]], ["[5, 6]", "[7]"]),
        (["fox", [7]], ["fox", "[7]"]),
        ("", [""]),
    ],
)
def test_an_input_is_a_text_token_ids_or_a_list_of_either(embeds: ScriptedStack, given: Any, texts: list[str]) -> None:
    assert vectors(post(embeds, input=given)) == [pytest.approx(embedding(text)) for text in texts]


def test_base64_has_the_same_numbers(embeds: ScriptedStack) -> None:
    floats = vectors(post(embeds, input=TEXTS))
    encoded = vectors(post(embeds, input=TEXTS, encoding_format="base64"))
    decoded = [array("f", base64.b64decode(str(item))).tolist() for item in encoded]
    assert decoded == floats


def test_fewer_dimensions_are_the_first_ones_as_a_unit_vector(embeds: ScriptedStack) -> None:
    whole = np.array(vectors(post(embeds, input=TEXTS)))
    short = np.array(vectors(post(embeds, input=TEXTS, dimensions=2)))
    np.testing.assert_allclose(short, whole[:, :2] / np.linalg.norm(whole[:, :2], axis=1, keepdims=True), rtol=1e-6)
    assert vectors(post(embeds, input=TEXTS, dimensions=SIZE)) == whole.tolist()
    unit = np.array(vectors(post(embeds, input=TEXTS, normalize=True)))
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-6)


def test_more_dimensions_than_the_model_has_are_an_error(embeds: ScriptedStack) -> None:
    failed = error(embeds, input="a", dimensions=SIZE + 1)
    assert failed["param"] == "dimensions"
    assert f"have {SIZE} numbers" in failed["message"]


def test_many_long_embeddings_are_complete(embeds: ScriptedStack) -> None:
    embeds.serve(model("embed", 1024, revision="long"))
    embeds.script = pooled(lambda text: embedding(text, 1024))
    texts = [f"text {i}" for i in range(MAX_INPUTS)]
    found = vectors(post(embeds, input=texts, encoding_format="base64"))
    assert [array("f", base64.b64decode(str(item)))[0] for item in found] == [sum(text.encode()) for text in texts]
    assert error(embeds, input=[*texts, "more"])["param"] == "input"


@pytest.mark.parametrize("encoding", [openai.NOT_GIVEN, "float"])
def test_the_openai_client_reads_them(embeds: ScriptedStack, encoding: Any) -> None:
    with openai.OpenAI(base_url=f"{embeds.url}/v1", api_key="none") as client:
        answer = client.embeddings.create(model="org/tiny", input=TEXTS, encoding_format=encoding)
    assert [item.embedding for item in answer.data] == [pytest.approx(embedding(text)) for text in TEXTS]
    assert answer.usage.total_tokens == sum(map(len, TEXTS))


def test_messages_are_one_text(embeds: ScriptedStack) -> None:
    messages = [{"role": "user", "content": "the fox"}]
    assert vectors(post(embeds, messages=messages)) == [pytest.approx(embedding("the fox"))]
    rendering = embeds.last(Generate).options.rendering
    assert not rendering.add_special_tokens and not rendering.add_generation_prompt
    assert error(embeds, messages=messages, input="a")["param"] == "messages"
    assert error(embeds, messages=messages, prompt_name="query")["param"] == "messages"
    assert error(embeds)["param"] == "input"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt_name": "query"}, "query"),
        ({"input_type": "query"}, "search_query"),
        ({"input_type": "passage"}, "search_document"),
        ({"input_type": "search_document"}, "search_document"),
        ({"input_type": "STS"}, "STS"),
        ({}, ""),
    ],
)
def test_fields_reach_the_tokenizer(embeds: ScriptedStack, fields: dict[str, str], name: str) -> None:
    post(embeds, input="a", truncate_prompt_tokens=-1, truncation_side="left", priority=3, **fields)
    request = embeds.last(Generate)
    assert request.pooling is not None and request.pooling.prompt_name == name
    options = request.options
    assert (options.truncate_prompt_tokens, options.truncation_side, options.priority) == (-1, "left", 3)
    post(embeds, input="a", add_special_tokens=False)
    options = embeds.last(Generate).options
    assert (options.truncate_prompt_tokens, options.truncation_side) == (None, "right")
    assert not options.rendering.add_special_tokens


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [-1]}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "prompt_name": "a", "input_type": "b"}, "input_type"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        ({"input": "a", "stream": True}, "stream"),
    ],
)
def test_a_bad_field_is_named(embeds: ScriptedStack, body: dict[str, Any], param: str) -> None:
    assert error(embeds, **body)["param"] == param


def test_unknown_fields_are_named_in_a_header(embeds: ScriptedStack) -> None:
    response = embeds.http.post("/v1/embeddings", json={"input": "a", "colour": "red"})
    assert response.headers["x-ignored-params"] == "colour"
    assert embeds.http.post("/v1/embeddings", json={"input": "a", "model": "gpt"}).status_code == 404


def test_the_error_of_one_text_names_it(embeds: ScriptedStack) -> None:
    answer = pooled()

    def script(request: Generate) -> list[FromTokenizer]:
        if texts_of(request) != TEXTS[2]:
            return [*answer(request)]
        return [TextFailed(id=request.id, code="context_length_exceeded", message="maximum context length is 2 tokens")]

    embeds.script = script
    failed = error(embeds, input=TEXTS)
    assert failed["message"] == "text 2: maximum context length is 2 tokens"
    assert failed["code"] == "context_length_exceeded"
    assert error(embeds, input=TEXTS[2])["message"] == "maximum context length is 2 tokens"


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_json_does_not_have_are_an_error(embeds: ScriptedStack, number: float) -> None:
    embeds.script = pooled(lambda text: [0.0, number if text == "b" else 1.0])
    response = embeds.http.post("/v1/embeddings", json={"input": ["a", "b"]})
    assert response.status_code == 500
    assert "output of text 1" in response.json()["error"]["message"]


def test_a_missing_output_is_an_error(embeds: ScriptedStack) -> None:
    embeds.script = pooled(lambda _: [])
    assert embeds.http.post("/v1/embeddings", json={"input": "a"}).status_code == 500


def test_metrics_count_prompts_and_no_generated_tokens(embeds: ScriptedStack) -> None:
    def samples() -> dict[str, float]:
        lines = embeds.http.get("/metrics").text.splitlines()
        pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {name.partition("{")[0] + name[name.find("finished_reason") :]: float(value) for name, _, value in pairs}

    before = samples()
    post(embeds, input=TEXTS)
    after = samples()

    def grown(name: str) -> float:
        found = [key for key in after if key.startswith(name)]
        assert found, name
        return sum(after[key] - before[key] for key in found)

    tokens = sum(map(len, TEXTS))
    assert grown("vllm:prompt_tokens_total") == tokens
    assert grown("vllm:request_prompt_tokens_sum") == tokens
    assert grown("vllm:prompt_tokens_cached_total") == len(TEXTS)
    assert grown("vllm:request_success_total") == len(TEXTS)
    assert grown("vllm:e2e_request_latency_seconds_count") == len(TEXTS)
    for name in ("request_generation_tokens", "request_max_num_generation_tokens", "request_params_max_tokens"):
        assert grown(f"vllm:{name}_count") == 0
    assert grown("vllm:time_to_first_token_seconds_count") == 0
