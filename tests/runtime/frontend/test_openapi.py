"""The published schema allows exactly what is accepted."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.frontend.anthropic.bodies import MessagesBody
from minisgl.frontend.anthropic.requests import parse_message_request
from minisgl.frontend.errors import ApiError
from minisgl.frontend.native.bodies import NativeBody, NativeSampling
from minisgl.frontend.native.requests import parse_native
from minisgl.frontend.openai.bodies import ChatBatchBody, ChatBody, CompletionBody
from minisgl.frontend.openai.requests import parse_chat, parse_chat_batch, parse_completion
from minisgl.frontend.openapi import openapi
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
from minisgl.wire.text import SamplingDefaults, ServedModel
from support.frontend.fake_scheduler import card
from support.frontend.json_values import json_values
from support.frontend.stack import FrontendStack

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}

# To JSON Schema 1.0 is an integer, to most parsers it is not.
VALUES = json_values(st.floats(-3, 3).filter(lambda number: not number.is_integer()))
CHAT_PARTS: list[Any] = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}, {"type": "a"}]
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "boss"]) | VALUES},
        optional={
            "content": st.just("a") | st.lists(st.sampled_from(CHAT_PARTS), max_size=2) | VALUES,
            "tool_calls": st.just([{"function": {"name": "f", "arguments": "{}"}}]) | VALUES,
            "function_call": VALUES,
        },
    ),
    max_size=2,
)


def _some(required: dict[str, Any], **optional: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Return objects with fields that fit, most of the time."""
    fields = {name: st.sampled_from(values) | VALUES for name, values in optional.items()}
    known = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in required.items()})
    return st.builds(lambda one, other: one | other, known, st.fixed_dictionaries({}, optional=fields))


