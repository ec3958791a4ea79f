"""The demo checkpoint with markers of reasoning and tool calls, for loads that have both."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from support.agent_markers import add_markers


def write_agent_checkpoint(demo: Path, out: Path) -> Path:
    """Copy the demo checkpoint to `out` and add the markers. Their embeddings are those of padding, which the model
    never gives: answers to requests without tools and thinking stay as they are."""
    shutil.copytree(demo, out)
    size = add_markers(out)
    config = json.loads((out / "config.json").read_text())
    tensors = load_file(out / "model.safetensors")
    embeddings = tensors["model.embed_tokens.weight"]
    padding = embeddings[config["pad_token_id"]].expand(size - len(embeddings), -1)
    tensors["model.embed_tokens.weight"] = torch.cat([embeddings, padding])
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    return out
