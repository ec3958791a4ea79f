"""Parsing of requests for texts that are pooled: from a body to a valid request, with one prompt for each output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from minisgl.config import Task
from minisgl.frontend.generation.prompts import Prompt, parse_prompts
from minisgl.frontend.generation.request import GenerationRequest
from minisgl.frontend.generation.response_format import ResponseFormat
from minisgl.frontend.generation.template_variables import template_variables
from minisgl.frontend.generation.unsupported import reject_unsupported
from minisgl.frontend.openai.chat_messages import check_continuable, parse_messages
from minisgl.frontend.pooling.bodies import (
    FIRST_TEXTS,
    MAX_INPUTS,
    SECOND_TEXTS,
    ClassifyBody,
    Document,
    EmbeddingsBody,
    PoolingFields,
    RerankBody,
    ScoreBody,
    Shape,
    TeiEmbedBody,
    TeiFields,
    TeiPredictBody,
    TeiRerankBody,
    TruncationFields,
)
from minisgl.frontend.pooling.responses import (
    ClassifyFormat,
    EmbeddingsFormat,
    RerankFormat,
    ScoreFormat,
    TeiEmbedFormat,
    TeiPredictFormat,
    TeiRerankFormat,
)
from minisgl.frontend.server.json_body import decode, invalid, missing
from minisgl.frontend.server.unknown_fields import unknown_fields
from minisgl.wire.messages import SamplingParams
from minisgl.wire.text import Pooling, Rendering, RequestOptions, SamplingDefaults

_INPUT_TYPES: Final = {"query": "search_query", "document": "search_document", "passage": "search_document"}
"""Kinds of texts in other APIs → as Cohere names them, which need no prompt of that name in the checkpoint."""
_PLAIN: Final = Rendering()
_COPIED_BYTES: Final = 64 << 20
"""Most bytes of first texts that are sent along with second ones."""

_embeddings_decoder: Final = msgspec.json.Decoder(EmbeddingsBody)
_classify_decoder: Final = msgspec.json.Decoder(ClassifyBody)
_shape_decoder: Final = msgspec.json.Decoder(Shape)
_rerank_decoder: Final = msgspec.json.Decoder(RerankBody)
_score_decoder: Final = msgspec.json.Decoder(ScoreBody)
_tei_embed_decoder: Final = msgspec.json.Decoder(TeiEmbedBody)
_tei_rerank_decoder: Final = msgspec.json.Decoder(TeiRerankBody)
_tei_predict_decoder: Final = msgspec.json.Decoder(TeiPredictBody)

B = TypeVar("B", EmbeddingsBody, ClassifyBody)


def parse_embeddings(raw: bytes, _: SamplingDefaults) -> GenerationRequest:
    """Raises ApiError."""
    body = decode(_embeddings_decoder, raw)
    if body.prompt_name is not None and body.input_type is not None:
        raise invalid("input_type", "is another name of `prompt_name`; use one of them")
    kind = body.input_type or ""
    pooling = Pooling(prompt_name=body.prompt_name or _INPUT_TYPES.get(kind, kind))
    as_base64, normalize = body.encoding_format == "base64", bool(body.normalize)
    return _request(
        body,
        raw,
        ("embed",),
        EmbeddingsFormat(dimensions=body.dimensions, normalize=normalize, as_base64=as_base64),
        _input(body, pooling),
        rendering=_rendering(body),
        dimensions=body.dimensions,
    )


def parse_classify(raw: bytes, _: SamplingDefaults, labels: tuple[str, ...] = ()) -> GenerationRequest:
    """`labels`: as in `ModelCard`. Raises ApiError."""
    body = decode(_classify_decoder, raw)
    prompts = _input(body, Pooling())
    return _request(body, raw, ("classify",), ClassifyFormat(labels=labels), prompts, rendering=_rendering(body))


def _input(body: EmbeddingsBody | ClassifyBody, pooling: Pooling) -> list[Prompt]:
    if body.messages is not None:
        if body.input is not None:
            raise invalid("messages", "expected either `input` or `messages`")
        if pooling.prompt_name:
            raise invalid("messages", "a prompt is only for `input`; write it into a message")
        messages = parse_messages(body.messages, "messages")
        if body.continue_final_message:
            check_continuable(messages)
        return [Prompt(messages=messages, pooling=pooling)]
    if body.input is None:
        raise missing("input")
    return _with_pooling(parse_prompts(body.input, "input", MAX_INPUTS), pooling)


def _with_pooling(prompts: Any, pooling: Pooling) -> list[Prompt]:
    return [msgspec.structs.replace(prompt, pooling=pooling) for prompt in prompts]


def _rendering(body: EmbeddingsBody | ClassifyBody) -> Rendering:
    """Return how messages are rendered: without the beginning of an answer, and only with the template's special
    tokens, unless the body asks for others."""
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid("continue_final_message", "requires `add_generation_prompt: false`")
    special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    return Rendering(
        template_variables=template_variables(body.chat_template_kwargs),
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=special,
    )


def parse_rerank(raw: bytes, defaults: SamplingDefaults) -> GenerationRequest:
    """Return the request for a body of Cohere's, Jina's or vLLM's /rerank, or of TEI's, which has `texts`. Raises
    ApiError."""
    shape = decode(_shape_decoder, raw)
    if bytes(shape.texts) != b"null" and bytes(shape.documents) == b"null":
        return _parse_tei_rerank(raw)
    return _parse_rerank(raw, version="1", returns_documents=True)


def parse_rerank_v2(raw: bytes, _: SamplingDefaults) -> GenerationRequest:
    """Raises ApiError."""
    return _parse_rerank(raw, version="2", returns_documents=False)


def _parse_rerank(raw: bytes, *, version: str, returns_documents: bool) -> GenerationRequest:
    """`returns_documents`: unless the body says otherwise."""
    body = decode(_rerank_decoder, raw)
    if body.instruct is not None and body.instruction is not None:
        raise invalid("instruct", "is another name of `instruction`; use one of them")
    documents = tuple(map(_text_of, body.documents))
    returned = returns_documents if body.return_documents is None else body.return_documents
    return _request(
        body,
        raw,
        ("rerank",),
        # vLLM's clients send 0 for all of them.
        RerankFormat(version=version, top_n=body.top_n or None, documents=documents if returned else ()),
        _pairs(
            [_text_of(body.query)],
            documents,
            Pooling(
                second_text_tokens=body.max_tokens_per_doc or 0,
                instruction=body.instruct if body.instruction is None else body.instruction,
                prompt_name=body.prompt_name or "",
            ),
            "query",
        ),
    )


def _text_of(document: str | Document) -> str:
    return document if isinstance(document, str) else document.text


def _parse_tei_rerank(raw: bytes) -> GenerationRequest:
    body = decode(_tei_rerank_decoder, raw)
    texts = tuple(body.texts)
    format = TeiRerankFormat(texts=texts if body.return_text else ())
    return _request(body, raw, ("rerank",), format, _pairs([body.query], texts, Pooling(), "query"))


def parse_score(raw: bytes, _: SamplingDefaults, *, by_embeddings: bool = False) -> GenerationRequest:
    """`by_embeddings`: the model embeds texts, and the score of a pair is the cosine of its two embeddings. Raises
    ApiError."""
    body = decode(_score_decoder, raw)
    (first_name, first), (_name, second) = (_texts(body, names) for names in (FIRST_TEXTS, SECOND_TEXTS))
    if len(first) not in (1, len(second)):
        raise invalid(first_name, f"expected one text, or as many as there are second ones, {len(second)}")
    pooling = Pooling(instruction=body.instruction, prompt_name=body.prompt_name or "")
    if by_embeddings:
        prompts = [*(Prompt(text=text, pooling=pooling) for text in first)]
        prompts += [Prompt(text=text, pooling=Pooling()) for text in second]
        return _request(body, raw, ("embed",), ScoreFormat(first_texts=len(first)), prompts)
    return _request(body, raw, ("rerank",), ScoreFormat(), _pairs(first, second, pooling, first_name))


def _texts(body: ScoreBody, names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the one field of these names that is given, and its texts."""
    given = [name for name in names if getattr(body, name) is not None]
    if not given:
        raise missing(names[0])
    if len(given) > 1:
        raise invalid(given[1], f"is another name of `{given[0]}`; use one of them")
    value: str | list[str] = getattr(body, given[0])
    return given[0], [value] if isinstance(value, str) else value


