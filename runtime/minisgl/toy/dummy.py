"""Checkpoint directories with the config.json of a well-known model and no weights, for `serve --dummy-weights`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from minisgl.toy.tiny import write_checkpoint
from minisgl.toy.tiny_tokenizer import FAMILIES, train_tokenizer


def write_dummy_checkpoint(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a directory with `config` as its config.json, a synthetic tokenizer of the same vocabulary size, and no
    tensors; returns `folder`. Raises ModelError."""
    family = FAMILIES[config["model_type"].replace("_", "-")]
    tokenizer = _fill_vocabulary(train_tokenizer(family, config["vocab_size"]), config["vocab_size"])
    ids = {
        "bos_token_id": tokenizer.token_to_id(family.bos) if family.bos else None,
        "eos_token_id": tokenizer.token_to_id(family.eos),
        "pad_token_id": tokenizer.token_to_id(family.pad),
    }
    return write_checkpoint(folder, {**config, **ids}, tokenizer, family, {})


def _fill_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """Add a token for each id without one. No merge produces it, but a sampled id decodes to a text, as with the
    model's own tokenizer."""
    content, known = json.loads(tokenizer.to_str()), tokenizer.get_vocab()
    used = set(known.values())
    # Includes control tokens: they would otherwise get new ids behind the added ones.
    content["model"]["vocab"] = known | {f"Ġw{index}": index for index in range(vocab_size) if index not in used}
    return Tokenizer.from_str(json.dumps(content))
