"""Mistral's own library, with a vocabulary of single bytes, and that vocabulary for our tokenizer."""

from __future__ import annotations

import base64
from typing import Any, Final

from mistral_common.protocol.instruct.normalize import get_normalizer
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.validator import ValidationMode, get_validator
from mistral_common.tokens.tokenizers import instruct
from mistral_common.tokens.tokenizers.base import SpecialTokens, TokenizerVersion
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONTROL: Final = tuple(token.value for token in SpecialTokens)
_ENCODERS: Final = {
    "v3": instruct.InstructTokenizerV3,
    "v7": instruct.InstructTokenizerV7,
    "v11": instruct.InstructTokenizerV11,
    "v13": instruct.InstructTokenizerV13,
}
VERSIONS: Final = tuple(_ENCODERS)


def prompt(name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
    """Return the tokens that a tokenizer of this version makes of a conversation in OpenAI's form."""
    version = TokenizerVersion(name)
    vocab = [
        {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode(), "token_str": None}
        for byte in range(256)
    ]
    special = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(CONTROL)]
    count = len(CONTROL)
    tokenizer = Tekkenizer(vocab, special, r"(?s:.+)", 256 + count, count, version)
    library: Any = MistralTokenizer(
        _ENCODERS[name](tokenizer),
        validator=get_validator(version, mode=ValidationMode.test),
        request_normalizer=get_normalizer(version),
    )
    request = ChatCompletionRequest.from_openai(messages=messages, tools=tools)
    tokens: list[int] = library.encode_chat_completion(request).tokens
    return tokens


def converted() -> Tokenizer:
    """Return the same vocabulary as Hugging Face's libraries have it."""
    visible = _visible_bytes()
    vocab = {text: rank for rank, text in enumerate(CONTROL)}
    vocab |= {visible[byte]: len(CONTROL) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*CONTROL])
    return tokenizer


def _visible_bytes() -> list[str]:
    """Return the character that stands for each byte in byte-level vocabularies."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]
