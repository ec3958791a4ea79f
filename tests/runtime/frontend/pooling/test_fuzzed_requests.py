"""Whatever a body has, the response is an answer or an error of the client."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.config import Task
from minisgl.frontend.pooling.bodies import (
    ClassifyBody,
    EmbeddingsBody,
    RerankBody,
    ScoreBody,
    TeiEmbedBody,
    TeiPredictBody,
    TeiRerankBody,
)
from support.frontend.json_values import json_values
from support.frontend.pooled import model, pooled
from support.frontend.scripted import ScriptedStack

VALUES = json_values(st.floats(allow_nan=False, allow_infinity=False)) | st.lists(st.text(max_size=3), max_size=3)


@pytest.mark.parametrize(
    ("task", "path", "kind", "start"),
    [
        ("embed", "/v1/embeddings", EmbeddingsBody, {"input": ["a", "b"]}),
        ("embed", "/embed", TeiEmbedBody, {"inputs": ["a", "b"]}),
        ("rerank", "/rerank", RerankBody, {"query": "a", "documents": ["b", "c"]}),
        ("rerank", "/rerank", TeiRerankBody, {"query": "a", "texts": ["b", "c"]}),
        ("rerank", "/score", ScoreBody, {"text_1": "a", "text_2": ["b", "c"]}),
        ("classify", "/classify", ClassifyBody, {"input": ["a", "b"]}),
        ("classify", "/predict", TeiPredictBody, {"inputs": [["a"], ["b", "c"]]}),
    ],
)
def test_no_body_is_a_fault_of_the_server(
    scripted: ScriptedStack, task: Task, path: str, kind: Any, start: dict[str, Any]
) -> None:
    scripted.serve(model(task, 2, labels=("x",)))
    scripted.script = pooled(lambda _: [0.25, 0.75])
    fields = st.sampled_from([*kind.__struct_fields__, "unknown"])

    @settings(max_examples=40, deadline=None)
    @given(st.dictionaries(fields, VALUES, min_size=1, max_size=3))
    def check(change: dict[str, Any]) -> None:
        response = scripted.http.post(path, json=start | change)
        assert response.status_code == 200 or 400 <= response.status_code < 500, (change, response.text)
        response.json()

    check()
