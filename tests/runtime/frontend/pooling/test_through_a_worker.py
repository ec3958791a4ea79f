"""From a body to the messages of a scheduler, through a tokenizer worker, and back."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from minisgl.wire.messages import Abort, Ack, Failed, FromScheduler, Pool
from support.frontend.fake_scheduler import pooled_row
from support.frontend.stack import FrontendStack
from support.tiny_tokenizers import word_pieces

BERT = word_pieces()
TEXTS = ["the fox", "the lazy dog", "hello"]
LIMIT = 12


def output(request: Pool) -> Sequence[FromScheduler]:
    """Return the number of tokens and their sum, as two numbers."""
    tokens = array("i", request.prompt)
    return [Ack(request.id), pooled_row(request, [len(tokens), sum(tokens)], cached=1)]


def expected(*texts: str) -> list[float]:
    ids = BERT.encode(*texts).ids
    return [float(len(ids)), float(sum(ids))]


@pytest.fixture(scope="module")
def shared_embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendStack]:
    card = {"task": "embed", "output_size": 2}
    path = tmp_path_factory.mktemp("embedder")
    stack = FrontendStack(path, tokenizer=word_pieces(), max_model_len=LIMIT, model=card)
    yield stack
    stack.close()


@pytest.fixture
def embedder(shared_embedder: FrontendStack) -> FrontendStack:
    shared_embedder.scheduler.reset()
    shared_embedder.scheduler.pool = output
    return shared_embedder


def post(stack: FrontendStack, path: str, **body: Any) -> httpx.Response:
    return stack.http.post(path, json=body)


def test_each_text_is_a_request_with_the_tokens_of_its_tokenizer(embedder: FrontendStack) -> None:
    answer = post(embedder, "/v1/embeddings", input=TEXTS, priority=3, cache_salt="s").json()
    assert [item["embedding"] for item in answer["data"]] == [expected(text) for text in TEXTS]
    assert answer["usage"]["prompt_tokens"] == sum(len(BERT.encode(text).ids) for text in TEXTS)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": len(TEXTS)}
    sent = embedder.scheduler.received(Pool)
    assert {(request.priority, request.cache_salt, request.second_text) for request in sent} == {(3, b"s", 0)}
    assert len({request.id for request in sent}) == len(TEXTS)


def test_a_long_text_is_an_error_that_names_it_or_is_cut(embedder: FrontendStack) -> None:
    long = "fox " * LIMIT
    failed = post(embedder, "/v1/embeddings", input=["fox", long])
    assert failed.status_code == 400
    error = failed.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(f"text 1: This model's maximum context length is {LIMIT} tokens")
    cut = post(embedder, "/v1/embeddings", input=["fox", long], truncate_prompt_tokens=-1).json()
    assert [item["embedding"][0] for item in cut["data"]] == [3, LIMIT]
    assert post(embedder, "/embed", inputs=long).status_code == 400
    assert post(embedder, "/embed", inputs=long, truncate=True).status_code == 200


def test_errors_of_the_engine_reach_the_client(embedder: FrontendStack) -> None:
    embedder.scheduler.pool = lambda request: [Failed(request.id, "queue_full", "no place")]
    response = post(embedder, "/v1/embeddings", input=TEXTS)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert "retry-after" in response.headers
    unknown = post(embedder, "/v1/embeddings", input=[[5, 4000]])
    assert unknown.json()["error"]["code"] == "invalid_token"
    named = post(embedder, "/v1/embeddings", input="a", prompt_name="query").json()["error"]
    assert (named["param"], named["code"]) == ("prompt_name", "invalid_value")


def test_a_client_that_leaves_ends_all_of_its_texts(embedder: FrontendStack) -> None:
    embedder.scheduler.pool = lambda request: [Ack(request.id)]
    with pytest.raises(httpx.ReadTimeout):
        embedder.http.post("/v1/embeddings", json={"input": TEXTS}, timeout=httpx.Timeout(60, read=0.2))
    sent = {request.id for request in embedder.scheduler.wait_for(Pool, len(TEXTS))}
    assert {abort.id for abort in embedder.scheduler.wait_for(Abort, len(TEXTS))} == sent


def test_more_texts_than_may_wait_are_taken_while_their_tokens_may(embedder: FrontendStack) -> None:
    answer = post(embedder, "/v1/embeddings", input=["fox"] * 2000, encoding_format="base64")
    assert len(answer.json()["data"]) == 2000
