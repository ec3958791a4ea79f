from __future__ import annotations

from typing import Any

import pytest

from minisgl.config import Task
from minisgl.wire.text import Generate
from support.frontend.pooled import model, pooled
from support.frontend.scripted import ScriptedStack

DOCUMENTS = ["a dog", "the fox", "a cow", "fox"]
SCORES = {"fox|a dog": 0.25, "fox|the fox": 0.75, "fox|a cow": 0.125, "fox|fox": 0.75}
RANKED = [1, 3, 0, 2]
"""Equal scores keep the order of their documents."""


def score(text: str) -> list[float]:
    return [SCORES.get(text, 0.5)]


@pytest.fixture
def ranks(scripted: ScriptedStack) -> ScriptedStack:
    scripted.serve(model("rerank", 1))
    scripted.script = pooled(score)
    return scripted


@pytest.fixture
def classifies(scripted: ScriptedStack) -> ScriptedStack:
    scripted.serve(model("classify", 3, labels=("bad", "good")))
    scripted.script = pooled(lambda text: [0.5, 0.25, 0.25] if text == "no" else [0.125, 0.75, 0.125])
    return scripted


def post(stack: ScriptedStack, path: str, **body: Any) -> Any:
    response = stack.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def error(stack: ScriptedStack, path: str, **body: Any) -> Any:
    response = stack.http.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.json()


def test_documents_are_sorted_by_their_scores(ranks: ScriptedStack) -> None:
    ranks.script = pooled(score, last_first=len(DOCUMENTS))
    answer = post(ranks, "/v1/rerank", query="fox", documents=DOCUMENTS, model="org/tiny")
    assert [result["index"] for result in answer["results"]] == RANKED
    assert [result["relevance_score"] for result in answer["results"]] == [0.75, 0.75, 0.25, 0.125]
    assert [result["document"]["text"] for result in answer["results"]] == [DOCUMENTS[i] for i in RANKED]
    tokens = sum(map(len, SCORES))
    assert answer["usage"]["total_tokens"] == answer["meta"]["tokens"]["input_tokens"] == tokens
    assert answer["model"] == "org/tiny"


def test_the_second_version_returns_documents_only_when_asked(ranks: ScriptedStack) -> None:
    body: dict[str, Any] = {"query": {"text": "fox"}, "documents": [{"text": text} for text in DOCUMENTS], "top_n": 2}
    answer = post(ranks, "/v2/rerank", **body)
    assert answer["results"] == [{"index": i, "relevance_score": 0.75} for i in RANKED[:2]]
    assert answer["meta"]["api_version"] == {"version": "2"}
    assert "document" in post(ranks, "/v2/rerank", **body, return_documents=True)["results"][0]
    assert "document" not in post(ranks, "/rerank", **body, return_documents=False)["results"][0]
    assert len(post(ranks, "/rerank", **body | {"top_n": 0})["results"]) == len(DOCUMENTS)


def test_fields_of_a_rerank_reach_the_tokenizer(ranks: ScriptedStack) -> None:
    post(ranks, "/rerank", query="fox", documents=["dog"], max_tokens_per_doc=9, instruct="Find animals")
    pooling = ranks.last(Generate).pooling
    assert pooling is not None
    assert (pooling.second_text, pooling.second_text_tokens, pooling.instruction) == ("dog", 9, "Find animals")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": "fox"}, "documents"),
        ({"documents": ["dog"]}, "query"),
        ({"query": "fox", "documents": []}, "documents"),
        ({"query": "fox", "documents": [{"title": "dog"}]}, "documents[0].text"),
        ({"query": "fox", "documents": ["dog"], "top_n": -1}, "top_n"),
        ({"query": "fox", "documents": ["dog"], "rank_fields": ["title"]}, "rank_fields"),
        ({"query": "fox", "documents": ["dog"], "instruct": "a", "instruction": "b"}, "instruct"),
        ({"query": "fox", "texts": ["dog"], "raw_scores": True}, "raw_scores"),
    ],
)
def test_errors_of_a_rerank_have_what_each_client_looks_for(
    ranks: ScriptedStack, body: dict[str, Any], param: str
) -> None:
    failed = error(ranks, "/rerank", **body)
    assert failed["error"]["param"] == param
    assert failed["error"]["message"] == failed["message"] == failed["detail"]


