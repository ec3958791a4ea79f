"""Quantized weights of a checkpoint: which layers are quantized, and the tensors that store one. Without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

FLOATS: Final = ("F32", "BF16", "F16")
"""safetensors' names of the element types of weights and scales."""
BLOCK: Final = 128
"""Rows and columns of a block of FP8 weights that share a scale."""


class TensorSpec(NamedTuple):
    """Shape of a tensor in a checkpoint, and the element types that it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS


class Fp8Blocks(msgspec.Struct, frozen=True, tag="fp8-block"):
    """FP8 (e4m3) with one scale per block of 128 × 128 weights."""

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        """Tensors of one layer by the suffix of their names."""
        blocks = -(-out_features // BLOCK), -(-in_features // BLOCK)
        return {
            "weight": TensorSpec((out_features, in_features), ("F8_E4M3",)),
            "weight_scale_inv": TensorSpec(blocks),
        }


class Fp8Channels(msgspec.Struct, frozen=True, tag="fp8"):
    """FP8 (e4m3) with one scale per output channel or, with `per_tensor`, one in all."""

    per_tensor: bool = False
    static_inputs: bool = False
    """The checkpoint has a scale of each layer's input."""
    while_loading: bool = False
    """The checkpoint is not quantized; its weights are, while they are loaded."""

    @property
    def has_kernels(self) -> bool:
        """Whether kernels take weights as they are; others are dequantized while they are loaded."""
        return not self.per_tensor and not self.static_inputs

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        if self.while_loading:
            return {"weight": TensorSpec((out_features, in_features))}
        scale = {"weight_scale": TensorSpec((1,) if self.per_tensor else (out_features, 1))}
        inputs = {"input_scale": TensorSpec((1,))} if self.static_inputs else {}
        return {"weight": TensorSpec((out_features, in_features), ("F8_E4M3",)), **scale, **inputs}


class Int4Groups(msgspec.Struct, frozen=True, tag="int4"):
    """Integers of 4 bits, packed into int32; one scale, and without `symmetric` one zero point, per group of inputs of
    an output channel."""

    layout: Literal["compressed-tensors", "awq", "gptq"]
    group_size: int
    symmetric: bool
    plain_zeros: bool = True
    """Zero points are stored as they are; GPTQ's first format stores them minus 1."""

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        groups, int32 = in_features // self.group_size, ("I32",)
        if self.layout == "compressed-tensors":
            zeros = {} if self.symmetric else {"weight_zero_point": TensorSpec((out_features // 8, groups), int32)}
            return {
                "weight_packed": TensorSpec((out_features, in_features // 8), int32),
                "weight_scale": TensorSpec((out_features, groups)),
                "weight_shape": TensorSpec((2,), ("I64", "I32")),
                **zeros,
            }
        scales = {
            "scales": TensorSpec((groups, out_features)),
            "qzeros": TensorSpec((groups, out_features // 8), int32),
        }
        if self.layout == "awq":
            return {"qweight": TensorSpec((in_features, out_features // 8), int32), **scales}
        return {
            "qweight": TensorSpec((in_features // 8, out_features), int32),
            "g_idx": TensorSpec((in_features,), int32),
            **scales,
        }


WeightFormat: TypeAlias = Fp8Blocks | Fp8Channels | Int4Groups


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """Quantization of a checkpoint."""

    format: WeightFormat
    ignored: tuple[str, ...] = ()
    """Layers that are not quantized: names, or parts of names between dots."""
    ignored_patterns: tuple[str, ...] = ()
    """Regular expressions that match the beginning of the names of layers that are not quantized."""

    def format_of(self, layer: str) -> WeightFormat | None:
        """Format of a linear layer such as `model.layers.0.mlp.up_proj`; None: it is not quantized."""
        if any(f".{name}." in f".{layer}." for name in self.ignored):
            return None
        return None if any(re.match(pattern, layer) for pattern in self.ignored_patterns) else self.format

    @property
    def name(self) -> str:
        """Short name for logs and reports, as `fp8-block` or `int4`."""
        name: str = self.format.__struct_config__.tag  # type: ignore[assignment]
        return name
