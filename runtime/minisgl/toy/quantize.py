"""Quantized forms of a checkpoint's weights: every format that can be read, rounded to nearest."""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch
from typing import Any, Final, NamedTuple

import torch

from minisgl.layers.weights.formats import BLOCK, Fp8Blocks, Fp8Channels, Int4Groups, WeightFormat

_E4M3_MAX: Final = 448.0
_AWQ_CHANNELS: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output channel, among 8 neighbours, of each 4 bits of AWQ's int32."""
_IN_ORDER: Final = tuple(range(8))


def _compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, form: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def _float8(strategy: str, *, dynamic: bool) -> dict[str, Any]:
    return {"type": "float", "num_bits": 8, "strategy": strategy, "dynamic": dynamic, "symmetric": True}


def _int4(*, symmetric: bool, group_size: int) -> dict[str, Any]:
    return {"type": "int", "num_bits": 4, "strategy": "group", "group_size": group_size, "symmetric": symmetric}


QUANTIZATION_CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "fp8-block": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head"],
    },
    "fp8-channel": _compressed(_float8("channel", dynamic=False), _float8("token", dynamic=True), "float-quantized"),
    "fp8-tensor": _compressed(_float8("tensor", dynamic=False), _float8("tensor", dynamic=False), "float-quantized"),
    "int4": _compressed(_int4(symmetric=True, group_size=64), None, "pack-quantized"),
    "int4-zeros": _compressed(_int4(symmetric=False, group_size=64), None, "pack-quantized"),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False, "lm_head": False},
}
"""`quantization_config` of a tiny checkpoint, by the name of its format."""


class QuantizedWeight(NamedTuple):
    """One layer's weight."""

    tensors: Mapping[str, torch.Tensor]
    """Tensors of the checkpoint, by the suffix of their names."""
    dense: torch.Tensor
    """The weight that they stand for."""


@singledispatch
def quantize(weights: WeightFormat, weight: torch.Tensor, scale_type: torch.dtype = torch.bfloat16) -> QuantizedWeight:
    """Quantize a weight [out, in] of any float type, in float32. `scale_type`: type of scales outside FP8 blocks."""
    raise TypeError(f"no function is registered for {weights.name}")


@quantize.register
def _fp8_blocks(weights: Fp8Blocks, weight: torch.Tensor, scale_type: torch.dtype = torch.bfloat16) -> QuantizedWeight:
    wide = weight.float()
    rows, columns = wide.shape
    padded = torch.zeros(-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK)
    padded[:rows, :columns] = wide
    blocks = padded.view(len(padded) // BLOCK, BLOCK, -1, BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / _E4M3_MAX
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    stored = (wide / spread).to(torch.float8_e4m3fn)
    return QuantizedWeight({"weight": stored, "weight_scale_inv": scale}, stored.float() * spread)


@quantize.register
def _fp8_channels(
    weights: Fp8Channels, weight: torch.Tensor, scale_type: torch.dtype = torch.bfloat16
) -> QuantizedWeight:
    wide = weight.float()
    largest = wide.abs().amax().view(1) if weights.per_tensor else wide.abs().amax(1, keepdim=True)
    scale = (largest / _E4M3_MAX).to(scale_type)
    stored = (wide / scale.float()).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    tensors = {"weight": stored, "weight_scale": scale}
    if weights.static_inputs:
        # Wide enough for the activations of a tiny model.
        tensors["input_scale"] = torch.full((1,), 16 / _E4M3_MAX, dtype=scale_type)
    return QuantizedWeight(tensors, stored.to(scale_type) * scale)


@quantize.register
def _int4_groups(
    weights: Int4Groups, weight: torch.Tensor, scale_type: torch.dtype = torch.bfloat16
) -> QuantizedWeight:
    wide = weight.float()
    rows, columns = wide.shape
    size = weights.group_size
    groups = wide.view(rows, columns // size, size)
    if weights.symmetric:
        scale = (groups.abs().amax(2) / 7).to(scale_type)
        zeros = torch.full(scale.shape, 8, dtype=torch.int32)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scale = ((high - low) / 15).to(scale_type)
        zeros = (-low / scale.float()).round().clamp(0, 15).to(torch.int32)
    numbers = (groups / scale.float()[..., None]).round().to(torch.int32) + zeros[..., None]
    numbers = numbers.clamp(0, 15)
    dense = ((numbers - zeros[..., None]).to(scale_type) * scale[..., None]).view(rows, columns)
    numbers = numbers.view(rows, columns)
    if weights.layout == "compressed-tensors":
        tensors = {
            "weight_packed": _pack(numbers),
            "weight_scale": scale,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not weights.symmetric:
            tensors["weight_zero_point"] = _pack(zeros.T).T.contiguous()
    else:
        places = _AWQ_CHANNELS if weights.layout == "awq" else _IN_ORDER
        stored_zeros = zeros if weights.plain_zeros else zeros - 1
        tensors = {"scales": scale.T.contiguous(), "qzeros": _pack(stored_zeros.T, places)}
        if weights.layout == "awq":
            tensors["qweight"] = _pack(numbers.T, places)
        else:
            tensors["qweight"] = _pack(numbers).T.contiguous()
            tensors["g_idx"] = torch.arange(columns, dtype=torch.int32) // size
    return QuantizedWeight(tensors, dense)


def _pack(numbers: torch.Tensor, places: tuple[int, ...] = _IN_ORDER) -> torch.Tensor:
    """Numbers 0..15 [rows, columns] to int32 [rows, columns / 8]: 4 bits of each of 8 neighbours in a row."""
    eights = numbers.to(torch.int64).view(len(numbers), -1, 8)
    packed = torch.zeros(eights.shape[:2], dtype=torch.int64)
    for shift, place in enumerate(places):
        packed |= (eights[..., place] & 15) << 4 * shift
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
