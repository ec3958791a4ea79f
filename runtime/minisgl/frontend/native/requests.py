"""Parsing of /generate: from a body to a valid generation request."""

from __future__ import annotations

from typing import Final

import msgspec

from minisgl.frontend.generation.constraints import constraint_of
from minisgl.frontend.generation.logit_bias import decode_body
from minisgl.frontend.generation.prompts import Prompt, parse_prompts
from minisgl.frontend.generation.request import GenerationRequest, check_choices, check_min_tokens
from minisgl.frontend.generation.sampling import check_tops, sampling_params, text_options
from minisgl.frontend.generation.unsupported import reject_unsupported
from minisgl.frontend.native.bodies import NativeBody, NativeFields, NativeSampling
from minisgl.frontend.native.responses import NativeFormat
from minisgl.frontend.server.json_body import invalid
from minisgl.frontend.server.unknown_fields import unknown_fields
from minisgl.wire.messages import SamplingParams
from minisgl.wire.text import RequestOptions, SamplingDefaults

MAX_TOKENS: Final = 128
"""Default of `max_new_tokens`."""
TEXT_STREAM_MAX_TOKENS: Final = 16
"""Default of `max_tokens`, with `prompt`."""

ONLY_WITH_PROMPT: Final = ("max_tokens", "ignore_eos")
NOT_WITH_PROMPT: Final = ("sampling_params", "return_logprob")
"""Fields that only one of the two forms of a body has."""

_decoder: Final = msgspec.json.Decoder(NativeBody)


def parse_native(raw: bytes, defaults: SamplingDefaults) -> GenerationRequest:
    """Raises ApiError."""
    body = decode_body(_decoder, raw, "sampling_params")
    given = [name for name in ("text", "input_ids", "prompt") if getattr(body, name) is not None]
    if len(given) != 1:
        raise invalid(given[1] if given else "text", "expected exactly one of `text`, `input_ids` and `prompt`")
    reject_unsupported(body)
    _reject_other_form(body)
    if body.prompt is not None:
        # Clients of this form expect greedy sampling, and always a stream.
        return GenerationRequest(
            prompts=[Prompt(text=body.prompt)],
            params=SamplingParams(
                max_tokens=body.max_tokens or TEXT_STREAM_MAX_TOKENS,
                temperature=0.0,
                ignore_eos=bool(body.ignore_eos),
            ),
            options=RequestOptions(priority=body.priority or 0),
            format=NativeFormat(text_only=True),
            ignored=unknown_fields(NativeBody, raw),
        )
    sampling = body.sampling_params or NativeSampling()
    reject_unsupported(sampling, "sampling_params.")
    constraint = constraint_of(sampling, "sampling_params.")
    source = body.text if body.text is not None else body.input_ids
    assert source is not None
    prompts = list(parse_prompts(source, given[0]))
    n = sampling.n or 1
    max_tokens = MAX_TOKENS if sampling.max_new_tokens is None else sampling.max_new_tokens
    check_tops("top_logprobs_num", body.top_logprobs_num, "token_ids_logprob")
    logprobs = (body.top_logprobs_num or 0) if body.return_logprob else None
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    named = tuple(body.token_ids_logprob or ())
    if named and (start >= 0 or body.top_logprobs_num):
        raise invalid(
            "token_ids_logprob", "replaces the most likely tokens; leave out top_logprobs_num and logprob_start_len"
        )
    check_choices(prompts, n, max_tokens, "sampling_params.n", len(raw))
    check_min_tokens(sampling.min_new_tokens, max_tokens, "sampling_params.min_new_tokens")
    return GenerationRequest(
        prompts=prompts,
        n=n,
        params=sampling_params(
            sampling,
            defaults,
            max_tokens=max_tokens,
            min_tokens=sampling.min_new_tokens or 0,
            seed=sampling.sampling_seed,
            include_stop_str_in_output=bool(sampling.no_stop_trim),
            logprobs=logprobs,
            prompt_logprobs=logprobs if start >= 0 else None,
            logprob_token_ids=() if logprobs is None else named,
        ),
        options=RequestOptions(
            return_token_ids=True,
            priority=body.priority or 0,
            stream=bool(body.stream),
            structured_output=constraint.output if constraint else None,
            **text_options(sampling, "sampling_params."),
        ),
        structured_output_field=constraint.field if constraint else "",
        format=NativeFormat(
            is_list=n > 1 or (isinstance(source, list) and type(source[0]) is not int),
            request_id=body.rid or "",
            logprobs=logprobs,
            named_tokens=bool(named),
            logprob_start=start,
            texts_in_logprobs=bool(body.return_text_in_logprobs),
        ),
        ignored=unknown_fields(NativeBody, raw),
    )


def _reject_other_form(body: NativeFields) -> None:
    """Raises ApiError for a field of the other form, which would change the answer."""
    with_prompt = body.prompt is not None
    for name in NOT_WITH_PROMPT if with_prompt else ONLY_WITH_PROMPT:
        if getattr(body, name) not in (None, False):
            other = "`text` or `input_ids`" if with_prompt else "`prompt`; use `sampling_params`"
            raise invalid(name, f"is only for requests with {other}")
