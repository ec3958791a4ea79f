"""Tiny draft heads for the tiny target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.models.drafter import Drafter, DrafterConfig
from minisgl.models.random_weights import random_tensor
from minisgl.toy.tiny import write_tiny_checkpoint

CONSTANT = 77
"""Token that the target of `write_copying_pair` always generates."""


def drafter_config(target: Path, **changes: Any) -> dict[str, Any]:
    """config.json of a head of two layers for a target of at least three."""
    own = json.loads((target / "config.json").read_text())
    return {
        **{name: own[name] for name in ("hidden_size", "vocab_size", "max_position_embeddings", "rope_parameters")},
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "rms_norm_eps": 1e-6,
        "layer_types": ["full_attention", "full_attention"],
        "num_target_layers": own["num_hidden_layers"],
        "block_size": 10,
        "dflash_config": {"mask_token_id": 2, "target_layer_ids": [0, 1]},
        **changes,
    }


def write_tiny_drafter(folder: Path, target: Path, *, seed: int = 0, silent: bool = False, **changes: Any) -> Path:
    """Write a head with random weights, and return `folder`. `silent`: its layers add nothing to what they get, so that
    it drafts the token that the target's output head gives to the mask."""
    config = drafter_config(target, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    drafter = Drafter(DrafterConfig.parse(config), TensorParallel(), torch.float32, "cpu", 8)
    tensors = {
        source.name: random_tensor(source.name, source.shape, seed).to(torch.bfloat16)
        for source in drafter.parameters.sources
    }
    if silent:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_copying_pair(folder: Path, **shape: Any) -> tuple[Path, Path]:
    """Write a target that generates one token for ever, and a head whose drafts are therefore right. `shape`: see
    `write_tiny_checkpoint`."""
    target = write_tiny_checkpoint(folder / "target", "qwen3", layers=4, tied=False, **shape)
    file = target / "model.safetensors"
    tensors = load_file(file)
    direction = torch.ones(tensors["lm_head.weight"].shape[1])
    tensors["model.embed_tokens.weight"] += (8 * direction).bfloat16()
    tensors["lm_head.weight"][CONSTANT] = direction.bfloat16()
    save_file(tensors, file, {"format": "pt"})
    heads = {"head_dim": shape["head_dim"]} if "head_dim" in shape else {}
    return target, write_tiny_drafter(folder / "head", target, silent=True, **heads)
