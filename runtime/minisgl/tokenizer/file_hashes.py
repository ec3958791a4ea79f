"""The names and hashes of the tokenizer files of a checkpoint directory. Launchers and routers compare them without
loading a tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

TOOL_TEMPLATE: Final = "additional_chat_templates/tool_use.jinja"
"""Template of chats with tools, beside chat_template.jinja. Other templates in its folder are used by nothing here."""

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    TOOL_TEMPLATE,
    "generation_config.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)
"""All files that determine how text becomes token ids, and the default sampling parameters."""


def hash_tokenizer_files(directory: str | Path) -> dict[str, str]:
    """Return file name → sha256 (hex) of each existing tokenizer file, as in `ModelCard.tokenizer_hashes`."""
    root = Path(directory)
    return {name: _sha256(root / name) for name in TOKENIZER_FILES if (root / name).is_file()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def differing_files(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the names of files that are missing in one of two sets of hashes, or differ between them."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
