"""Body of POST /generate, with the ranges that are checked while decoding."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from minisgl.frontend.generation.constraints import SchemaOrText
from minisgl.frontend.generation.sampling import Count, CountOrZero, SamplingFields, Seed
from minisgl.frontend.generation.unsupported import supports

_NO_LOGPROBS: Final = "not supported; use /v1/completions with `logprobs`"


class NativeSampling(SamplingFields, kw_only=True):
    """`sampling_params` of /generate."""

    max_new_tokens: Count | None = None
    min_new_tokens: CountOrZero | None = None
    sampling_seed: Seed | None = None
    no_stop_trim: bool | None = None

    json_schema: SchemaOrText | None = None


class NativeBody(msgspec.Struct, kw_only=True):
    """POST /generate: `text` or `input_ids` with `sampling_params`, or `prompt` with `max_tokens`."""

    text: str | list[Any] | None = None
    input_ids: list[Any] | None = None
    sampling_params: NativeSampling | None = None
    stream: bool | None = None
    return_logprob: Annotated[bool | None, supports(False, problem=_NO_LOGPROBS)] = None

    prompt: str | None = None
    max_tokens: Count | None = None
    ignore_eos: bool | None = None
