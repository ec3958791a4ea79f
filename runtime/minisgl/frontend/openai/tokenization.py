"""POST /tokenize and /detokenize, GET /tokenizer_info: the served tokenizer, for clients that count or score tokens."""

from __future__ import annotations

import secrets
from array import array
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from minisgl.frontend.config import FrontendConfig
from minisgl.frontend.generation import served_name
from minisgl.frontend.openai.bodies import DetokenizeBody, TokenizeBody
from minisgl.frontend.openai.conversation import conversation
from minisgl.frontend.openai.token_scores import spelled
from minisgl.frontend.openai.unknown_fields import refuse_if_strict, unknown_fields
from minisgl.frontend.server.body import read_json_body
from minisgl.frontend.server.json_body import decode, invalid
from minisgl.frontend.tokenizers import Tokenizers
from minisgl.wire.messages import REQUEST_ID_BYTES
from minisgl.wire.text import Decode, Decoded, Describe, Described, Encode, Encoded

_tokenize_decoder: Final = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder: Final = msgspec.json.Decoder(DetokenizeBody)

B = TypeVar("B", TokenizeBody, DetokenizeBody)


class TokenizationEndpoints:
    """All raise ApiError and ClientGone."""

    def __init__(self, tokenizers: Tokenizers, config: FrontendConfig) -> None:
        self._tokenizers = tokenizers
        self._max_body_bytes = config.max_body_bytes

    async def tokenize(self, request: Request) -> Response:
        body, headers = await self._body(request, _tokenize_decoder)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "expected either `prompt` or `messages`")
        # A chat template writes the special tokens itself.
        special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
        reply = await self._tokenizers.ask(
            Encode(
                id=secrets.token_bytes(REQUEST_ID_BYTES),
                prompt=body.prompt,
                messages=None if body.messages is None else conversation(body.messages),
                template_variables=body.chat_template_kwargs or {},
                add_special_tokens=special,
                add_generation_prompt=body.add_generation_prompt is not False,
            )
        )
        assert isinstance(reply, Encoded)
        tokens = array("i", reply.tokens).tolist()
        model = self._tokenizers.model
        answer = {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": None if model is None else model.card.max_model_len,
            "token_strs": [spelled(name) for name in reply.names] if body.return_token_strs else None,
        }
        return _json(answer, headers)

    async def detokenize(self, request: Request) -> Response:
        body, headers = await self._body(request, _detokenize_decoder)
        reply = await self._tokenizers.ask(
            Decode(id=secrets.token_bytes(REQUEST_ID_BYTES), tokens=array("i", body.tokens).tobytes())
        )
        assert isinstance(reply, Decoded)
        # Clients of two other servers expect the text under these two names.
        return _json({"prompt": reply.text, "text": reply.text}, headers)

    async def tokenizer_info(self, _: Request) -> Response:
        reply = await self._tokenizers.ask(Describe(id=secrets.token_bytes(REQUEST_ID_BYTES)))
        assert isinstance(reply, Described)
        model = self._tokenizers.model
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return _json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **{name: reply.special_tokens.get(name) for name in names},
                "add_bos_token": reply.add_bos_token,
                "chat_template": reply.chat_template,
                "model_max_length": None if model is None else model.card.max_model_len,
            },
            {},
        )

    async def _body(self, request: Request, decoder: msgspec.json.Decoder[B]) -> tuple[B, dict[str, str]]:
        """And the headers of the answer."""
        raw = await read_json_body(request.scope, request.receive, self._max_body_bytes)
        body = decode(decoder, raw)
        served_name(body.model, self._tokenizers.model)
        ignored = unknown_fields(type(body), raw)
        refuse_if_strict(request.headers, ignored)
        return body, {"x-ignored-params": ", ".join(ignored)} if ignored else {}


def _json(value: dict[str, Any], headers: dict[str, str]) -> Response:
    return Response(msgspec.json.encode(value), headers=headers, media_type="application/json")