def _pairs(first: Sequence[str], second: Sequence[str], pooling: Pooling, param: str) -> list[Prompt]:
    """Return a prompt for each of the second texts, with its first text, or the only one, which `param` has. Raises
    ApiError."""
    if len(first) == 1 and len(first[0]) * len(second) > _COPIED_BYTES:
        raise invalid(param, f"expected at most {_COPIED_BYTES // len(second)} characters beside {len(second)} texts")
    firsts = first if len(first) > 1 else [first[0]] * len(second)
    return [
        Prompt(text=one, pooling=msgspec.structs.replace(pooling, second_text=other))
        for one, other in zip(firsts, second, strict=True)
    ]


def parse_tei_embed(raw: bytes, _: SamplingDefaults) -> GenerationRequest:
    """Raises ApiError."""
    body = decode(_tei_embed_decoder, raw)
    prompts = _with_pooling(
        parse_prompts(body.inputs, "inputs", MAX_INPUTS), Pooling(prompt_name=body.prompt_name or "")
    )
    format = TeiEmbedFormat(dimensions=body.dimensions)
    return _request(body, raw, ("embed",), format, prompts, dimensions=body.dimensions)


def parse_tei_predict(raw: bytes, _: SamplingDefaults, labels: tuple[str, ...] = ()) -> GenerationRequest:
    """`labels`: as in `ModelCard`. Raises ApiError."""
    body = decode(_tei_predict_decoder, raw)
    inputs: list[str | list[str]] = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    plain = [one for one in inputs if isinstance(one, str)]
    if plain and len(plain) < len(inputs):
        raise invalid("inputs", "expected texts or lists of texts, not both")
    is_list = not plain
    if plain:
        if len(plain) > 2:
            raise invalid("inputs", "expected a text or a pair; put each text of a batch into a list of its own")
        inputs = [plain]
    prompts = [Prompt(text=one[0], pooling=Pooling(second_text=one[1] if len(one) == 2 else None)) for one in inputs]
    return _request(body, raw, ("classify", "rerank"), TeiPredictFormat(is_list=is_list, labels=labels), prompts)


def _request(
    body: PoolingFields,
    raw: bytes,
    tasks: tuple[Task, ...],
    format: ResponseFormat,
    prompts: list[Prompt],
    *,
    rendering: Rendering = _PLAIN,
    dimensions: int | None = None,
) -> GenerationRequest:
    reject_unsupported(body)
    keep, side = _truncation(body)
    return GenerationRequest(
        model=body.model,
        prompts=prompts,
        params=SamplingParams(),
        options=RequestOptions(
            rendering=rendering,
            truncate_prompt_tokens=keep,
            truncation_side=side,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            stream=False,
        ),
        format=format,
        timeout_seconds=body.timeout,
        tasks=tasks,
        dimensions=dimensions,
        ignored=unknown_fields(type(body), raw),
    )


def _truncation(body: PoolingFields) -> tuple[int | None, Any]:
    """Return how many tokens of a prompt are kept, and on which side the others are left out. Raises ApiError."""
    if isinstance(body, TeiFields):
        return -1 if body.truncate else None, (body.truncation_direction or "right").lower()
    assert isinstance(body, TruncationFields)
    if body.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens", "expected at least 1, or -1 for as many as the context allows")
    return body.truncate_prompt_tokens, body.truncation_side or "right"
