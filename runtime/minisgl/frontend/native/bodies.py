"""Body of POST /generate, with the ranges that are checked while decoding."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from minisgl.frontend.generation.sampling import Count, CountOrZero, SamplingFields, Seed, TokenId, TopLogprobs
from minisgl.frontend.generation.unsupported import supports

_TEXT_ONLY: Final = "only text is supported"
_NO_LORA: Final = "adapters are not supported; merge the adapter into the checkpoint and serve that"


class NativeSampling(SamplingFields, kw_only=True):
    """`sampling_params` of /generate."""

    max_new_tokens: CountOrZero | None = None
    min_new_tokens: CountOrZero | None = None
    sampling_seed: Seed | None = None
    no_stop_trim: bool | None = None


class NativeBody(msgspec.Struct, kw_only=True):
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
    lora_path: Annotated[Any, supports(problem=_NO_LORA)] = None
    session_params: Annotated[Any, supports()] = None
    custom_logit_processor: Annotated[Any, supports()] = None

    prompt: str | None = None
    max_tokens: Count | None = None
    ignore_eos: bool | None = None
