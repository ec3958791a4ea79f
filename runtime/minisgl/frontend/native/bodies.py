"""Body of POST /generate, with the ranges that are checked while decoding."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from minisgl.frontend.generation.sampling import Count, CountOrZero, SamplingFields, Seed, TokenId, TopLogprobs
from minisgl.frontend.generation.unsupported import NO_BEAMS, NO_LORA, supports

_TEXT_ONLY: Final = "only text is supported"
_NO_DOCUMENTS: Final = "there is no chat template to render them; write them into the text"
_MISPLACED: Final = "a field of `sampling_params`, with `text` or `input_ids`; send it there"

NotHere = Annotated[Any, supports(problem=_MISPLACED)]
NoListHere = Annotated[Any, supports([], problem=_MISPLACED)]
NoPenaltyHere = Annotated[float | None, supports(0, problem=_MISPLACED)]


class NativeSampling(SamplingFields, kw_only=True):
    """`sampling_params` of /generate."""

    max_new_tokens: CountOrZero | None = None
    min_new_tokens: CountOrZero | None = None
    sampling_seed: Seed | None = None
    no_stop_trim: bool | None = None

    use_beam_search: Annotated[bool | None, supports(False, problem=NO_BEAMS)] = None
    lora_path: Annotated[Any, supports(problem=NO_LORA)] = None
    documents: Annotated[Any, supports([], problem=_NO_DOCUMENTS)] = None


class MisplacedFields(msgspec.Struct, kw_only=True):
    """Fields of `sampling_params` beside it. Accepted are values that ask for nothing, whatever the checkpoint's
    defaults are."""

    max_new_tokens: NotHere = None
    min_new_tokens: Annotated[int | None, supports(0, problem=_MISPLACED)] = None
    temperature: NotHere = None
    top_p: NotHere = None
    top_k: NotHere = None
    min_p: NotHere = None
    n: Annotated[int | None, supports(1, problem=_MISPLACED)] = None
    sampling_seed: NotHere = None
    stop: NoListHere = None
    stop_token_ids: NoListHere = None
    stop_regex: NoListHere = None
    no_stop_trim: Annotated[bool | None, supports(False, problem=_MISPLACED)] = None
    presence_penalty: NoPenaltyHere = None
    frequency_penalty: NoPenaltyHere = None
    repetition_penalty: NotHere = None
    logit_bias: Annotated[Any, supports({}, problem=_MISPLACED)] = None
    allowed_token_ids: NotHere = None
    bad_words: NoListHere = None
    skip_special_tokens: Annotated[bool | None, supports(True, problem=_MISPLACED)] = None
    spaces_between_special_tokens: bool | None = None
    """Accepted without effect, as in `sampling_params`."""
    json_schema: NotHere = None
    regex: NotHere = None
    ebnf: NotHere = None
    structural_tag: NotHere = None


class NativeBody(MisplacedFields, kw_only=True):
    """POST /generate: `text` or `input_ids` with `sampling_params`, or `prompt` with `max_tokens`."""

    rid: Annotated[str, Meta(min_length=1, max_length=256)] | None = None

    text: str | list[Any] | None = None
    input_ids: list[Any] | None = None
    sampling_params: NativeSampling | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_logprobs_num: TopLogprobs | None = None
    token_ids_logprob: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    return_text_in_logprobs: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None

    return_hidden_states: Annotated[bool | None, supports(False)] = None
    image_data: Annotated[Any, supports([], problem=_TEXT_ONLY)] = None
    video_data: Annotated[Any, supports([], problem=_TEXT_ONLY)] = None
    audio_data: Annotated[Any, supports([], problem=_TEXT_ONLY)] = None
    input_embeds: Annotated[Any, supports(problem="not supported; use input_ids")] = None
    use_beam_search: Annotated[bool | None, supports(False, problem=NO_BEAMS)] = None
    lora_path: Annotated[Any, supports(problem=NO_LORA)] = None
    documents: Annotated[Any, supports([], problem=_NO_DOCUMENTS)] = None
    session_params: Annotated[Any, supports()] = None
    custom_logit_processor: Annotated[Any, supports()] = None

    prompt: str | None = None
    max_tokens: Count | None = None
    ignore_eos: bool | None = None
