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
from minisgl.models.build import checkpoint_parameters
from minisgl.models.config import ModelConfig

TENSORS_PER_SHARD: Final = 50
WRITERS: Final = 4
Shapes = dict[str, tuple[int, ...]]


def shards(folder: Path) -> Iterator[Shapes]:
    """Yield names and shapes of the tensors of each file."""
    shapes = {source.name: source.shape for source in checkpoint_parameters(ModelConfig.read(folder)).sources}
    names = list(shapes)
    for first in range(0, len(names), TENSORS_PER_SHARD):
        yield {name: shapes[name] for name in names[first : first + TENSORS_PER_SHARD]}


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
