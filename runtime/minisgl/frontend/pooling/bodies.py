"""Request bodies of texts that are pooled, with the ranges that are checked while decoding.

Every optional field may be null. Unknown fields are ignored, and a header of the response names them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from minisgl.frontend.generation.sampling import Count
from minisgl.frontend.generation.unsupported import supports
from minisgl.frontend.openai.bodies import Messages, TemplateVariables, Truncation

MAX_INPUTS: Final = 2048
"""Texts of one request, as in OpenAI's API."""
MAX_PROMPT_NAME: Final = 256

_NO_STREAM: Final = "outputs of texts are not streamed"
_ONLY_FLOAT32: Final = "only float32 is supported; convert the numbers in the client"
_LITTLE: Final = "numbers are little-endian; swap their bytes in the client"
_NO_CHOICE: Final = "the output is activated and normalized as the checkpoint says; leave the field out"
_NO_RAW: Final = "scores are activated as the checkpoint says; leave the field out"
_ONE_TEXT: Final = "parts of a document are not joined; send the text to score"

Name = Annotated[str, Meta(max_length=MAX_PROMPT_NAME)]
Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
Direction = Literal["left", "right", "Left", "Right"]


class PoolingFields(msgspec.Struct, kw_only=True):
    """Fields that all of these bodies have."""

    model: str | None = None
    user: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    timeout: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    stream: Annotated[bool | None, supports(False, problem=_NO_STREAM)] = None


class TruncationFields(PoolingFields, kw_only=True):
    """OpenAI's, vLLM's, Cohere's and Jina's."""

    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: Annotated[bool | None, supports(True, problem=_NO_CHOICE)] = None
    activation: Annotated[bool | None, supports(True, problem=_NO_CHOICE)] = None
    softmax: Annotated[bool | None, supports(True, problem=_NO_CHOICE)] = None


class _Input(TruncationFields, kw_only=True):
    """`input`, or `messages`, which are rendered by the chat template."""

    input: str | list[Any] | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None


class EmbeddingsBody(_Input, kw_only=True):
    """POST /v1/embeddings"""

    dimensions: Count | None = None
    encoding_format: Literal["float", "base64"] | None = None
    prompt_name: Name | None = None
    input_type: Name | None = None
    normalize: Annotated[bool | None, supports(True, problem=_NO_CHOICE)] = None
    embed_dtype: Annotated[str | None, supports("float32", problem=_ONLY_FLOAT32)] = None
    output_dtype: Annotated[str | None, supports("float", "float32", problem=_ONLY_FLOAT32)] = None
    endianness: Annotated[str | None, supports("native", "little", problem=_LITTLE)] = None


class ClassifyBody(_Input, kw_only=True):
    """POST /classify"""


class Document(msgspec.Struct):
    text: str


class RerankBody(TruncationFields, kw_only=True):
    """POST /rerank"""

    query: str | Document
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Count | None = None
    instruction: str | None = None
    instruct: str | None = None
    """Other name of `instruction`."""
    prompt_name: Name | None = None
    rank_fields: Annotated[list[str] | None, supports(["text"], [], problem=_ONE_TEXT)] = None
    max_chunks_per_doc: Annotated[int | None, supports(1, problem=_ONE_TEXT)] = None


class ScoreBody(TruncationFields, kw_only=True):
    """POST /score: the first texts under one of three names, the second ones under one of four."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    instruction: str | None = None
    prompt_name: Name | None = None


FIRST_TEXTS: Final = ("text_1", "queries", "data_1")
SECOND_TEXTS: Final = ("text_2", "documents", "items", "data_2")


class TeiFields(PoolingFields, kw_only=True):
    """TEI's (text-embeddings-inference)."""

    truncate: bool | None = None
    truncation_direction: Direction | None = None


class TeiEmbedBody(TeiFields, kw_only=True):
    """POST /embed"""

    inputs: str | list[Any]
    normalize: Annotated[bool | None, supports(True, problem=_NO_CHOICE)] = None
    prompt_name: Name | None = None
    dimensions: Count | None = None


class TeiRerankBody(TeiFields, kw_only=True):
    """POST /rerank with `texts`"""

    query: str
    texts: Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
    raw_scores: Annotated[bool | None, supports(False, problem=_NO_RAW)] = None
    return_text: bool | None = None


Parts = Annotated[list[str], Meta(min_length=1, max_length=2)]


class TeiPredictBody(TeiFields, kw_only=True):
    """POST /predict: a text, a list with a text or a pair, or a list of such lists."""

    inputs: str | Annotated[list[str | Parts], Meta(min_length=1, max_length=MAX_INPUTS)]
    raw_scores: Annotated[bool | None, supports(False, problem=_NO_RAW)] = None


class Shape(msgspec.Struct):
    """The fields by which the two kinds of bodies of /rerank differ."""

    documents: msgspec.Raw = msgspec.Raw(b"null")
    texts: msgspec.Raw = msgspec.Raw(b"null")
