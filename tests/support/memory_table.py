"""Generate the table of models and GPUs in docs/models.md with the arithmetic of `minisgl models check`:
`python -m support.memory_table` writes it, a test compares it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.models.build import checkpoint_parameters
from minisgl.models.config import ModelConfig

PAGE: Final = Path(__file__).parents[2] / "docs" / "models.md"

MODELS: Final[Mapping[str, str]] = {
    "qwen3-0.6b": "Qwen3-0.6B",
    "llama-3.2-1b": "Llama-3.2-1B",
    "mistral-7b-v0.3": "Mistral-7B-v0.3",
    "qwen2.5-7b": "Qwen2.5-7B",
    "llama-3.1-8b": "Llama-3.1-8B",
    "qwen3-8b": "Qwen3-8B",
    "qwen3-14b": "Qwen3-14B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "qwen3-32b": "Qwen3-32B",
}
"""Names by built-in configuration, by size."""

FORMATS: Final = (None, "fp8-block", "int4")
MEMORY_FRACTION: Final = 0.9
"""The default of --memory-fraction."""
STEP_GIB: Final = 4.0
"""Activations of the largest step, and CUDA graphs: what Qwen3-32B took on an H200."""
SMALL_GPUS: Final = (22, 44)
"""Memory of GPUs of 24 and 48 GB in GiB. They are not Hopper GPUs, so quantized weights are dequantized there."""
HOPPER_GPUS: Final = (79, 140)
"""Memory of an H100 and an H200 in GiB."""


def weight_gib(config: ModelConfig) -> float:
    """Memory for the weights on a Hopper GPU, as `minisgl models check` prints it."""
    kept = checkpoint_parameters(config, keep_quantized=config.quantization is not None)
    return kept.num_bytes / 2**30


def kv_kib(config: ModelConfig) -> float:
    """KV cache of one token in 16 bits."""
    return 2 * config.kv_numbers_per_token() / 2**10


def kv_tokens(gpu_gib: float, weights: float, kib: float) -> int:
    """Tokens that the KV cache holds beside the weights; 0 or less if they do not fit."""
    return int((MEMORY_FRACTION * gpu_gib - weights - STEP_GIB) * 2**20 / kib)


def render() -> str:
    """Text of docs/models.md with a new table."""
    rows = [
        "| model | weights in bf16, FP8, INT4 (GiB) | KV cache (KiB a token) | 24 GB | 48 GB "
        "| H100, 80 GB: bf16, FP8, INT4 | H200, 141 GB: bf16, FP8, INT4 |",
        "|---|---|---|---|---|---|---|",
        *(_row(name, title) for name, title in MODELS.items()),
    ]
    return re.sub(r"^\| model \|.*?\n(?=\n)", "\n".join(rows) + "\n", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


def _row(name: str, title: str) -> str:
    configs = [ModelConfig.parse(BUILTIN_CONFIGS[name], quantization=format) for format in FORMATS]
    weights = [weight_gib(config) for config in configs]
    kib = kv_kib(configs[0])
    small = [_thousands(kv_tokens(gpu, weights[0], kib)) for gpu in SMALL_GPUS]
    hopper = [", ".join(_thousands(kv_tokens(gpu, each, kib)) for each in weights) for gpu in HOPPER_GPUS]
    cells = [title, ", ".join(f"{each:.1f}" for each in weights), f"{kib:g}", *small, *hopper]
    return f"| {' | '.join(cells)} |"


def _thousands(tokens: int) -> str:
    return f"{tokens // 1000:,}k" if tokens >= 1000 else "–"


if __name__ == "__main__":
    PAGE.write_text(render())
