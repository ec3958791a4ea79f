"""POST /tokenize and /detokenize, GET /tokenizer_info: the served tokenizer, for clients that count or score tokens."""

from __future__ import annotations

import secrets
from array import array
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from minisgl.frontend.config import FrontendConfig
from minisgl.frontend.generation.model_names import response_model_name
from minisgl.frontend.openai.bodies import DetokenizeBody, TokenizeBody
from minisgl.frontend.openai.conversation import parse_conversation, parse_rendering
from minisgl.frontend.openai.logprobs import token_text
from minisgl.frontend.openai.tools import parse_tools
from minisgl.frontend.server.json_body import decode, invalid, read_json_body
from minisgl.frontend.server.request_record import record_of
from minisgl.frontend.server.responses import json_response
from minisgl.frontend.server.unknown_fields import ignored_params, unknown_fields
from minisgl.frontend.tokenizers import TokenizerPool
from minisgl.wire.messages import REQUEST_ID_BYTES
from minisgl.wire.text import Decode, Decoded, Describe, Described, Encode, Encoded, Rendering

_tokenize_decoder: Final = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder: Final = msgspec.json.Decoder(DetokenizeBody)

B = TypeVar("B", TokenizeBody, DetokenizeBody)


class TokenizationEndpoints:
    """All raise ApiError and ClientDisconnected."""

    def __init__(self, tokenizers: TokenizerPool, config: FrontendConfig) -> None:
        self._tokenizers = tokenizers
        self._max_body_bytes = config.max_body_bytes

    async def tokenize(self, request: Request) -> Response:
        body, headers = await self._body(request, _tokenize_decoder)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "expected either `prompt` or `messages`")
        # A chat template writes the special tokens itself.
        special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
        request_id = secrets.token_bytes(REQUEST_ID_BYTES)
        if body.messages is None:
            question = Encode(id=request_id, prompt=body.prompt, rendering=Rendering(add_special_tokens=special))
        else:
            question = Encode(
                id=request_id,
                messages=parse_conversation(body, body.messages),
                tools=parse_tools(body.tools, None, None).options,
                rendering=parse_rendering(body, add_special_tokens=special),
            )
        reply = await self._tokenizers.ask(question, record_of(request.scope).tenant)
        assert isinstance(reply, Encoded)
        tokens = array("i", reply.tokens).tolist()
        answer = {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": self._max_model_len(),
            "token_strs": [token_text(name) for name in reply.names] if body.return_token_strs else None,
        }
        return json_response(answer, headers=headers)

    async def detokenize(self, request: Request) -> Response:
        body, headers = await self._body(request, _detokenize_decoder)
        question = Decode(id=secrets.token_bytes(REQUEST_ID_BYTES), tokens=array("i", body.tokens).tobytes())
        reply = await self._tokenizers.ask(question, record_of(request.scope).tenant)
        assert isinstance(reply, Decoded)
        # Clients of two other servers expect the text under these two names.
        return json_response({"prompt": reply.text, "text": reply.text}, headers=headers)

    async def tokenizer_info(self, request: Request) -> Response:
        question = Describe(id=secrets.token_bytes(REQUEST_ID_BYTES))
        reply = await self._tokenizers.ask(question, record_of(request.scope).tenant)
        assert isinstance(reply, Described)
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return json_response(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **{name: reply.special_tokens.get(name) for name in names},
                "add_bos_token": reply.add_bos_token,
                "chat_template": reply.chat_template,
                "model_max_length": self._max_model_len(),
            }
        )

    def _max_model_len(self) -> int | None:
        model = self._tokenizers.model
        return None if model is None else model.card.max_model_len

    async def _body(self, request: Request, decoder: msgspec.json.Decoder[B]) -> tuple[B, dict[str, str]]:
        """Return the body and the headers for the response."""
        raw = await read_json_body(request.scope, request.receive, self._max_body_bytes)
        body = decode(decoder, raw)
        response_model_name(body.model, self._tokenizers.names)
        return body, ignored_params(request.headers, unknown_fields(type(body), raw))