PARTS = st.lists(_some({"type": ["input_text", "output_text", "input_image"]}, text=["a"]), max_size=2)
ITEM_TYPES = ["message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "web_search_call"]
ITEM = _some(
    {"type": [*ITEM_TYPES, None, ""]},
    **{name: ["a"] for name in ("call_id", "name", "arguments", "input", "output", "content")},
    role=["user", "assistant", "boss"],
)
WITH_PARTS = st.builds(
    lambda item, name, parts: item | {name: parts}, ITEM, st.sampled_from(["content", "output"]), PARTS
)
ITEMS = st.builds(
    lambda items: {"input": [*items, {"role": "user", "content": "Hi"}]}, st.lists(ITEM | WITH_PARTS, max_size=2)
)
FORMATS: list[Any] = [
    None,
    {"type": "text"},
    {"type": "grammar", "syntax": "lark", "definition": "a"},
    {"type": "grammar"},
]
FUNCTION = _some(
    {"type": ["function", "custom", "web_search", "mcp", None]},
    name=["f", "f g"],
    description=["a"],
    parameters=[{}, {"type": "object"}, {"type": "array"}],
    strict=[True],
    format=FORMATS,
)
NAMESPACE = st.builds(
    lambda tool, tools: tool | {"tools": tools},
    _some({"type": ["namespace"]}, name=["n"], description=["a"]),
    st.lists(FUNCTION, max_size=1) | VALUES,
)
RESPONSES_TOOLS = st.fixed_dictionaries(
    {"tools": st.lists(FUNCTION | NAMESPACE, max_size=1)},
    optional={"tool_choice": st.sampled_from(["none", "auto", "required", "any", {"type": "mcp"}])},
)
BLOCK_TYPES = ["text", "tool_result", "tool_use", "thinking", "redacted_thinking", "image"]
RESULTS = ["a", [{"type": "tool_reference", "tool_name": "f"}], [{"type": "tool_reference"}], [{"type": "image"}]]
BLOCK = _some({"type": BLOCK_TYPES}, text=["a"], id=["1"], name=["f"], input=[{}], tool_use_id=["1"], content=RESULTS)
BLOCKS = st.builds(
    lambda role, content: {"messages": [{"role": role, "content": content}, *CHAT["messages"]]},
    st.sampled_from(["user", "assistant", "system", "boss"]),
    st.lists(BLOCK, max_size=2) | VALUES,
)
MESSAGES_TOOLS = st.fixed_dictionaries(
    {
        "tools": st.lists(
            _some(
                {"type": ["custom", None, "web_search_20250305", "bash_20250124"]},
                name=["f", "f g"],
                input_schema=[{}, {"type": "object"}, {"type": "array"}],
                description=["a"],
                strict=[True],
            ),
            max_size=1,
        )
    },
    optional={"tool_choice": st.sampled_from([{"type": kind} for kind in ("none", "auto", "any", "some")]) | VALUES},
)


def validator(kind: str, model: ServedModel | None = None) -> jsonschema.protocols.Validator:
    document = openapi(model)
    reference = {"$ref": f"#/components/schemas/{kind}", "components": document["components"]}
    jsonschema.Draft202012Validator.check_schema(document["components"]["schemas"][kind])
    return jsonschema.Draft202012Validator(reference)


def is_accepted(parse: Any, body: dict[str, Any]) -> bool:
    try:
        parse(json.dumps(body).encode(), SamplingDefaults())
    except ApiError:
        return False
    return True


def compares(body: dict[str, Any]) -> bool:
    """Whether the parser compares two numbers or lengths of the body, or reads an expression, as no schema can."""
    given = {name for name, value in body.items() if value is not None}
    alone = {"min_tokens", "min_new_tokens", "best_of", "stop_regex"}
    most = {"max_tokens", "max_completion_tokens", "max_new_tokens"}
    pairs = isinstance(first := body.get("text_1"), list) and len(first) > 1
    return pairs or bool(given & alone) or ("n" in given and bool(given & most))


def check_fields(parse: Any, kind: Any, start: dict[str, Any], examples: int) -> None:
    schema = validator(kind.__name__)
    fields = st.sampled_from([*kind.__struct_fields__, "unknown"])

    @settings(max_examples=examples, deadline=None)
    @given(st.dictionaries(fields, VALUES, min_size=1, max_size=3))
    def check(change: dict[str, Any]) -> None:
        body = start | change
        if not compares(body):
            assert is_accepted(parse, body) == schema.is_valid(body), body

    check()


@pytest.mark.parametrize(
    ("parse", "kind", "start"),
    [
        (parse_chat, ChatBody, CHAT),
        (parse_chat_batch, ChatBatchBody, {"messages": [CHAT["messages"]]}),
        (parse_completion, CompletionBody, {"prompt": "Hi"}),
        (parse_native, NativeBody, {"text": "Hi"}),
        (parse_native, NativeBody, {}),
        (parse_responses, ResponsesBody, {"input": "Hi"}),
        (parse_message_request, MessagesBody, CHAT | {"max_tokens": 9}),
    ],
    ids=["chat", "batch", "completion", "native", "native, empty", "responses", "messages"],
)
def test_the_schema_allows_any_field_exactly_as_the_parser_does(parse: Any, kind: Any, start: dict[str, Any]) -> None:
    check_fields(parse, kind, start, 300)


@pytest.mark.parametrize(
    ("parse", "kind", "start"),
    [
        (parse_embeddings, EmbeddingsBody, {"input": "Hi"}),
        (parse_embeddings, EmbeddingsBody, CHAT),
        (parse_classify, ClassifyBody, {"input": "Hi"}),
        (parse_rerank_v2, RerankBody, {"query": "Hi", "documents": ["a", {"text": "b"}]}),
        (parse_score, ScoreBody, {"text_1": "Hi", "text_2": "a"}),
        (parse_tei_embed, TeiEmbedBody, {"inputs": "Hi"}),
        (parse_rerank, TeiRerankBody, {"query": "Hi", "texts": ["a"]}),
        (parse_tei_predict, TeiPredictBody, {"inputs": [["Hi"], ["a", "b"]]}),
    ],
    ids=["input", "messages", "classify", "rerank", "score", "tei embed", "tei rerank", "tei predict"],
)
def test_the_schema_allows_texts_to_pool_exactly_as_the_parser_does(
    parse: Any, kind: Any, start: dict[str, Any]
) -> None:
    check_fields(parse, kind, start, 60)


def test_the_schema_allows_messages_exactly_as_the_parser_does() -> None:
    schema = validator("ChatBody")

    @settings(max_examples=200, deadline=None)
    @given(MESSAGES)
    def check(messages: list[Any]) -> None:
        body = {"messages": messages}
        assert is_accepted(parse_chat, body) == schema.is_valid(body)

    check()


@pytest.mark.parametrize("parts", [ITEMS, RESPONSES_TOOLS], ids=["input", "tools"])
def test_the_schema_allows_a_conversation_of_agents_exactly_as_the_parser_does(
    parts: st.SearchStrategy[dict[str, Any]],
) -> None:
    schema = validator("ResponsesBody")

    @settings(max_examples=250, deadline=None)
    @given(parts)
    def check(part: dict[str, Any]) -> None:
        body = {"input": "Hi"} | part
        assert is_accepted(parse_responses, body) == schema.is_valid(body), body

    check()


@pytest.mark.parametrize("parts", [BLOCKS, MESSAGES_TOOLS], ids=["messages", "tools"])
def test_the_schema_allows_messages_of_blocks_exactly_as_the_parser_does(
    parts: st.SearchStrategy[dict[str, Any]],
) -> None:
    schema = validator("MessagesBody")

    @settings(max_examples=250, deadline=None)
    @given(parts)
    def check(part: dict[str, Any]) -> None:
        body = CHAT | {"max_tokens": 9} | part
        assert is_accepted(parse_message_request, body) == schema.is_valid(body), body

    check()


def test_the_schema_allows_sampling_parameters_of_generate_exactly_as_the_parser_does() -> None:
    schema = validator("NativeBody")

    @settings(max_examples=200, deadline=None)
    @given(st.dictionaries(st.sampled_from([*NativeSampling.__struct_fields__, "unknown"]), VALUES, max_size=3))
    def check(change: dict[str, Any]) -> None:
        if not compares(change):
            body = {"text": "Hi", "sampling_params": change}
            assert is_accepted(parse_native, body) == schema.is_valid(body)

    check()


@pytest.mark.parametrize(
    ("kind", "body", "valid"),
    [
        ("NativeBody", {"input_ids": ""}, False),
        ("NativeBody", {"input_ids": [[1], [2]]}, True),
        ("ChatBody", CHAT | {"model": "org/tiny"}, True),
        ("ChatBody", CHAT | {"model": "default"}, True),
        ("ChatBody", CHAT | {"model": None}, True),
        ("ChatBody", CHAT | {"model": "gpt"}, False),
        ("CompletionBody", {"prompt": [511]}, True),
        ("CompletionBody", {"prompt": [[1], [512]]}, False),
        ("CompletionBody", {"prompt": "a", "stop_token_ids": [512]}, False),
        ("CompletionBody", {"prompt": "a", "logit_bias": {"a": 1}}, False),
        ("TokenizeBody", {"prompt": "a"}, True),
        ("TokenizeBody", {"prompt": "a", "messages": CHAT["messages"]}, False),
        ("TokenizeBody", {}, False),
        ("DetokenizeBody", {"tokens": [511], "model": "org/tiny"}, True),
        ("DetokenizeBody", {"tokens": [512]}, False),
    ],
)
def test_the_schema_has_names_and_vocabulary_of_the_served_model(kind: str, body: dict[str, Any], valid: bool) -> None:
    model = ServedModel(card=card("org/tiny", vocab_size=512), epoch=(1, 1), defaults=SamplingDefaults())
    assert validator(kind, model).is_valid(body) == valid
    assert openapi(None) == openapi(None), "the document of a model leaves nothing behind"
    assert validator("DetokenizeBody").is_valid({"tokens": [512]})


def test_the_document_is_served(stack: FrontendStack) -> None:
    document = stack.http.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    assert document["paths"]["/v1/models/{name}"]["get"]["parameters"][0]["name"] == "name"
    for path in (path for path, operations in document["paths"].items() if "post" in operations):
        # A POST without a body is rejected everywhere, and the error has the published form.
        error = stack.http.post(path, content=b"")
        assert error.status_code == 400
        responses = document["paths"][path]["post"]["responses"]
        published = responses["default"]["content"]["application/json"]["schema"]
        jsonschema.validate(error.json(), {**published, "components": document["components"]})
    assert document["components"]["schemas"]["ChatBody"]["properties"]["model"]["enum"][0] == "org/tiny"


def test_every_operation_has_a_tag_and_an_example_that_is_accepted(stack: FrontendStack) -> None:
    document = stack.http.get("/openapi.json").json()
    tags = {tag["name"] for tag in document["tags"]}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"]
            assert set(operation["tags"]) < tags, path
            if method == "get":
                assert stack.http.get(path.format(name="default")).status_code != 404, path
                continue
            media = operation["requestBody"]["content"]["application/json"]
            schema = {**media["schema"], "components": document["components"]}
            jsonschema.validate(media["example"], schema, cls=jsonschema.Draft202012Validator)
