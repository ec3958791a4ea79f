"""Sampling fields that request bodies of all APIs share, with the ranges that are checked while decoding."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from minisgl.frontend.generation.constraints import DefinitionOrText, SchemaOrText
from minisgl.frontend.generation.logit_bias import clamped
from minisgl.frontend.server.json_body import invalid, truncate
from minisgl.tokenizer.patterns import PatternError, automaton
from minisgl.wire.messages import SamplingParams
from minisgl.wire.text import SamplingDefaults

TOKEN_ID: Final = "token id"
"""Title of the type in schemas; the vocabulary of the served model bounds it."""

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1, title=TOKEN_ID)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
N = Annotated[int, Meta(ge=1, le=128)]
BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
MAX_TOP_LOGPROBS: Final = 20
TopLogprobs = Annotated[int, Meta(ge=-1, le=MAX_TOP_LOGPROBS, extra_json_schema={"not": {"const": -1}})]
"""`check_tops` rejects −1."""
LogitBias = Annotated[
    dict[TokenId, float],
    Meta(max_length=1024, extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}}),
]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class SamplerFields(msgspec.Struct, kw_only=True):
    """Fields with one name and meaning in all APIs. Null is as good as leaving a field out."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.001, le=100)] | None = None


class SamplingFields(SamplerFields, kw_only=True):
    """Fields that OpenAI's chats and completions and SGLang's /generate share."""

    n: N | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    stop_regex: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    ignore_eos: bool | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=1 << 17)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=128)] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """Accepted without effect: special tokens in a text never have spaces around them."""
    json_schema: SchemaOrText | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: DefinitionOrText | None = None


def check_tops(name: str, tops: int | None, named: str = "logprob_token_ids") -> None:
    """Raises ApiError for −1 in the field `name`, by which clients ask for all tokens of the vocabulary. `named`: the
    field for tokens of the client's choice."""
    if tops == -1:
        raise invalid(
            name,
            "-1 is the whole vocabulary, megabytes for each token of an answer or prompt; expected at most "
            f"{MAX_TOP_LOGPROBS}. For tokens of an answer that you know, use `{named}`",
        )


def outside_vocabulary(params: SamplingParams, vocab_size: int) -> tuple[str, ...]:
    """Return the places of stop tokens that the model does not have, and which therefore end no answer."""
    return tuple(f"stop_token_ids[{i}]" for i, token in enumerate(params.stop_token_ids) if token >= vocab_size)


def sampling_params(fields: SamplingFields, defaults: SamplingDefaults, **others: Any) -> SamplingParams:
    """Return the parameters of a request, with the checkpoint's defaults. `others`: those whose name differs by API."""
    stop = fields.stop or ()
    given = {name: getattr(fields, name) for name in SamplingDefaults.__struct_fields__}
    return SamplingParams(
        **{name: getattr(defaults, name) if value is None else value for name, value in given.items()},
        ignore_eos=bool(fields.ignore_eos),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=clamped(fields.logit_bias),
        allowed_token_ids=tuple(fields.allowed_token_ids or ()),
        **others,
    )


def text_options(fields: SamplingFields, path: str = "") -> dict[str, Any]:
    """Return the fields of `RequestOptions` about the text of answers. `path` comes before names in errors. Raises
    ApiError for a regular expression that cannot be searched for."""
    given = fields.stop_regex or ()
    expressions = (given,) if isinstance(given, str) else tuple(given)
    for number, expression in enumerate(expressions):
        index = "" if isinstance(given, str) else f"[{number}]"
        try:
            automaton((), expressions[: number + 1])
        except PatternError as error:
            raise invalid(f"{path}stop_regex{index}", f"{truncate(expression)!r} {error.message}") from None
    return {
        "stop_regex": expressions,
        "bad_words": tuple(fields.bad_words or ()),
        "skip_special_tokens": fields.skip_special_tokens is not False,
    }
