"""Responses of the APIs for texts that are pooled. Each is the format of a `GenerationRequest`: choice i is the output
of prompt i."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from minisgl.frontend.pooling.vectors import Rows, base64_rows, json_rows, rows_of, shortened, unit_vectors
from minisgl.frontend.server.response_stream import Delta


class PooledFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What these formats have in common: none has events."""

    labels: tuple[str, ...] = ()
    """Names of the numbers of an output, as in `ModelCard`."""

    def events(self, response_id: str, model: str, prompt_tokens: Sequence[int]) -> NoReturn:
        raise AssertionError("outputs of texts are not streamed")

    def label(self, index: int) -> str:
        return self.labels[index] if index < len(self.labels) else f"LABEL_{index}"


class EmbeddingsFormat(PooledFormat, frozen=True, kw_only=True):
    """OpenAI's /v1/embeddings."""

    dimensions: int | None = None
    normalize: bool = False
    as_base64: bool = False

    def full(self, response_id: str, model: str, choices: Sequence[Delta]) -> bytes:
        rows = _embeddings(choices, self.dimensions, normalize=self.normalize)
        texts = base64_rows(rows) if self.as_base64 else json_rows(rows)
        items = [b'{"object":"embedding","index":%d,"embedding":%b}' % item for item in enumerate(texts)]
        head = {**_head("embd", response_id, model), "usage": _usage(choices)}
        # The numbers are JSON already.
        return b'%b,"data":[%b]}' % (msgspec.json.encode(head)[:-1], b",".join(items))


class ScoreFormat(PooledFormat, frozen=True, kw_only=True):
    """vLLM's /score."""

    first_texts: int = 0
    """Number of embeddings of first texts, which precede those of the second ones; 0: each output is a score."""

    def full(self, response_id: str, model: str, choices: Sequence[Delta]) -> bytes:
        scores = _cosines(choices, self.first_texts) if self.first_texts else _scores(choices)
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        return msgspec.json.encode({**_head("score", response_id, model), "data": data, "usage": _usage(choices)})


class ClassifyFormat(PooledFormat, frozen=True, kw_only=True):
    """vLLM's /classify."""

    def full(self, response_id: str, model: str, choices: Sequence[Delta]) -> bytes:
        rows = rows_of(choices)
        best = rows.argmax(axis=1).tolist()
        data = [
            {"index": i, "label": self.label(best[i]), "probs": row, "num_classes": len(row)}
            for i, row in enumerate(rows.tolist())
        ]
        return msgspec.json.encode({**_head("classify", response_id, model), "data": data, "usage": _usage(choices)})


class RerankFormat(PooledFormat, frozen=True, kw_only=True):
    """Cohere's, Jina's and vLLM's /rerank: each has fields that the others do not know."""

    version: str
    """Of Cohere's API."""
    top_n: int | None = None
    documents: tuple[str, ...] = ()
    """Those to return; empty: none."""

    def full(self, response_id: str, model: str, choices: Sequence[Delta]) -> bytes:
        results: list[dict[str, Any]] = []
        for index, score in _ranked(choices)[: self.top_n]:
            result: dict[str, Any] = {"index": index, "relevance_score": score}
            if self.documents:
                result["document"] = {"text": self.documents[index]}
            results.append(result)
        usage = _usage(choices)
        meta = {
            "api_version": {"version": self.version},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": usage["prompt_tokens"]},
        }
        head = {"id": f"rerank-{response_id}", "object": "list", "model": model}
        return msgspec.json.encode({**head, "results": results, "usage": usage, "meta": meta})


class TeiEmbedFormat(PooledFormat, frozen=True, kw_only=True):
    """TEI's /embed."""

    dimensions: int | None = None

    def full(self, response_id: str, model: str, choices: Sequence[Delta]) -> bytes:
        return b"[%b]" % b",".join(json_rows(_embeddings(choices, self.dimensions, normalize=True)))


class TeiRerankFormat(PooledFormat, frozen=True, kw_only=True):
    """TEI's /rerank."""

    texts: tuple[str, ...] = ()
    """Those to return; empty: none."""

    def full(self, response_id: str, model: str, choices: Sequence[Delta]) -> bytes:
        results: list[dict[str, Any]] = [{"index": index, "score": score} for index, score in _ranked(choices)]
        for result in results if self.texts else ():
            result["text"] = self.texts[result["index"]]
        return msgspec.json.encode(results)


class TeiPredictFormat(PooledFormat, frozen=True, kw_only=True):
    """TEI's /predict: classes in descending order of their scores."""

    is_list: bool
    """One list for each input, even for one."""

    def full(self, response_id: str, model: str, choices: Sequence[Delta]) -> bytes:
        rows = rows_of(choices)
        order = (-rows).argsort(axis=1, kind="stable").tolist()
        found = [
            [{"score": scores[i], "label": self.label(i)} for i in best]
            for scores, best in zip(rows.tolist(), order, strict=True)
        ]
        return msgspec.json.encode(found if self.is_list else found[0])


def _head(kind: str, response_id: str, model: str) -> dict[str, Any]:
    return {"id": f"{kind}-{response_id}", "object": "list", "created": int(time.time()), "model": model}


def _usage(choices: Sequence[Delta]) -> dict[str, Any]:
    ends = [choice.finished for choice in choices if choice.finished is not None]
    tokens, cached = sum(end.prompt_tokens for end in ends), sum(end.cached_tokens for end in ends)
    details = {"cached_tokens": cached}
    return {
        **{"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
        "prompt_tokens_details": details,
    }


def _embeddings(choices: Sequence[Delta], dimensions: int | None, *, normalize: bool) -> Rows:
    rows = rows_of(choices)
    short = shortened(rows, dimensions)
    return unit_vectors(rows) if normalize and short is rows else short


def _scores(choices: Sequence[Delta]) -> list[float]:
    scores: list[float] = rows_of(choices)[:, -1].tolist()
    return scores


def _cosines(choices: Sequence[Delta], first_texts: int) -> list[float]:
    rows = unit_vectors(rows_of(choices))
    cosines: list[float] = (rows[:first_texts] * rows[first_texts:]).sum(axis=1).tolist()
    return cosines


def _ranked(choices: Sequence[Delta]) -> list[tuple[int, float]]:
    """Return index and score of all pairs, the best first."""
    return sorted(enumerate(_scores(choices)), key=lambda scored: -scored[1])