def test_tei_gets_its_own_shape_of_a_rerank(ranks: ScriptedStack) -> None:
    body = {"query": "fox", "texts": DOCUMENTS, "raw_scores": False}
    scores = [0.75, 0.75, 0.25, 0.125]
    assert post(ranks, "/rerank", **body) == [{"index": i, "score": s} for i, s in zip(RANKED, scores, strict=True)]
    answer = post(ranks, "/rerank", **body, return_text=True, truncate=True, truncation_direction="Left")
    assert [item["text"] for item in answer] == [DOCUMENTS[i] for i in RANKED]
    options = ranks.last(Generate).options
    assert (options.truncate_prompt_tokens, options.truncation_side) == (-1, "left")


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    ("first", "second"),
    [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")],
)
def test_scores_keep_the_order_of_the_texts(ranks: ScriptedStack, path: str, first: str, second: str) -> None:
    answer = post(ranks, path, **{first: "fox", second: DOCUMENTS})
    assert [item["score"] for item in answer["data"]] == [0.25, 0.75, 0.125, 0.75]
    assert [(item["index"], item["object"]) for item in answer["data"]] == [(i, "score") for i in range(4)]
    pairs = post(ranks, path, **{first: ["fox", "dog"], second: ["the fox", "fox"]})
    assert [item["score"] for item in pairs["data"]] == [0.75, 0.5]
    assert post(ranks, path, **{first: ["fox"], second: "a cow"})["data"][0]["score"] == 0.125


