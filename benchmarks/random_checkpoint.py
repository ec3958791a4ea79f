"""Write a checkpoint of a built-in configuration with random weights in bfloat16, to measure starts with real files.

`python benchmarks/random_checkpoint.py qwen3-14b FOLDER` writes 29.5 GB in shards of five layers. Only dense models.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.models.config import ModelConfig

LAYERS_PER_SHARD: Final = 5
WRITERS: Final = 4
Shapes = dict[str, tuple[int, ...]]


def shards(folder: Path) -> Iterator[Shapes]:
    """Yield names and shapes of the tensors of each file."""
    config = ModelConfig.read(folder)
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    layer: Shapes = {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    if config.qkv_bias:
        layer["self_attn.q_proj.bias"] = (queries,)
        layer |= {f"self_attn.{name}_proj.bias": (keys,) for name in ("k", "v")}
    vocabulary: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tied_embeddings:
        vocabulary["lm_head.weight"] = (config.vocab_size, hidden)
    yield vocabulary
    for first in range(0, config.num_layers, LAYERS_PER_SHARD):
        layers = range(first, min(first + LAYERS_PER_SHARD, config.num_layers))
        yield {f"model.layers.{number}.{name}": shape for number in layers for name, shape in layer.items()}


def write(path: Path, shapes: Shapes) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return (torch.randn(shape, dtype=torch.bfloat16, device=device) * 0.02).cpu()

    save_file({name: tensor(shape) for name, shape in shapes.items()}, path, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint with random weights.")
    parser.add_argument("model", choices=sorted(BUILTIN_CONFIGS))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    (args.folder / "config.json").write_text(json.dumps(BUILTIN_CONFIGS[args.model]))
    files = {f"model-{number:05d}.safetensors": shapes for number, shapes in enumerate(shards(args.folder))}
    with ThreadPoolExecutor(WRITERS) as writers:
        list(writers.map(write, [args.folder / name for name in files], files.values()))
    index = {tensor: name for name, shapes in files.items() for tensor in shapes}
    (args.folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


if __name__ == "__main__":
    main()
