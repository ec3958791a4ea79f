"""Embeddings and scores of complete servers with tiny models, against transformers on the same tokens."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai
import pytest
import torch

from minisgl.models.config import ModelConfig
from minisgl.models.pooling_files import read_pooling
from support.frontend.served import ONE_START, Served
from support.numerics.encoder_checkpoints import reference_embedding, write_embedder, write_scorer
from support.tiny_tokenizers import CORPUS, word_pieces, write_directory

BERT = word_pieces()
WORDS = CORPUS.split()
TEXTS = [" ".join((WORDS * 3)[i : i + 1 + 7 * i % 30]) for i in range(16)]


class Server(NamedTuple):
    served: Served
    http: httpx.Client
    folder: Path
    model: Any
    """That of transformers."""


def start(folder: Path, model: Any) -> Iterator[Server]:
    write_directory(folder / "model", BERT, chat_template=None)
    served = Served(folder / "model", folder, "--device", "cpu", *ONE_START, "--max-waiting", "16")
    served.wait_until_ready()
    with httpx.Client(base_url=served.url, timeout=120) as http:
        yield Server(served, http, folder / "model", model)
    served.popen.terminate()
    served.popen.wait(60)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("e")
    yield from start(folder, write_embedder(folder / "model", "bert"))


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("r")
    yield from start(folder, write_scorer(folder / "model", "bert"))


def embeddings(http: httpx.Client, texts: list[str], **fields: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    response = http.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64", **fields})
    assert response.status_code == 200, response.text
    decoded = [base64.b64decode(item["embedding"]) for item in response.json()["data"]]
    return np.stack([np.frombuffer(item, "<f4") for item in decoded])


def references(server: Server, texts: list[str]) -> np.ndarray[Any, Any]:
    pooling = read_pooling(server.folder, ModelConfig.read(server.folder))
    assert pooling is not None
    ids = [BERT.encode(text).ids for text in texts]
    found = [reference_embedding(server.folder, server.model, each, pooling).numpy() for each in ids]
    return np.stack(found)


def test_embeddings_are_those_of_transformers(embedder: Server) -> None:
    together = embeddings(embedder.http, TEXTS)
    np.testing.assert_allclose(together, references(embedder, TEXTS), atol=1e-4)
    alone = np.concatenate([embeddings(embedder.http, [text]) for text in TEXTS[:4]])
    np.testing.assert_allclose(together[:4], alone, atol=1e-5)
    with openai.OpenAI(base_url=f"{embedder.served.url}/v1", api_key="none") as client:
        answer = client.embeddings.create(model="default", input=TEXTS, dimensions=8)
    short = together[:, :8] / np.linalg.norm(together[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose([item.embedding for item in answer.data], short, atol=1e-5)
    assert answer.usage.prompt_tokens == sum(len(BERT.encode(text).ids) for text in TEXTS)


def test_a_request_may_have_more_texts_than_requests_may_wait(embedder: Server) -> None:
    many = embeddings(embedder.http, ["fox", "the lazy dog"] * 512)
    np.testing.assert_allclose(many, np.tile(embeddings(embedder.http, ["fox", "the lazy dog"]), (512, 1)), atol=1e-5)


def test_a_model_that_embeds_says_so(embedder: Server) -> None:
    assert embedder.http.get("/v1/models").json()["data"][0]["task"] == "embed"
    refused = embedder.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
    assert refused.json()["error"]["code"] == "wrong_task"
    assert embedder.http.get("/health_generate").status_code == 200
    generated = embedder.served.metric("vllm:generation_tokens_total")
    embeddings(embedder.http, TEXTS)
    assert embedder.served.metric("vllm:generation_tokens_total") == generated == 0


def test_scores_of_pairs_are_those_of_transformers(reranker: Server) -> None:
    query, documents = "What is the answer?", TEXTS[:6]
    pairs = [BERT.encode(query, document) for document in documents]
    with torch.inference_mode():
        logits = [
            reranker.model(torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])).logits[0, 0]
            for pair in pairs
        ]
    expected = [float(logit.sigmoid()) for logit in logits]
    body = {"text_1": query, "text_2": documents}
    answer = reranker.http.post("/score", json=body).json()
    np.testing.assert_allclose([item["score"] for item in answer["data"]], expected, atol=1e-4)
    assert answer["usage"]["prompt_tokens"] == sum(len(pair.ids) for pair in pairs)
    ranked = reranker.http.post("/v1/rerank", json={"query": query, "documents": documents}).json()["results"]
    assert [result["index"] for result in ranked] == np.argsort(-np.array(expected), kind="stable").tolist()
    cut = reranker.http.post("/rerank", json={"query": query, "texts": ["fox " * 500], "truncate": True})
    assert cut.status_code == 200
    ids = array("i", pairs[0].ids).tolist()
    assert reranker.http.post("/v1/embeddings", json={"input": ids}).json()["error"]["code"] == "wrong_task"
