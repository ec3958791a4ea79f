"""Reading the body of a request, within limits."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from minisgl.frontend.errors import ApiError, ClientGone


async def read_json_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body. Raises ApiError when it is longer than `limit` bytes, compressed, or does not say that it is
    JSON, and ClientGone."""
    headers = Headers(scope=scope)
    _check_content_type(headers.get("content-type"))
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "unsupported_media_type", "bodies are not decompressed: send it without `Content-Encoding`")
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _check_content_type(value: str | None) -> None:
    """A missing header is fine; one that says something else is not."""
    if value is None:
        return
    media_type = value.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(
            415, "unsupported_media_type", "the body must be JSON: send it with `Content-Type: application/json`"
        )


def _too_large(limit: int) -> ApiError:
    # The rest of the body is not read, so the connection cannot be used again.
    return ApiError(
        413, "body_too_large", f"the body is longer than {limit} bytes: shorten it", headers={"connection": "close"}
    )