def test_a_model_that_embeds_scores_pairs_by_the_cosine_of_their_embeddings(scripted: ScriptedStack) -> None:
    vectors = {"x": [2.0, 0.0], "y": [0.0, 3.0], "xy": [1.0, 1.0], "-x": [-5.0, 0.0]}
    scripted.serve(model("embed", 2))
    scripted.script = pooled(lambda text: vectors[text])
    one = post(scripted, "/score", text_1="x", text_2=["x", "y", "xy", "-x"])
    assert [item["score"] for item in one["data"]] == pytest.approx([1, 0, 0.5**0.5, -1])
    assert one["usage"]["total_tokens"] == len("x" + "x" + "y" + "xy" + "-x")
    many = post(scripted, "/v1/score", text_1=["x", "xy"], text_2=["-x", "xy"], prompt_name="query")
    assert [item["score"] for item in many["data"]] == pytest.approx([-1, 1])
    last = scripted.last(Generate).pooling
    assert last is not None and not last.prompt_name, "the prompt of queries is not that of documents"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_1": "a"}, "text_2"),
        ({"text_2": "a"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": "a"}, "text_1"),
        ({"text_1": "a", "queries": "a", "text_2": "a"}, "queries"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": "a", "text_2": "b", "softmax": False}, "softmax"),
    ],
)
def test_bad_texts_to_score_are_named(ranks: ScriptedStack, body: dict[str, Any], param: str) -> None:
    assert error(ranks, "/score", **body)["error"]["param"] == param


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_classes_have_the_labels_of_the_checkpoint(classifies: ScriptedStack, path: str) -> None:
    answer = post(classifies, path, input=["yes", "no"])
    assert answer["data"] == [
        {"index": 0, "label": "good", "probs": [0.125, 0.75, 0.125], "num_classes": 3},
        {"index": 1, "label": "bad", "probs": [0.5, 0.25, 0.25], "num_classes": 3},
    ]
    assert answer["usage"]["total_tokens"] == len("yesno")
    messages = [{"role": "user", "content": "no"}]
    assert post(classifies, path, messages=messages)["data"][0]["label"] == "bad"


def test_tei_gets_classes_in_the_order_of_their_scores(classifies: ScriptedStack) -> None:
    good = [{"score": 0.75, "label": "good"}, {"score": 0.125, "label": "bad"}, {"score": 0.125, "label": "LABEL_2"}]
    bad = [{"score": 0.5, "label": "bad"}, {"score": 0.25, "label": "good"}, {"score": 0.25, "label": "LABEL_2"}]
    assert post(classifies, "/predict", inputs="yes") == post(classifies, "/predict", inputs=["yes"]) == good
    assert post(classifies, "/predict", inputs=[["yes"], ["no"]]) == [good, bad]
    assert post(classifies, "/predict", inputs=["yes", "no"]) == good, "two texts are a pair"
    pooling = classifies.last(Generate).pooling
    assert pooling is not None and pooling.second_text == "no"
    for inputs in (["a", "b", "c"], [["a"], "b"], [], [["a", "b", "c"]]):
        failed = error(classifies, "/predict", inputs=inputs)
        assert failed["error_type"] == "Validation"
        assert failed["param"].startswith("inputs")
        assert isinstance(failed["error"], str)


def test_tei_gets_bare_embeddings_as_unit_vectors(scripted: ScriptedStack) -> None:
    scripted.serve(model("embed"))
    scripted.script = pooled(lambda text: [3.0, 4.0] if text == "a" else [0.0, 2.0])
    assert post(scripted, "/embed", inputs=["a", "b"]) == [pytest.approx([0.6, 0.8]), [0.0, 1.0]]
    assert post(scripted, "/embed", inputs="b", truncate=True) == [[0.0, 1.0]]
    assert scripted.last(Generate).options.truncate_prompt_tokens == -1
    assert post(scripted, "/embed", inputs="a", dimensions=1) == [[1.0]]
    assert post(scripted, "/embed", inputs=[[5, 6]]) == [[0.0, 1.0]]


POOLED: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "texts": ["b"]},
    "/score": {"text_1": "a", "text_2": "b"},
    "/classify": {"input": "a"},
    "/embed": {"inputs": "a"},
    "/predict": {"inputs": "a"},
}
CHAT = [{"role": "user", "content": "Hello"}]
GENERATED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 1},
    "/generate": {"text": "a"},
    "/invocations": {"prompt": "a"},
}
ANSWERED: dict[Task, set[str]] = {
    "generate": {*GENERATED},
    "embed": {"/v1/embeddings", "/embed", "/score"},
    "rerank": {"/v1/rerank", "/v2/rerank", "/rerank", "/score", "/predict"},
    "classify": {"/classify", "/predict"},
}
PATHS: dict[Task, str] = {
    "generate": "/v1/chat/completions",
    "embed": "/v1/embeddings",
    "rerank": "/v1/rerank",
    "classify": "/v1/classify",
}


@pytest.mark.parametrize("task", [*ANSWERED])
def test_a_model_of_another_task_names_its_own_path(scripted: ScriptedStack, task: Task) -> None:
    if task != "generate":
        scripted.serve(model(task, 2))
        scripted.script = pooled(lambda _: [0.5, 0.5])
    for path, body in (POOLED | GENERATED).items():
        response = scripted.http.post(path, json=body)
        if path in ANSWERED[task]:
            assert response.status_code == 200, (path, response.text)
            continue
        assert response.status_code == 400, (path, response.text)
        answer = response.json()
        failed = (
            answer if isinstance(answer["error"], str) else {**answer["error"], "error": answer["error"]["message"]}
        )
        assert failed["code"] == "wrong_task", path
        assert f"served for the task '{task}'" in failed["error"]
        assert failed["error"].endswith(f"use {PATHS[task]}")


def test_the_model_says_its_task(scripted: ScriptedStack) -> None:
    assert scripted.http.get("/v1/models").json()["data"][0]["task"] == "generate"
    scripted.serve(model("embed"))
    (listed,) = scripted.http.get("/v1/models").json()["data"]
    assert (listed["task"], listed["capabilities"]) == ("embed", ["embed"])
    information = scripted.http.get("/get_model_info").json()
    assert (information["is_generation"], information["task"]) == (False, "embed")


def test_a_deep_probe_has_a_token_pooled(scripted: ScriptedStack) -> None:
    scripted.serve(model("embed"))
    scripted.script = pooled()
    assert scripted.http.get("/health_generate").status_code == 200
    assert scripted.last(Generate).pooling is not None
