"""Fields of chats that the Responses API and Anthropic's Messages API take, too, with the same meaning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

from msgspec import Meta

from minisgl.frontend.generation.sampling import SamplerFields, Seed
from minisgl.frontend.generation.unsupported import (
    Compaction,
    Fallbacks,
    KvTransfer,
    Moderation,
    Prediction,
    Thread,
)
from minisgl.frontend.openai.bodies import ChatBody, TemplateVariables
from minisgl.frontend.server.json_body import unsupported
from minisgl.wire.messages import SamplingParams
from minisgl.wire.text import SamplingDefaults

_WITHOUT_EFFECT: Final = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options"}
)
"""Fields of chats that may be ignored elsewhere."""


class ExtraFields(SamplerFields, kw_only=True):
    seed: Seed | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    timeout: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    chat_template_kwargs: TemplateVariables | None = None

    prediction: Prediction = None
    moderation: Moderation = None
    compaction: Compaction = None
    thread: Thread = None
    fallbacks: Fallbacks = None
    kv_transfer_params: KvTransfer = None


def chat_fields(body: type[ExtraFields]) -> list[str]:
    """Return the fields of chats that another body does not have. To ignore them would change the answer."""
    return sorted({*ChatBody.__struct_fields__} - {*body.__struct_fields__} - _WITHOUT_EFFECT)


def reject_chat_fields(unknown: Sequence[str], body: type[ExtraFields]) -> None:
    """Raises ApiError for a field of chats among the unknown fields of another body."""
    for name in chat_fields(body):
        if name in unknown:
            raise unsupported(name, "a field of /v1/chat/completions, which this API does not have; leave it out")


def extra_params(
    fields: ExtraFields,
    defaults: SamplingDefaults,
    *,
    max_tokens: int | None,
    stop: Sequence[str],
    logprobs: int | None = None,
) -> SamplingParams:
    """Return the sampling parameters of a request, with the checkpoint's defaults."""
    given = {name: getattr(fields, name) for name in SamplingDefaults.__struct_fields__}
    return SamplingParams(
        **{name: getattr(defaults, name) if value is None else value for name, value in given.items()},
        max_tokens=max_tokens,
        seed=fields.seed,
        stop=tuple(stop),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logprobs=logprobs,
    )


def extra_options(fields: ExtraFields) -> dict[str, Any]:
    """Return the fields of `RequestOptions` that these APIs have in common."""
    return {"priority": fields.priority or 0, "cache_salt": fields.cache_salt or ""}
