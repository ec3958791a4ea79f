"""What the body of a request asks for: prompts, sampling, and the form of the answer.

Fields that are not served are known by name, and so is what they may hold without asking for anything.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

from minisgl.frontend.errors import ApiError
from minisgl.frontend.openai.bodies import (
    CONSTRAINTS,
    GRAMMARS,
    MAX_ASKED_TOKENS,
    MAX_CHOICES,
    MAX_COPIED_BYTES,
    MAX_PROMPTS,
    Body,
    ChatBody,
    CompletionBody,
    NativeBody,
    NativeSampling,
)
from minisgl.frontend.openai.conversation import conversation
from minisgl.frontend.openai.unknown_fields import unknown_fields
from minisgl.frontend.server.json_body import decode, invalid, unsupported
from minisgl.wire.messages import SamplingParams
from minisgl.wire.text import ChatMessage, SamplingDefaults

COMPLETION_MAX_TOKENS: Final = 16
"""Default of /v1/completions; a chat goes on to the end of the context."""
NATIVE_MAX_TOKENS: Final = 128
"""Default of /generate."""
MAX_LOGIT_BIAS: Final = 100.0
"""Larger ones act as this: none makes a difference any more."""

_NO_GRAMMAR: Final = "constrained output is not supported yet; leave the field out"

Kind = Literal["chat", "completion", "native", "plain"]
"""The form of the answer: OpenAI's two, and the two of /generate."""


