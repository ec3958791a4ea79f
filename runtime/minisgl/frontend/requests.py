"""The bodies of /v1/chat/completions and /v1/completions, and what they ask for.

Fields that are not served yet are known by name, so that a client that sends their neutral value is served, and any
other gets an error that says so. A field that nobody knows is an error as well: ignoring it silently would give an
answer to another question.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, TypeVar, cast

import msgspec
from msgspec import Meta

from minisgl.frontend.errors import ApiError
from minisgl.wire.messages import SamplingParams
from minisgl.wire.text import ChatMessage, Role, SamplingDefaults

MAX_MESSAGES: Final = 2048
MAX_PROMPTS: Final = 128
COMPLETION_MAX_TOKENS: Final = 16
"""Default of /v1/completions; a chat goes on to the end of the context."""

_MAX_NAME: Final = 64
"""Characters of a client's field name or value that an error repeats."""

_Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Stop = Annotated[str, Meta(min_length=1, max_length=256)]
_Temperature = Annotated[float, Meta(ge=0, le=2)]
_TopP = Annotated[float, Meta(gt=0, le=1)]
_TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
_MinP = Annotated[float, Meta(ge=0, le=1)]
_Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Padding against traffic analysis: not done, and no client can tell."""


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    max_tokens: _Tokens | None = None
    temperature: _Temperature | None = None
    top_p: _TopP | None = None
    top_k: _TopK | None = None
    min_p: _MinP | None = None
    seed: _Seed | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=16)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    n: Any = None
    logprobs: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None


class _ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[_ContentPart] | None = None
    name: Any = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    reasoning: Any = None
    reasoning_content: Any = None


class ChatBody(_Body, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[_Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: _Tokens | None = None

    top_logprobs: Any = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    store: Any = None
    metadata: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    web_search_options: Any = None


class CompletionBody(_Body, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[Any]
    best_of: Any = None
    echo: Any = None
    suffix: Any = None


_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "n": (1,),
    "logprobs": (False,),
    "logit_bias": ({},),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "top_logprobs": (),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
    "functions": ([],),
    "function_call": ("none",),
    "store": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "service_tier": (),
    "safety_identifier": (),
    "prompt_cache_key": (),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
"""Fields that are not served yet, and the values besides null that ask for nothing."""

_MESSAGE_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "name": (),
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "reasoning": (),
    "reasoning_content": (),
}

_ROLES: Final = ("system", "developer", "user", "assistant")


class Prompt(msgspec.Struct, frozen=True):
    """One prompt; exactly one of the three is given."""

    messages: tuple[ChatMessage, ...] | None = None
    text: str | None = None
    tokens: bytes | None = None
    """int32"""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a valid body asks for. The answer has a choice for each prompt."""

    kind: Literal["chat", "completion"]
    model: str | None
    prompts: list[Prompt]
    params: SamplingParams
    stream: bool
    include_usage: bool


B = TypeVar("B", bound=_Body)

_chat_decoder: Final = msgspec.json.Decoder(ChatBody)
_completion_decoder: Final = msgspec.json.Decoder(CompletionBody)


def parse_chat(body: bytes, defaults: SamplingDefaults) -> Asked:
    """Raises ApiError."""
    chat = _decode(_chat_decoder, body)
    _refuse_unserved(chat, _NEUTRAL, "")
    messages = tuple(_message(message, f"messages[{i}]") for i, message in enumerate(chat.messages))
    max_tokens = chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
    return _asked("chat", chat, [Prompt(messages=messages)], max_tokens, defaults)


def parse_completion(body: bytes, defaults: SamplingDefaults) -> Asked:
    """Raises ApiError."""
    completion = _decode(_completion_decoder, body)
    _refuse_unserved(completion, _NEUTRAL, "")
    max_tokens = COMPLETION_MAX_TOKENS if completion.max_tokens is None else completion.max_tokens
    return _asked("completion", completion, list(_prompts(completion.prompt)), max_tokens, defaults)


