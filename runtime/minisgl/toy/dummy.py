"""A checkpoint directory of a well-known model's shape with all but its weights: what `serve --dummy-weights` wants."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from minisgl.toy.tiny import write_checkpoint
from minisgl.toy.tiny_tokenizer import FAMILIES, train_tokenizer


def write_dummy_checkpoint(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a directory with `config` as its config.json, a made-up tokenizer of the same vocabulary size, and no
    tensor. Raises ModelError."""
    family = FAMILIES[config["model_type"].replace("_", "-")]
    tokenizer = _filled(train_tokenizer(family, config["vocab_size"]), config["vocab_size"])
    ids = {
        "bos_token_id": tokenizer.token_to_id(family.bos) if family.bos else None,
        "eos_token_id": tokenizer.token_to_id(family.eos),
        "pad_token_id": tokenizer.token_to_id(family.pad),
    }
    return write_checkpoint(folder, {**config, **ids}, tokenizer, family, {})


def _filled(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """With a word for each id that has no token: no merge leads to it, but a sampled one has a text, as it would have
    with the model's own tokenizer."""
    content, known = json.loads(tokenizer.to_str()), tokenizer.get_vocab()
    used = set(known.values())
    # Control tokens too: they would get new ids behind those of the words.
    content["model"]["vocab"] = known | {f"Ġw{index}": index for index in range(vocab_size) if index not in used}
    return Tokenizer.from_str(json.dumps(content))
