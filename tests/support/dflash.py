"""DFlash in plain torch, over a whole sequence at once; the target is computed by Transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file


@cache
def _target(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None, None] / theta ** (torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@torch.inference_mode()
def reference_logits(target: Path, head: Path, known: Sequence[int]) -> torch.Tensor:
    """Logits [block − 1, vocab] of the drafts behind a `known` sequence, the last token of which begins the block."""
    config = json.loads((head / "config.json").read_text())
    weights = {name: tensor.float() for name, tensor in load_file(head / "model.safetensors").items()}
    model, theta = _target(target), config["rope_parameters"]["rope_theta"]
    end, size, dim = len(known) - 1, config["block_size"], config["head_dim"]
    states = model(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
    taken = [states[layer + 1][0] for layer in config["dflash_config"]["target_layer_ids"]]
    context = _norm(torch.cat(taken, -1) @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    block = torch.tensor([known[-1]] + [config["dflash_config"]["mask_token_id"]] * (size - 1))
    x = model.get_input_embeddings()(block)
    positions = torch.arange(end + size).float()
    for layer in range(config["num_hidden_layers"]):
        of = {name.removeprefix(f"layers.{layer}."): weight for name, weight in weights.items()}
        normed = _norm(x, of["input_layernorm.weight"])
        both = torch.cat((context, normed))
        q, k, v = (
            (source @ of[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, dim))
            for name, source in (("q", normed), ("k", both), ("v", both))
        )
        q = _rotate(_norm(q, of["self_attn.q_norm.weight"]), positions[end:], theta)
        k = _rotate(_norm(k, of["self_attn.k_norm.weight"]), positions, theta)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        shares = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5, -1)
        x = x + torch.einsum("hqk,khd->qhd", shares, v).flatten(1) @ of["self_attn.o_proj.weight"].T
        normed = _norm(x, of["post_attention_layernorm.weight"])
        inner = F.silu(normed @ of["mlp.gate_proj.weight"].T) * (normed @ of["mlp.up_proj.weight"].T)
        x = x + inner @ of["mlp.down_proj.weight"].T
    logits: torch.Tensor = model.lm_head(_norm(x, weights["norm.weight"]))
    return logits[1:]
