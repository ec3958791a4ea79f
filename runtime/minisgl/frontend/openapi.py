"""GET /openapi.json: the operations of the API. A body that the document allows is one that is accepted.

Types and ranges come from the structs that bodies are decoded to; what is checked after decoding has its schema here.
"""

from __future__ import annotations

import copy
from typing import Any, Final, NamedTuple

import msgspec

from minisgl.frontend.anthropic import schema as anthropic
from minisgl.frontend.anthropic.bodies import CountTokensBody, MessagesBody
from minisgl.frontend.generation.constraints import IN_STRUCTURED_OUTPUTS, NAMES, StructuredOutputs
from minisgl.frontend.generation.media import MEDIA
from minisgl.frontend.generation.model_names import DEFAULT_MODEL
from minisgl.frontend.generation.prompts import MAX_PROMPTS
from minisgl.frontend.generation.sampling import TOKEN_ID
from minisgl.frontend.native.bodies import NativeBody, NativeSampling
from minisgl.frontend.native.requests import NOT_WITH_PROMPT, ONLY_WITH_PROMPT
from minisgl.frontend.openai.bodies import (
    ChatBatchBody,
    ChatBody,
    ChatFields,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from minisgl.frontend.pooling import schema as pooling
from minisgl.frontend.pooling.bodies import (
    ClassifyBody,
    EmbeddingsBody,
    RerankBody,
    ScoreBody,
    TeiEmbedBody,
    TeiPredictBody,
    TeiRerankBody,
)
from minisgl.frontend.responses import schema as responses
from minisgl.frontend.responses.bodies import ResponsesBody
from minisgl.frontend.server.error_body import TEI_PATHS
from minisgl.version import __version__
from minisgl.wire.text import ServedModel

Schema = dict[str, Any]

_OPENAI: Final = "OpenAI"
_ANTHROPIC: Final = "Anthropic"
_TEXTS: Final = "Embeddings and scores"
_TOKENS: Final = "Tokens"
_OTHERS: Final = "Other servers"
_SERVER: Final = "Server"
_QUESTION: Final = [{"role": "user", "content": "Hello"}]
_RANKED: Final = {"query": "Hello", "documents": ["world", "moon"], "top_n": 1}


class _Post(NamedTuple):
    """An operation with a body."""

    body: type[msgspec.Struct]
    tag: str
    summary: str
    example: dict[str, Any]


_POSTS: Final = {
    "/v1/chat/completions": _Post(
        ChatBody, _OPENAI, "Answer a conversation", {"messages": _QUESTION, "max_tokens": 100}
    ),
    "/v1/chat/completions/batch": _Post(
        ChatBatchBody, _OPENAI, "Answer several conversations", {"messages": [_QUESTION, _QUESTION]}
    ),
    "/v1/completions": _Post(CompletionBody, _OPENAI, "Continue a text", {"prompt": "Once upon", "max_tokens": 16}),
    "/v1/responses": _Post(ResponsesBody, _OPENAI, "Answer an input of the Responses API", {"input": "Hello"}),
    "/v1/responses/input_tokens": _Post(
        ResponsesBody, _OPENAI, "Count the tokens of an input of the Responses API", {"input": "Hello"}
    ),
    "/v1/messages": _Post(
        MessagesBody, _ANTHROPIC, "Answer messages of the Messages API", {"max_tokens": 100, "messages": _QUESTION}
    ),
    "/v1/messages/count_tokens": _Post(
        CountTokensBody, _ANTHROPIC, "Count the tokens of messages", {"messages": _QUESTION}
    ),
    "/v1/embeddings": _Post(EmbeddingsBody, _OPENAI, "Embed texts", {"input": ["Hello", "world"]}),
    "/v2/rerank": _Post(RerankBody, _TEXTS, "Sort documents by their relevance for a query, as Cohere does", _RANKED),
    **{
        f"{prefix}/score": _Post(
            ScoreBody, _TEXTS, "Score pairs of texts, as vLLM does", {"text_1": "Hello", "text_2": ["world", "moon"]}
        )
        for prefix in ("", "/v1")
    },
    **{
        f"{prefix}/classify": _Post(ClassifyBody, _TEXTS, "Classify texts, as vLLM does", {"input": ["Hello"]})
        for prefix in ("", "/v1")
    },
    "/embed": _Post(TeiEmbedBody, _TEXTS, "Embed texts, as TEI does", {"inputs": ["Hello", "world"]}),
    "/predict": _Post(TeiPredictBody, _TEXTS, "Classify texts or pairs, as TEI does", {"inputs": "Hello"}),
    "/generate": _Post(
        NativeBody,
        _OTHERS,
        "Continue a text, as in SGLang's native API",
        {"text": "Once upon", "sampling_params": {"max_new_tokens": 16}},
    ),
    **{
        f"{prefix}/tokenize": _Post(TokenizeBody, _TOKENS, "Encode a text or a conversation", {"prompt": "Hello"})
        for prefix in ("", "/v1")
    },
    **{
        f"{prefix}/detokenize": _Post(DetokenizeBody, _TOKENS, "Decode token ids", {"tokens": [1, 2, 3]})
        for prefix in ("", "/v1")
    },
}
_INVOCATION: Final = _Post(
    ChatBody,
    _OTHERS,
    "Answer a conversation if there are `messages`, otherwise continue a text",
    {"messages": _QUESTION},
)
_RERANK: Final = _Post(
    RerankBody, _TEXTS, "Sort documents by their relevance, as Cohere, Jina, vLLM and, with `texts`, TEI do", _RANKED
)

_GETS: Final = {
    "/v1/models": (_OPENAI, "List the names of the served model"),
    "/v1/models/{name}": (_OPENAI, "Describe a served model"),
    "/tokenizer_info": (_TOKENS, "Describe the tokenizer and its chat template"),
    "/get_model_info": (_OTHERS, "Describe the model, as SGLang does"),
    "/get_server_info": (_OTHERS, "Describe the server, as SGLang does"),
    "/load": (_OTHERS, "Report requests and tokens in progress"),
    "/health": (_SERVER, "Succeed while the frontend runs"),
    "/ready": (_SERVER, "Succeed while requests can be taken"),
    "/health_generate": (_SERVER, "Succeed when a token can be generated"),
    "/metrics": (_SERVER, "Report metrics for Prometheus"),
    "/version": (_SERVER, "Report the version"),
}
"""Tag and summary of operations without a body."""

_NULL: Final[Schema] = {"type": "null"}
_ASKED_FOR: Final[Schema] = {"not": {"enum": [None, False]}}
_NOT_EMPTY: Final[Schema] = {"type": "array", "minItems": 1}
_TOKEN_IDS: Final[Schema] = {
    **_NOT_EMPTY,
    "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1, "title": TOKEN_ID},
}
_LISTS: Final[list[Schema]] = [
    _TOKEN_IDS,
    {**_NOT_EMPTY, "maxItems": MAX_PROMPTS, "items": {"anyOf": [{"type": "string"}, _TOKEN_IDS]}},
]
_MEDIUM: Final[Schema] = {"enum": list(MEDIA)}
_PROMPT: Final[Schema] = {"anyOf": [{"type": "string"}, *_LISTS]}


def openapi(model: ServedModel | None) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document. `model`: the served one, whose names and vocabulary bodies must respect."""
    kinds = [*(post.body for post in _POSTS.values()), TeiRerankBody]
    references, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for name, stricter in _checked_after_decoding().items():
        properties = schemas[name]["properties"] | stricter.get("properties", {})
        schemas[name] |= {**stricter, "properties": properties}
    # What follows changes parts that several bodies share.
    schemas = copy.deepcopy(schemas)
    if model is not None:
        for schema in schemas.values():
            if "model" in schema["properties"]:
                schema["properties"]["model"] = {"enum": [*model.all_names, DEFAULT_MODEL, None], "default": None}
        _set_last_token(schemas, model.card.vocab_size - 1)
    bodies = dict(zip(_POSTS, references[:-1], strict=True))
    invocation = {"anyOf": [bodies["/v1/chat/completions"], bodies["/v1/completions"]]}
    paths = {path: {"post": _post(path, _POSTS[path], body)} for path, body in bodies.items()}
    paths["/invocations"] = {"post": _post("/invocations", _INVOCATION, invocation)}
    for path in ("/rerank", "/v1/rerank"):
        paths[path] = {"post": _post(path, _RERANK, {"anyOf": [bodies["/v2/rerank"], references[-1]]})}
    paths |= {path: {"get": _get(path, tag, summary)} for path, (tag, summary) in _GETS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "minisgl", "version": __version__},
        # A server may have no keys.
        "security": [{}, {"key": []}],
        "tags": [{"name": tag} for tag in (_OPENAI, _ANTHROPIC, _TEXTS, _TOKENS, _OTHERS, _SERVER)],
        "paths": paths,
        "components": {
            "schemas": {**schemas, "JsonValue": _json_value(), "Error": _error(), "TeiError": _tei_error()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _post(path: str, post: _Post, body: Schema) -> dict[str, Any]:
    content = {"application/json": {"schema": body, "example": post.example}}
    error = "TeiError" if path in TEI_PATHS else "Error"
    return {
        **_operation(post.tag, post.summary, "The response, or with `stream` its events.", error),
        "requestBody": {"required": True, "content": content},
    }


def _get(path: str, tag: str, summary: str) -> dict[str, Any]:
    operation = _operation(tag, summary, "The response.")
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _operation(tag: str, summary: str, response: str, error_schema: str = "Error") -> dict[str, Any]:
    error = {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{error_schema}"}}}}
    return {
        "tags": [tag],
        "summary": summary,
        "responses": {"200": {"description": response}, "default": {"description": "An error.", **error}},
    }


def _checked_after_decoding() -> dict[str, Schema]:
    """Return, for each struct, what its parser requires beside types and ranges."""
    return {
        "ChatBody": _chat(ChatBody),
        "ChatBatchBody": _chat(ChatBatchBody),
        "Message": {
            "anyOf": [
                _object(
                    {
                        "content": {"type": ["string", "array"]},
                        "tool_calls": {"enum": [[], None]},
                        "reasoning": _NULL,
                        "reasoning_content": _NULL,
                    },
                    "content",
                ),
                *(
                    _object({"role": {"const": "assistant"}, name: given}, "role", name)
                    for name, given in {
                        "content": {"type": ["string", "array"]},
                        "tool_calls": _NOT_EMPTY,
                        "reasoning": {"type": "string"},
                        "reasoning_content": {"type": "string"},
                    }.items()
                ),
            ],
            "allOf": [
                {
                    "anyOf": [
                        _object({"role": {"const": "tool"}}, "role"),
                        _object({"content": {"items": _object({"type": {"not": _MEDIUM}})}}),
                    ]
                }
            ],
        },
        "ContentPart": {
            "anyOf": [
                _object({"type": {"const": "text"}, "text": {"type": "string"}}, "type", "text"),
                _object({"type": _MEDIUM}, "type"),
            ]
        },
        "PredictedOutput": {"allOf": [_object({"content": {"items": _object({"type": {"not": _MEDIUM}})}})]},
        "CompletionBody": {
            "properties": {"prompt": _PROMPT},
            "allOf": [
                _not_both("prompt_logprobs", {"type": "integer"}, "stream", {"const": True}),
                _requires("logprob_token_ids", _NOT_EMPTY, "logprobs", {"type": "integer"}),
                _one_constraint(CompletionBody),
            ],
        },
        "NativeSampling": _one_constraint(NativeSampling),
        "StructuredOutputs": _one_constraint(StructuredOutputs),
        "NativeBody": {
            "properties": {
                "text": {"anyOf": [_PROMPT, _NULL]},
                "input_ids": {"anyOf": [*_LISTS, _NULL]},
            },
            "oneOf": _exactly_one("text", "input_ids", "prompt"),
            "allOf": [
                _not_both("token_ids_logprob", _NOT_EMPTY, "top_logprobs_num", {"type": "integer", "minimum": 1}),
                _not_both("token_ids_logprob", _NOT_EMPTY, "logprob_start_len", {"type": "integer", "minimum": 0}),
                *(_not_both("prompt", {"not": _NULL}, name, _ASKED_FOR) for name in NOT_WITH_PROMPT),
                *(
                    _not_both(source, {"not": _NULL}, name, _ASKED_FOR)
                    for source in ("text", "input_ids")
                    for name in ONLY_WITH_PROMPT
                ),
            ],
        },
        **responses.CHECKED_AFTER_DECODING,
        **anthropic.CHECKED_AFTER_DECODING,
        **pooling.checked_after_decoding(_TOKEN_IDS),
        "TokenizeBody": {
            "oneOf": _exactly_one("prompt", "messages"),
            **_not_both("continue_final_message", {"const": True}, "add_generation_prompt", {"const": True}),
        },
    }


def _chat(kind: type[ChatFields]) -> Schema:
    return {
        "allOf": [
            _requires("tool_choice", {"not": {"enum": ["none", "auto", None]}}, "tools", _NOT_EMPTY),
            _not_both("continue_final_message", {"const": True}, "add_generation_prompt", {"const": True}),
            _not_both("thinking_budget", {"type": "integer"}, "thinking_token_budget", {"type": "integer"}),
            _requires("top_logprobs", {"type": "integer"}, "logprobs", {"const": True}),
            _requires("logprob_token_ids", _NOT_EMPTY, "logprobs", {"const": True}),
            _requires("max_tokens", {"const": 0}, "max_completion_tokens", {"type": "integer"}),
            _not_both("prompt_logprobs", {"type": "integer"}, "stream", {"const": True}),
            _one_constraint(kind),
        ],
    }


def _set_last_token(schema: Any, last: int) -> None:
    """Bound every token id in the schema."""
    if isinstance(schema, dict):
        if schema.get("title") == TOKEN_ID:
            schema["maximum"] = last
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            _set_last_token(part, last)


def _object(properties: Schema, *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _requires(name: str, value: Schema, other: str, wanted: Schema) -> Schema:
    """Return the schema: if the field `name` matches `value`, then `other` must be present and match `wanted`."""
    return {"anyOf": [_object({name: {"not": value}}), _object({other: wanted}, other)]}


def _not_both(name: str, value: Schema, other: str, unwanted: Schema) -> Schema:
    """Return the schema: not both fields are present with such values."""
    return {"not": _object({name: value, other: unwanted}, name, other)}


def _json_value() -> Schema:
    """Return the schema of free JSON values that a message to the tokenizer can carry."""
    nested = {"$ref": "#/components/schemas/JsonValue"}
    return {
        "anyOf": [
            {"type": ["string", "boolean", "null"]},
            {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            {"type": "number", "not": {"type": "integer"}},
            {"type": "array", "items": nested},
            {"type": "object", "additionalProperties": nested},
        ]
    }


def _error() -> Schema:
    """Return the form of `ApiError.body`."""
    text = {"type": "string"}
    fields = {"message": text, "type": text, "param": {"type": ["string", "null"]}, "code": text}
    return _object({"error": _object(fields, *fields)}, "error")


def _tei_error() -> Schema:
    text = {"type": "string"}
    fields = {"error": text, "error_type": text, "code": text, "param": {"type": ["string", "null"]}}
    return _object(fields, *fields)


def _one_constraint(kind: type[msgspec.Struct]) -> Schema:
    """Return the schema: at most one field constrains the answer; exactly one of those in `structured_outputs`."""
    nested = kind is StructuredOutputs
    known = IN_STRUCTURED_OUTPUTS if nested else NAMES
    nothing: dict[str, Schema] = {name: _NULL for name in known if name in kind.__struct_fields__}
    if nested:
        nothing["json_object"] = {"enum": [None, False]}
    else:
        text: Schema = {"properties": {"type": {"const": "text"}}}
        nothing |= {name: _NULL for name in ("structured_outputs",) if name in kind.__struct_fields__}
        nothing |= {name: {"anyOf": [_NULL, text]} for name in ("response_format",) if name in kind.__struct_fields__}
    one = [_object(nothing | {name: {"not": value}}, name) for name, value in nothing.items()]
    return {"oneOf": one if nested else [{"properties": nothing}, *one]}


def _exactly_one(*names: str) -> list[Schema]:
    """Return the alternatives: one field is present, and the others are absent or null."""
    return [_object({one: {"not": _NULL} if one == name else _NULL for one in names}, name) for name in names]
