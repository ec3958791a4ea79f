"""From what a body asks for to one request for each choice of the answer."""

from __future__ import annotations

import hashlib
import math
import secrets
import time

import msgspec
from starlette.datastructures import Headers

from minisgl.frontend.errors import ApiError
from minisgl.frontend.openai.requests import Asked
from minisgl.wire.messages import REQUEST_ID_BYTES, SamplingParams
from minisgl.wire.text import Generate


def requests_of(asked: Asked, headers: Headers) -> list[Generate]:
    """Choice j of prompt i is at i · n + j. Raises ApiError for a timeout that is none."""
    deadline_ms = _deadline_ms(asked, headers)
    variants = [_variant(asked.params, j) for j in range(asked.n)]
    return [
        Generate(
            id=secrets.token_bytes(REQUEST_ID_BYTES),
            messages=prompt.messages,
            prompt=prompt.text,
            tokens=prompt.tokens,
            template_variables=asked.template_variables,
            echo=asked.echo,
            params=params,
            priority=asked.priority,
            deadline_ms=deadline_ms,
            cache_salt=asked.cache_salt,
        )
        for prompt in asked.prompts
        for params in variants
    ]


def derived_seed(seed: int, choice: int) -> int:
    """int64. Choice 0 has the seed itself, so that its answer does not depend on n."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(b"%d %d" % (seed, choice), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _variant(params: SamplingParams, choice: int) -> SamplingParams:
    if params.seed is None or choice == 0:
        return params
    return msgspec.structs.replace(params, seed=derived_seed(params.seed, choice))


def _deadline_ms(asked: Asked, headers: Headers) -> int:
    """The earliest that body and headers name, in Unix time; 0: none."""
    seconds = [] if asked.timeout_seconds is None else [asked.timeout_seconds]
    if (given := headers.get("x-request-timeout-ms")) is not None:
        milliseconds = _number(given)
        if milliseconds is None or milliseconds <= 0:
            raise ApiError(400, "invalid_value", "x-request-timeout-ms: expected milliseconds", "x-request-timeout-ms")
        seconds.append(milliseconds / 1000)
    # The client library writes this one by itself, in its own way where there is no timeout. It is how long the client
    # waits for the next bytes: those of a whole answer come at its end, those of a stream all the time.
    read_timeout = None if asked.stream else _number(headers.get("x-stainless-read-timeout", ""))
    if read_timeout is not None and read_timeout > 0:
        seconds.append(read_timeout)
    return int((time.time() + min(seconds)) * 1000) if seconds else 0


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return min(number, 1e9) if math.isfinite(number) else None
