"""Scales of an FP8 KV cache that a checkpoint brings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from safetensors import safe_open

from minisgl.errors import ModelError
from minisgl.kernels.attention.stored_kv import KVScales
from minisgl.models.checkpoint import StoredTensor, stored_tensors

_BLOCKS: Final = ("self_attn", "mixer")
_KEY_NAMES: Final = tuple(
    f"{block}.{name}" for block in _BLOCKS for name in ("k_scale", "k_proj.output_scale", "k_proj.k_scale", "kv_scale")
)
_VALUE_NAMES: Final = tuple(
    f"{block}.{name}" for block in _BLOCKS for name in ("v_scale", "v_proj.output_scale", "v_proj.v_scale", "kv_scale")
)
"""Names behind those of a layer: compressed-tensors' of today and before, those of other tools, one scale for both."""


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of this name is a scale of the KV cache."""
    return name.endswith((*_KEY_NAMES, *_VALUE_NAMES))


def read_kv_scales(directory: str | Path, kv_layers: Sequence[int]) -> list[KVScales]:
    """Scales of each layer, 1 where the checkpoint has none. `kv_layers`: for each layer the one whose keys and values
    it reads. Raises ModelError for scales that are no positive numbers, that differ between heads, or that some layers
    lack."""
    tensors = stored_tensors(Path(directory))
    found = {
        i: (_scale(tensors, f"model.layers.{i}.", _KEY_NAMES), _scale(tensors, f"model.layers.{i}.", _VALUE_NAMES))
        for i in sorted({*kv_layers})
    }
    given = {i: key is not None and value is not None for i, (key, value) in found.items()}
    if any(scale is not None for pair in found.values() for scale in pair) and not all(given.values()):
        layer = next(i for i, both in given.items() if not both)
        raise ModelError(
            "missing_tensor",
            f"the checkpoint has scales of the KV cache for some layers, but not both for layer {layer}; compare the "
            "files with the model's page, or serve without --kv-cache-dtype fp8",
        )
    return [KVScales(key or 1.0, value or 1.0) for key, value in (found[i] for i in kv_layers)]


def _scale(tensors: Mapping[str, StoredTensor], layer: str, names: tuple[str, ...]) -> float | None:
    name = next((layer + each for each in names if layer + each in tensors), None)
    if name is None:
        return None
    stored = tensors[name]
    if math.prod(stored.shape) != 1:
        raise ModelError(
            "wrong_shape",
            f"{stored.file.name}: {stored.name} has shape {list(stored.shape)}; one scale per layer is supported, so "
            "serve this checkpoint without --kv-cache-dtype fp8",
        )
    with safe_open(stored.file, framework="pt") as file:
        scale = float(file.get_tensor(stored.name).float())
    if not (math.isfinite(scale) and scale > 0):
        raise ModelError(
            "corrupt_checkpoint",
            f"{stored.file.name}: {stored.name} is {scale}, not a positive number; download it again",
        )
    return scale
