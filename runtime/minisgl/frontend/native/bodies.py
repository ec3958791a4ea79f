"""Body of POST /generate, with the ranges that are checked while decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from minisgl.frontend.generation.sampling import Count, CountOrZero, SamplingFields, Seed, TokenId, TopLogprobs
from minisgl.frontend.generation.unsupported import NO_BEAMS, NO_LORA, supports, with_fields

_TEXT_ONLY: Final = "only text is supported"
_NO_DOCUMENTS: Final = "there is no chat template to render them; write them into the text"
_MISPLACED: Final = "a field of `sampling_params`, with `text` or `input_ids`; send it there"


class NativeSampling(SamplingFields, kw_only=True):
    """`sampling_params` of /generate."""

    max_new_tokens: CountOrZero | None = None
    min_new_tokens: CountOrZero | None = None
    sampling_seed: Seed | None = None
    no_stop_trim: bool | None = None

    use_beam_search: Annotated[bool | None, supports(False, problem=NO_BEAMS)] = None
    lora_path: Annotated[Any, supports(problem=NO_LORA)] = None
    documents: Annotated[Any, supports([], problem=_NO_DOCUMENTS)] = None


class NativeFields(msgspec.Struct, kw_only=True):
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


_NOTHING: Final[Mapping[str, tuple[Any, Any]]] = {
    **dict.fromkeys(("stop", "stop_token_ids", "stop_regex", "bad_words"), (Any, [])),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (float | None, 0)),
    "min_new_tokens": (int | None, 0),
    "n": (int | None, 1),
    "no_stop_trim": (bool | None, False),
    "logit_bias": (Any, {}),
    "skip_special_tokens": (bool | None, True),
}
"""Type of fields of `sampling_params`, and the value that asks for nothing, whatever the checkpoint's defaults are."""


def _misplaced() -> dict[str, Any]:
    """Annotations of the fields of `sampling_params`, which are refused beside it unless they ask for nothing."""
    found: dict[str, Any] = {}
    for name in sorted({*NativeSampling.__struct_fields__} - {*NativeFields.__struct_fields__}):
        type_, *nothing = _NOTHING.get(name, (Any,))
        found[name] = Annotated[type_, supports(*nothing, problem=_MISPLACED)]
    # Accepted without effect, as in `sampling_params`.
    return found | {"spaces_between_special_tokens": bool | None}


NativeBody: Final = with_fields("NativeBody", NativeFields, _misplaced())
