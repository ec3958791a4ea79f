"""For any JSON in any field, the body is rejected by name or becomes requests that can be encoded."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers

from minisgl.frontend.anthropic.bodies import MessagesBody
from minisgl.frontend.anthropic.requests import parse_message_request
from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation.request import generate_messages
from minisgl.frontend.native.bodies import NativeBody, NativeSampling
from minisgl.frontend.native.requests import parse_native
from minisgl.frontend.openai.bodies import ChatBatchBody, ChatBody, CompletionBody
from minisgl.frontend.openai.requests import parse_chat, parse_chat_batch, parse_completion
from minisgl.frontend.pooling.bodies import (
    ClassifyBody,
    EmbeddingsBody,
    RerankBody,
    ScoreBody,
    TeiEmbedBody,
    TeiPredictBody,
    TeiRerankBody,
)
from minisgl.frontend.pooling.requests import (
    parse_classify,
    parse_embeddings,
    parse_rerank,
    parse_rerank_v2,
    parse_score,
    parse_tei_embed,
    parse_tei_predict,
)
from minisgl.frontend.responses.bodies import ResponsesBody
from minisgl.frontend.responses.requests import parse_responses
from minisgl.wire.text import Generate, SamplingDefaults
from support.frontend.json_values import json_values

VALUES = json_values(st.floats(allow_nan=False, allow_infinity=False))
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def changed(fields: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from([*fields, "unknown"]), VALUES, min_size=1, max_size=3)


def outcome(parse: Any, body: dict[str, Any]) -> None:
    try:
        requests = generate_messages(parse(json.dumps(body).encode(), SamplingDefaults()), Headers({}))
    except ApiError as error:
        assert 400 <= error.status < 500
        assert len(error.message) < 400
        return
    for request in requests:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Generate) == request


@pytest.mark.parametrize(
    ("parse", "kind", "start"),
    [
        (parse_chat, ChatBody, CHAT),
        (parse_chat_batch, ChatBatchBody, {"messages": [CHAT["messages"]]}),
        (parse_completion, CompletionBody, {"prompt": "Hi"}),
        (parse_native, NativeBody, {"text": "Hi"}),
        (parse_responses, ResponsesBody, {"input": "Hi"}),
        (parse_message_request, MessagesBody, CHAT | {"max_tokens": 9}),
        (parse_embeddings, EmbeddingsBody, {"input": "Hi"}),
        (parse_embeddings, EmbeddingsBody, CHAT),
        (parse_classify, ClassifyBody, {"input": "Hi"}),
        (parse_rerank_v2, RerankBody, {"query": "Hi", "documents": ["a"]}),
        (parse_score, ScoreBody, {"text_1": "Hi", "text_2": ["a", "b"]}),
        (parse_tei_embed, TeiEmbedBody, {"inputs": "Hi"}),
        (parse_rerank, TeiRerankBody, {"query": "Hi", "texts": ["a"]}),
        (parse_tei_predict, TeiPredictBody, {"inputs": "Hi"}),
    ],
    ids=[
        *("chat", "batch", "completion", "native", "responses", "messages"),
        *("embeddings", "embeddings of a chat", "classify", "rerank", "score"),
        *("tei embed", "tei rerank", "tei predict"),
    ],
)
def test_any_value_of_any_field_is_rejected_by_name_or_encodable(parse: Any, kind: Any, start: dict[str, Any]) -> None:
    @settings(max_examples=120, deadline=None)
    @given(changed(kind.__struct_fields__))
    def check(change: dict[str, Any]) -> None:
        outcome(parse, start | change)

    check()


@settings(max_examples=80, deadline=None)
@given(changed(NativeSampling.__struct_fields__))
def test_any_sampling_parameter_of_generate_is_rejected_by_name_or_encodable(change: dict[str, Any]) -> None:
    outcome(parse_native, {"text": "Hi", "sampling_params": change})
