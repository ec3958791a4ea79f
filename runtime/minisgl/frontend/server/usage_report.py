"""Tokens that a request used, which a gateway asks for because it does not read answers.

A whole response has them in a header. A stream has the prompt's in a header, if they are known when it begins, and all
of them in a comment of server-sent events before its end, on a line of its own. Trailers would be the place that HTTP
has for it, but proxies of service meshes drop them. Without the request header nothing is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from starlette.datastructures import Headers

from minisgl.frontend.server.response_stream import ResponseStream
from minisgl.wire.text import Finished

REQUEST_HEADER: Final = "x-minisgl-report-usage"
"""Asks for the report, with any value."""
RESPONSE_HEADER: Final = "x-minisgl-usage"
COMMENT: Final = b": minisgl-usage "
"""Beginning of the line in a stream, before the same JSON object as in the header."""


_Tokens = Annotated[int, Meta(ge=0, le=2**31)]
"""Far above what a request can use: a report outside is none, since it would let a tenant use everything or nothing."""


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request. A prompt counts once, for any number of choices."""

    prompt_tokens: _Tokens
    completion_tokens: _Tokens

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def usage_header(headers: Headers, usage: Usage) -> dict[str, str]:
    """Return the response header, if the request's `headers` ask for it."""
    return {RESPONSE_HEADER: msgspec.json.encode(usage).decode()} if REQUEST_HEADER in headers else {}


def usage_comment(headers: Headers, usage: Usage) -> bytes:
    """Return the comment in a stream, if the request's `headers` ask for it."""
    return b"%b%b\n\n" % (COMMENT, msgspec.json.encode(usage)) if REQUEST_HEADER in headers else b""


def usage_of(ends: Sequence[Finished], n: int) -> Usage:
    """Return the usage of a complete response with `n` choices for each prompt."""
    return Usage(sum(end.prompt_tokens for end in ends[::n]), sum(end.completion_tokens for end in ends))


def usage_so_far(stream: ResponseStream) -> Usage:
    """Return the usage of a response that is not complete."""
    prompts = sum(choice.prompt_tokens for choice in stream.choices[:: stream.n])
    return Usage(prompts if stream.is_accepted else 0, sum(choice.tokens for choice in stream.choices))
