"""A parsed generation request, and the messages to tokenizer workers that it becomes: one for each choice."""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from typing import Final

import msgspec
from starlette.datastructures import Headers

from minisgl.config import Task
from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation.prompts import Prompt
from minisgl.frontend.generation.response_format import ResponseFormat
from minisgl.frontend.server.json_body import invalid
from minisgl.wire.messages import REQUEST_ID_BYTES, SamplingParams
from minisgl.wire.text import Generate, RequestOptions, ServedModel, fewest_tokens, too_long_message

_GRACE_SECONDS: Final = 0.5
"""Time by which a deadline from the client library's own timeout is later than that timeout: the client reports its
timeout, and not an error of ours that arrives at the same moment."""

MAX_CHOICES: Final = 1024
"""Choices of one request: prompts times n."""
MAX_COPIED_BYTES: Final = 64 << 20
"""Size of a body times n, because each choice takes its prompt along."""
MAX_REQUESTED_TOKENS: Final = MAX_CHOICES * 4096
"""Choices times `max_tokens`, for a request that has several choices of a prompt and sets `max_tokens`."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request. The response has n choices for each prompt, those of the first prompt first."""

    model: str | None = None
    prompts: list[Prompt]
    n: int = 1
    params: SamplingParams
    """Parameters of choice 0; the others differ in their seeds."""
    options: RequestOptions
    format: ResponseFormat
    timeout_seconds: float | None = None
    tool_fields: tuple[str, ...] = ()
    """Paths of the fields with the parameters of each tool in `options`, for errors; empty: OpenAI's for chats."""
    structured_output_field: str = ""
    """Path of the field with the constraint, for errors."""
    ignored: tuple[str, ...] = ()
    """Unknown fields of the body."""
    tasks: tuple[Task, ...] = ("generate",)
    """Tasks of models that can answer it."""
    dimensions: int | None = None
    """Numbers of each embedding that the response has; None: all."""


def generate_messages(
    request: GenerationRequest, headers: Headers, waited: float = 0.0, tenant: str = "", *, traced: bool = False
) -> list[Generate]:
    """Return a message for each choice of a tenant's request that has waited for some seconds: choice j of prompt i is
    at i · n + j. `traced`: it is recorded in a trace. Raises ApiError for a bad timeout."""
    digest = hashlib.blake2b(tenant.encode("utf-8", "replace"), digest_size=8).digest()
    deadline = deadline_ms(request, headers, waited)
    variants = [_params_of_choice(request.params, j) for j in range(request.n)]
    return [
        Generate(
            id=secrets.token_bytes(REQUEST_ID_BYTES),
            messages=prompt.messages,
            prompt=prompt.text,
            tokens=prompt.tokens,
            params=params,
            options=request.options,
            pooling=prompt.pooling,
            deadline_ms=deadline,
            tenant=digest,
            traced=traced,
        )
        for prompt in request.prompts
        for params in variants
    ]


def with_priority(request: GenerationRequest, priority: int) -> GenerationRequest:
    """Return the request with another priority."""
    return msgspec.structs.replace(request, options=msgspec.structs.replace(request.options, priority=priority))


def check_choices(prompts: list[Prompt], n: int, max_tokens: int | None, param: str, body_bytes: int) -> None:
    """Raises ApiError, which blames `param`, when a request of `body_bytes` asks for too much at a time."""
    choices = len(prompts) * n
    if choices > MAX_CHOICES:
        raise invalid(param, f"expected at most {MAX_CHOICES} choices, n for each of {len(prompts)} prompts")
    if n > 1 and max_tokens is not None and choices * max_tokens > MAX_REQUESTED_TOKENS:
        raise invalid(
            param,
            f"{choices} choices of up to {max_tokens} tokens exceed {MAX_REQUESTED_TOKENS} in total; request fewer "
            f"choices, or at most {MAX_REQUESTED_TOKENS // choices} tokens each",
        )
    if n > 1 and body_bytes * n > MAX_COPIED_BYTES:
        raise invalid(param, f"expected at most {MAX_COPIED_BYTES // body_bytes} choices of prompts this long")


def check_min_tokens(min_tokens: int | None, max_tokens: int | None, param: str) -> None:
    """Raises ApiError."""
    if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
        raise invalid(param, f"{min_tokens} exceeds the maximum number of tokens, {max_tokens}")


def derived_seed(seed: int, choice: int) -> int:
    """Return the seed of a choice, an int64. Choice 0 has the seed itself, so that its text does not depend on n."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(b"%d %d" % (seed, choice), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _params_of_choice(params: SamplingParams, choice: int) -> SamplingParams:
    if params.seed is None or choice == 0:
        return params
    return msgspec.structs.replace(params, seed=derived_seed(params.seed, choice))


def deadline_ms(request: GenerationRequest, headers: Headers, waited: float = 0.0) -> int:
    """Return the earliest deadline of body and headers, in Unix time, of a request that has waited for some seconds;
    0: none. Raises ApiError for a bad timeout."""
    seconds = [] if request.timeout_seconds is None else [request.timeout_seconds]
    if (given := headers.get("x-request-timeout-ms")) is not None:
        milliseconds = _number(given)
        if milliseconds is None or milliseconds <= 0:
            name = "x-request-timeout-ms"
            raise ApiError(400, "invalid_value", f"{name}: expected a positive number of milliseconds", name)
        seconds.append(milliseconds / 1000)
    # OpenAI's client library always sends this header, with text for "no timeout". It is how long the client waits for
    # the next bytes: those of a full response come at its end, those of a stream all the time.
    read_timeout = None if request.options.stream else _number(headers.get("x-stainless-read-timeout", ""))
    if read_timeout is not None and read_timeout > 0:
        seconds.append(read_timeout + _GRACE_SECONDS)
    return int((time.time() + min(seconds) - waited) * 1000) if seconds else 0


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return min(number, 1e9) if math.isfinite(number) else None


def check_prompt_lengths(request: GenerationRequest, model: ServedModel | None) -> None:
    """Refuse prompts that certainly exceed the context before they take a place in a queue or time of a worker. Raises
    ApiError."""
    if model is None or request.options.truncate_prompt_tokens is not None:
        return
    for prompt in request.prompts:
        tokens = _fewest_tokens(prompt, model.longest_token)
        if tokens > model.card.max_model_len:
            raise ApiError.from_code("context_length_exceeded", too_long_message(model.card.max_model_len, tokens))


def _fewest_tokens(prompt: Prompt, longest_token: int) -> int:
    if prompt.tokens is not None:
        return len(prompt.tokens) // 4
    if prompt.text is not None:
        return fewest_tokens(prompt.text, longest_token)
    # Templates may leave out earlier messages, and blanks around the text of this one. Workers check what is rendered.
    last = prompt.messages[-1] if prompt.messages else None
    return fewest_tokens(last.content.strip(), longest_token) if last and last.role == "user" and last.content else 0
