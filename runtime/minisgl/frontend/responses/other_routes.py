"""Routes below /v1/responses: the length of the prompt that a request would have, stored responses, of which there are
none, and their compaction."""

from __future__ import annotations

import secrets

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from minisgl.frontend.config import FrontendConfig
from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation.model_names import response_model_name
from minisgl.frontend.responses.requests import parse_responses
from minisgl.frontend.server.json_body import read_json_body, truncate
from minisgl.frontend.server.request_record import record_of
from minisgl.frontend.server.responses import json_response
from minisgl.frontend.server.unknown_fields import ignored_params
from minisgl.frontend.tokenizers import TokenizerPool
from minisgl.wire.messages import REQUEST_ID_BYTES
from minisgl.wire.text import Encode, Encoded, SamplingDefaults


class InputTokens:
    """Raises ApiError and ClientDisconnected."""

    def __init__(self, tokenizers: TokenizerPool, config: FrontendConfig) -> None:
        self._tokenizers = tokenizers
        self._max_body_bytes = config.max_body_bytes

    async def count(self, request: Request) -> Response:
        raw = await read_json_body(request.scope, request.receive, self._max_body_bytes)
        parsed = parse_responses(raw, SamplingDefaults())
        headers = ignored_params(request.headers, parsed.ignored)
        response_model_name(parsed.model, self._tokenizers.names)
        reply = await self._tokenizers.ask(
            Encode(
                id=secrets.token_bytes(REQUEST_ID_BYTES),
                messages=parsed.prompts[0].messages,
                tools=parsed.options.tools,
                rendering=msgspec.structs.replace(parsed.options.rendering, add_special_tokens=False),
            ),
            record_of(request.scope).tenant,
        )
        assert isinstance(reply, Encoded)
        count = {"object": "response.input_tokens", "input_tokens": len(reply.tokens) // 4}
        return json_response(count, headers=headers)


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