class Prompt(msgspec.Struct, frozen=True):
    """One prompt; exactly one of the three is given."""

    messages: tuple[ChatMessage, ...] | None = None
    text: str | None = None
    tokens: bytes | None = None
    """int32"""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a valid body asks for. The answer has n choices for each prompt, those of the first prompt first."""

    kind: Kind
    model: str | None
    prompts: list[Prompt]
    n: int
    params: SamplingParams
    """Of choice 0; the others differ in their seeds."""
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    """Every chunk of a stream carries the usage so far."""
    echo: bool = False
    listed: bool = False
    """The answer is a list, whatever its length."""
    template_variables: dict[str, Any] = {}
    priority: int = 0
    timeout_seconds: float | None = None
    cache_salt: str = ""
    ignored: tuple[str, ...] = ()
    """Fields of the body that nobody here knows."""


_chat_decoder: Final = msgspec.json.Decoder(ChatBody)
_completion_decoder: Final = msgspec.json.Decoder(CompletionBody)
_native_decoder: Final = msgspec.json.Decoder(NativeBody)


def parse_chat(body: bytes, defaults: SamplingDefaults) -> Asked:
    """Raises ApiError."""
    chat = decode(_chat_decoder, body)
    _refuse_chat(chat)
    if chat.max_tokens == 0 and chat.max_completion_tokens is None:
        raise invalid("max_tokens", "expected at least 1")
    if chat.top_logprobs is not None and not chat.logprobs:
        raise invalid("top_logprobs", "needs `logprobs: true`")
    asked = _asked(
        "chat",
        chat,
        body,
        [Prompt(messages=conversation(chat.messages))],
        chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens,
        (chat.top_logprobs or 0) if chat.logprobs else None,
        defaults,
    )
    return msgspec.structs.replace(asked, template_variables=chat.chat_template_kwargs or {})


def parse_completion(body: bytes, defaults: SamplingDefaults) -> Asked:
    """Raises ApiError."""
    completion = decode(_completion_decoder, body)
    if completion.suffix:
        raise unsupported("suffix", "text behind the answer is not supported; leave the field out")
    if (completion.best_of or 1) > (completion.n or 1):
        raise unsupported("best_of", "more candidates than answers are not supported; leave the field out")
    return _asked(
        "completion",
        completion,
        body,
        list(_prompts(completion.prompt, "prompt")),
        COMPLETION_MAX_TOKENS if completion.max_tokens is None else completion.max_tokens,
        completion.logprobs,
        defaults,
        echo=bool(completion.echo),
    )


def parse_native(body: bytes, defaults: SamplingDefaults) -> Asked:
    """Raises ApiError."""
    native = decode(_native_decoder, body)
    given = [name for name in ("text", "input_ids", "prompt") if getattr(native, name) is not None]
    if len(given) != 1:
        raise invalid(given[1] if given else "text", "expected exactly one of `text`, `input_ids` and `prompt`")
    if native.return_logprob:
        raise unsupported("return_logprob", "not supported here: use /v1/completions with `logprobs`")
    ignored = unknown_fields(NativeBody, body)
    if native.prompt is not None:
        # Its callers expect greedy answers, and always a stream.
        params = SamplingParams(
            max_tokens=native.max_tokens or COMPLETION_MAX_TOKENS,
            temperature=0.0,
            ignore_eos=bool(native.ignore_eos),
        )
        prompts = [Prompt(text=native.prompt)]
        return Asked(kind="plain", model=None, prompts=prompts, n=1, params=params, stream=True, ignored=ignored)
    sampling = native.sampling_params or NativeSampling()
    for name in ("json_schema", *GRAMMARS):
        if getattr(sampling, name) is not None:
            raise unsupported(f"sampling_params.{name}", _NO_GRAMMAR)
    source = native.text if native.text is not None else native.input_ids
    assert source is not None
    prompts = list(_prompts(source, given[0]))
    n = sampling.n or 1
    max_tokens = sampling.max_new_tokens or NATIVE_MAX_TOKENS
    _check_choices(prompts, n, max_tokens, "sampling_params.n", len(body))
    _check_min_tokens(sampling.min_new_tokens, max_tokens, "sampling_params.min_new_tokens")
    return Asked(
        kind="native",
        model=None,
        prompts=prompts,
        n=n,
        params=SamplingParams(
            **_shared(sampling, defaults),
            max_tokens=max_tokens,
            min_tokens=sampling.min_new_tokens or 0,
            seed=sampling.sampling_seed,
            include_stop_str_in_output=bool(sampling.no_stop_trim),
        ),
        stream=bool(native.stream),
        listed=n > 1 or (isinstance(source, list) and type(source[0]) is not int),
        ignored=ignored,
    )


def _asked(
    kind: Kind,
    body: Body,
    raw: bytes,
    prompts: list[Prompt],
    max_tokens: int | None,
    logprobs: int | None,
    defaults: SamplingDefaults,
    *,
    echo: bool = False,
) -> Asked:
    _check_response_format(body.response_format)
    for name in CONSTRAINTS:
        if getattr(body, name) is not None:
            raise unsupported(name, _NO_GRAMMAR)
    n = body.n or 1
    _check_choices(prompts, n, max_tokens, "n", len(raw))
    _check_min_tokens(body.min_tokens, max_tokens, "min_tokens")
    bias = {token: max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, b)) for token, b in (body.logit_bias or {}).items()}
    options = body.stream_options
    include_usage = options is not None and bool(options.include_usage)
    return Asked(
        kind=kind,
        model=body.model,
        prompts=prompts,
        n=n,
        params=SamplingParams(
            **_shared(body, defaults),
            max_tokens=max_tokens,
            min_tokens=body.min_tokens or 0,
            seed=body.seed,
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            logit_bias=bias,
            logprobs=logprobs,
            prompt_logprobs=logprobs if echo else None,
        ),
        stream=bool(body.stream),
        include_usage=include_usage,
        continuous_usage=include_usage and options is not None and bool(options.continuous_usage_stats),
        echo=echo,
        priority=body.priority or 0,
        timeout_seconds=body.timeout,
        cache_salt=body.cache_salt or "",
        ignored=unknown_fields(type(body), raw),
    )


def _shared(body: Body | NativeSampling, defaults: SamplingDefaults) -> dict[str, Any]:
    """Sampling parameters that have one name everywhere."""
    stop = body.stop or ()
    return {
        "temperature": defaults.temperature if body.temperature is None else body.temperature,
        "top_k": defaults.top_k if body.top_k is None else body.top_k,
        "top_p": defaults.top_p if body.top_p is None else body.top_p,
        "min_p": defaults.min_p if body.min_p is None else body.min_p,
        "ignore_eos": bool(body.ignore_eos),
        "stop": (stop,) if isinstance(stop, str) else tuple(stop),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "repetition_penalty": (
            defaults.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty
        ),
    }


def _refuse_chat(chat: ChatBody) -> None:
    later = "not supported yet; leave the field out"
    if chat.tools and chat.tool_choice != "none":
        raise unsupported("tools", f'tool calls are {later}, or set `tool_choice` to "none"')
    if chat.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", f"tool calls are {later}")
    if chat.functions and chat.function_call != "none":
        raise unsupported("functions", f"function calls are {later}")
    if chat.function_call not in (None, "none", "auto"):
        raise unsupported("function_call", f"function calls are {later}")
    if chat.modalities not in (None, ["text"]):
        raise unsupported("modalities", "only text is supported")
    if chat.chat_template is not None:
        raise unsupported("chat_template", "the template is the model's own; leave the field out")
    for name in ("audio", "reasoning_effort", "web_search_options"):
        if getattr(chat, name) is not None:
            raise unsupported(name, later)


def _check_response_format(value: dict[str, Any] | None) -> None:
    if value is None or value.get("type") == "text":
        return
    if value.get("type") in ("json_object", "json_schema"):
        raise unsupported("response_format", _NO_GRAMMAR)
    raise invalid("response_format.type", 'expected "text"')


def _check_choices(prompts: list[Prompt], n: int, max_tokens: int | None, param: str, body_bytes: int) -> None:
    choices = len(prompts) * n
    if choices > MAX_CHOICES:
        raise invalid(param, f"expected at most {MAX_CHOICES} choices, n for each of {len(prompts)} prompts")
    if n > 1 and max_tokens is not None and choices * max_tokens > MAX_ASKED_TOKENS:
        raise invalid(
            param,
            f"{choices} choices of up to {max_tokens} tokens are more than {MAX_ASKED_TOKENS} in all: "
            f"ask for fewer choices, or for at most {MAX_ASKED_TOKENS // choices} tokens each",
        )
    if n > 1 and body_bytes * n > MAX_COPIED_BYTES:
        raise invalid(param, f"expected at most {MAX_COPIED_BYTES // body_bytes} choices of prompts as long as these")


def _check_min_tokens(min_tokens: int | None, max_tokens: int | None, param: str) -> None:
    if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
        raise invalid(param, f"expected no more than the most tokens to generate, {max_tokens}")


def _prompts(prompt: str | list[Any], param: str) -> Iterator[Prompt]:
    if isinstance(prompt, str):
        yield Prompt(text=prompt)
        return
    if not prompt:
        raise invalid(param, "expected at least one prompt or token id")
    if type(prompt[0]) is int:
        yield Prompt(tokens=_token_ids(prompt, param))
        return
    if len(prompt) > MAX_PROMPTS:
        raise invalid(param, f"expected at most {MAX_PROMPTS} prompts")
    for i, one in enumerate(prompt):
        if isinstance(one, str):
            yield Prompt(text=one)
        elif isinstance(one, list) and one:
            yield Prompt(tokens=_token_ids(one, f"{param}[{i}]"))
        else:
            raise invalid(f"{param}[{i}]", "expected a text or a list of token ids")


def _token_ids(ids: list[Any], path: str) -> bytes:
    if set(map(type, ids)) != {int}:
        raise invalid(path, "expected token ids, which are integers")
    if min(ids) < 0:
        raise ApiError(400, "invalid_token", f"{path}: a token id is negative", path)
    try:
        return array("i", ids).tobytes()
    except OverflowError:
        raise invalid(path, "expected token ids of the model's vocabulary") from None
