"""A tokenizer that is ready for use."""

from __future__ import annotations

from pathlib import Path

import msgspec

from minisgl.tokenizer.model_files import load_model_files
from minisgl.tokenizer.prompt_encoder import PromptEncoder
from minisgl.tokenizer.token_bytes import TokenBytes
from minisgl.wire.text import SamplingDefaults


class LoadedTokenizer(msgspec.Struct, frozen=True, eq=False):
    """Everything that a worker needs from one set of tokenizer files."""

    encoder: PromptEncoder
    token_bytes: TokenBytes
    defaults: SamplingDefaults
    hashes: dict[str, str]


def load(directory: str | Path) -> LoadedTokenizer:
    """Load the tokenizer files in a directory. Raises TokenizerError."""
    files = load_model_files(directory)
    return LoadedTokenizer(PromptEncoder(files), TokenBytes(files.tokenizer), files.defaults, files.hashes)
