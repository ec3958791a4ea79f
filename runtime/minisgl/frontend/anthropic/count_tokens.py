"""POST /v1/messages/count_tokens: the length of the prompt that a request would have."""

from __future__ import annotations

import secrets
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from minisgl.frontend.anthropic.bodies import CountTokensBody
from minisgl.frontend.anthropic.requests import parse_conversation
from minisgl.frontend.config import FrontendConfig
from minisgl.frontend.generation.model_names import response_model_name
from minisgl.frontend.server.json_body import decode, read_json_body
from minisgl.frontend.server.request_record import record_of
from minisgl.frontend.server.responses import json_response
from minisgl.frontend.server.unknown_fields import ignored_params, unknown_fields
from minisgl.frontend.tokenizers import TokenizerPool
from minisgl.wire.messages import REQUEST_ID_BYTES
from minisgl.wire.text import Encode, Encoded

_decoder: Final = msgspec.json.Decoder(CountTokensBody)


class TokenCount:
    """Raises ApiError and ClientDisconnected."""

    def __init__(self, tokenizers: TokenizerPool, config: FrontendConfig) -> None:
        self._tokenizers = tokenizers
        self._max_body_bytes = config.max_body_bytes

    async def count(self, request: Request) -> Response:
        raw = await read_json_body(request.scope, request.receive, self._max_body_bytes)
        body = decode(_decoder, raw)
        conversation = parse_conversation(body)
        headers = ignored_params(request.headers, (*unknown_fields(CountTokensBody, raw), *conversation.ignored))
        response_model_name(body.model, self._tokenizers.names)
        reply = await self._tokenizers.ask(
            Encode(
                id=secrets.token_bytes(REQUEST_ID_BYTES),
                messages=conversation.parsed.messages,
                tools=conversation.tools.options,
                rendering=msgspec.structs.replace(conversation.rendering, add_special_tokens=False),
            ),
            record_of(request.scope).tenant,
        )
        assert isinstance(reply, Encoded)
        return json_response({"input_tokens": len(reply.tokens) // 4}, headers=headers)