def _asked(
    kind: Literal["chat", "completion"],
    body: _Body,
    prompts: list[Prompt],
    max_tokens: int | None,
    defaults: SamplingDefaults,
) -> Asked:
    stop = body.stop or ()
    return Asked(
        kind=kind,
        model=body.model,
        prompts=prompts,
        params=SamplingParams(
            max_tokens=max_tokens,
            temperature=defaults.temperature if body.temperature is None else body.temperature,
            top_k=defaults.top_k if body.top_k is None else body.top_k,
            top_p=defaults.top_p if body.top_p is None else body.top_p,
            min_p=defaults.min_p if body.min_p is None else body.min_p,
            seed=body.seed,
            ignore_eos=bool(body.ignore_eos),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
    )


def _message(message: _Message, path: str) -> ChatMessage:
    if message.role not in _ROLES:
        if message.role in ("tool", "function"):
            raise _unsupported(f"{path}.role", f"messages of the role {message.role!r} are not supported yet")
        raise _invalid(f"{path}.role", f"expected one of {', '.join(_ROLES)}")
    _refuse_unserved(message, _MESSAGE_NEUTRAL, f"{path}.")
    content = message.content
    if content is None:
        raise _invalid(f"{path}.content", "expected a text or a list of text parts")
    if not isinstance(content, str):
        content = "\n".join(_part(part, f"{path}.content[{i}]") for i, part in enumerate(content))
    return ChatMessage(cast(Role, message.role), content)


def _part(part: _ContentPart, path: str) -> str:
    if part.type != "text":
        raise _unsupported(f"{path}.type", "only text parts are supported")
    if part.text is None:
        raise _invalid(f"{path}.text", "expected a text")
    return part.text


def _prompts(prompt: str | list[Any]) -> Iterator[Prompt]:
    if isinstance(prompt, str):
        yield Prompt(text=prompt)
        return
    if not prompt:
        raise _invalid("prompt", "expected at least one prompt or token id")
    if type(prompt[0]) is int:
        yield Prompt(tokens=_token_ids(prompt, "prompt"))
        return
    if len(prompt) > MAX_PROMPTS:
        raise _invalid("prompt", f"expected at most {MAX_PROMPTS} prompts")
    for i, one in enumerate(prompt):
        if isinstance(one, str):
            yield Prompt(text=one)
        elif isinstance(one, list) and one:
            yield Prompt(tokens=_token_ids(one, f"prompt[{i}]"))
        else:
            raise _invalid(f"prompt[{i}]", "expected a text or a list of token ids")


def _token_ids(ids: list[Any], path: str) -> bytes:
    if set(map(type, ids)) != {int}:
        raise _invalid(path, "expected token ids, which are integers")
    try:
        return array("i", ids).tobytes()
    except OverflowError:
        raise _invalid(path, "expected token ids of the model's vocabulary") from None


def _refuse_unserved(struct: msgspec.Struct, neutral: dict[str, tuple[object, ...]], path: str) -> None:
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if value is None or name not in neutral:
            continue
        # Types are compared as well: True == 1.
        if not any(type(value) is type(known) and value == known for known in neutral[name]):
            raise _unsupported(f"{path}{name}", "this value is not supported yet; leave the field out")


def _decode(decoder: msgspec.json.Decoder[B], body: bytes) -> B:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _of_validation(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON: {_cut(str(error), 200)}") from None
    except RecursionError:
        raise ApiError(400, "invalid_json", "the body is nested too deeply") from None


def _of_validation(text: str) -> ApiError:
    """From msgspec's words: "Expected `int`, got `str` - at `$.messages[0].role`"."""
    what, _, where = text.partition(" - at `$")
    # What lies in an object of ours without a type has no path of its own: `$.logit_bias[...]`.
    path = where.rstrip("`").lstrip(".").partition("[...]")[0]
    if unknown := re.match(r"Object contains unknown field `(.*)`", what, re.DOTALL):
        name = _join(path, _cut(unknown[1], _MAX_NAME))
        return ApiError(400, "unknown_parameter", f"the field {name!r} is not known: leave it out", name)
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", what):
        name = _join(path, missing[1])
        return ApiError(400, "missing_required_parameter", f"the field {name!r} is required", name)
    if not path:
        return ApiError(400, "invalid_value", f"the body: {what[0].lower()}{what[1:]}")
    return _invalid(path, what[0].lower() + what[1:])


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _invalid(param: str, what: str) -> ApiError:
    return ApiError(400, "invalid_value", f"{param}: {what}", param)


def _unsupported(param: str, what: str) -> ApiError:
    return ApiError(400, "unsupported_parameter", f"{param}: {what}", param)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "…"
