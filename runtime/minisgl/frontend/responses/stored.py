"""Routes of stored responses, of which there are none, and of their compaction."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.json_body import truncate


async def stored_response(request: Request) -> Response:
    """Raises ApiError."""
    name = truncate(request.path_params["name"])
    message = f"response {name!r} does not exist: responses are not stored; keep what POST /v1/responses returns"
    raise ApiError(404, "response_not_found", message)


async def compact_response(_: Request) -> Response:
    """Raises ApiError."""
    message = (
        "this server does not compact conversations: ask the model for a summary with POST /v1/responses, and send it "
        "as `input` in place of the items that it sums up"
    )
    raise ApiError(404, "compaction_not_supported", message)
