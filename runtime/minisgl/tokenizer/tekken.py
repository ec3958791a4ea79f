"""Mistral's tekken vocabularies, whose conversions to tokenizer.json may split texts at other places than the model has
learned."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, Final

from tokenizers import Regex, Tokenizer, pre_tokenizers

logger = logging.getLogger(__name__)

_PATTERN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Parts of a text that are encoded each for itself, in all of these vocabularies."""
_CONTROL_TOKENS: Final[Mapping[str, int]] = {
    "<unk>": 0,
    "<s>": 1,
    "</s>": 2,
    "[INST]": 3,
    "[/INST]": 4,
    "[AVAILABLE_TOOLS]": 5,
    "[TOOL_CALLS]": 9,
}
"""Tokens at the beginning of these vocabularies. Mistral's sentencepiece vocabularies have no pattern."""


def restore_tekken_pattern(tokenizer: Tokenizer) -> None:
    """Give a tokenizer with a tekken vocabulary the pattern of these, if it has another one."""
    if any(tokenizer.token_to_id(token) != number for token, number in _CONTROL_TOKENS.items()):
        return
    current = tokenizer.pre_tokenizer
    if not isinstance(current, pre_tokenizers.Sequence):
        return
    first: dict[str, Any] = json.loads(current.__getstate__())["pretokenizers"][0]
    if first["type"] != "Split" or first["pattern"] == {"Regex": _PATTERN}:
        return
    logger.warning("tokenizer.json splits texts at other places than Mistral's vocabulary: they are corrected")
    current[0] = pre_tokenizers.Split(Regex(_PATTERN), "isolated")
    tokenizer.pre_tokenizer = current
