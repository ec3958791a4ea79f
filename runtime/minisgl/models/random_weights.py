"""Random weights that keep activations near unit variance, so that logits stay finite in every dtype."""

from __future__ import annotations

import hashlib
from typing import Final

import torch

from minisgl.kernels.fp8_rows import E4M3_MAX
from minisgl.kernels.int4_words import OUTPUTS, pack_scales
from minisgl.layers.parameters import Parameters, Source

_FP8_SPREAD: Final = 100.0
"""Standard deviation of random FP8 numbers, which reach 448."""


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The whole checkpoint tensor `name`, float32 on the CPU, determined by (seed, name, shape)."""
    tensor = torch.empty(shape)
    _fill(tensor, name, shape[-1], f"{seed}/{name}")
    return tensor


def fill_random(parameters: Parameters, seed: int = 0) -> None:
    """Fill every parameter. On a CPU the values do not depend on the split over ranks. On other devices each part is
    generated on the device, which takes seconds for any size, and depends on the split."""
    inputs = 1
    for source in parameters.sources:
        if source.name.endswith(("weight_scale_inv", "weight_scale")):
            # The scales of a weight follow it.
            source.into.fill_(inputs**-0.5 / _FP8_SPREAD)
        elif source.scales is not None and source.into.dtype == torch.int32:
            _fill_words(source, source.scales, seed)
        elif source.into.dtype == torch.float8_e4m3fn:
            inputs = source.shape[-1]
            if source.scales is not None:
                source.scales.fill_(inputs**-0.5 / _FP8_SPREAD)
            wide = torch.empty_like(source.into, dtype=parameters.dtype)
            _fill_part(wide, source, seed)
            source.into.copy_((wide * (_FP8_SPREAD * source.shape[-1] ** 0.5)).clamp(-E4M3_MAX, E4M3_MAX))
        else:
            _fill_part(source.into, source, seed)


def _fill_words(source: Source, scales: torch.Tensor, seed: int) -> None:
    """Fill a weight of 4 bits with random numbers around 8, whose standard deviation is 4.6."""
    part = "/".join(str(take.start) for take in source.take)
    generator = _generator(source.into.device, f"{seed}/{source.name}/{part}")
    source.into.random_(-(1 << 31), 1 << 31, generator=generator)
    outputs, groups = len(scales) * OUTPUTS, scales.shape[1] // OUTPUTS
    scale = torch.full((outputs, groups), source.shape[-1] ** -0.5 / 4.6, device=scales.device)
    scales.copy_(pack_scales(scale, torch.full_like(scale, 8, dtype=torch.int32)))


def _fill_part(into: torch.Tensor, source: Source, seed: int) -> None:
    if into.device.type == "cpu":
        into.copy_(random_tensor(source.name, source.shape, seed)[source.take])
    else:
        # Ranks that hold the same part (with fewer KV heads than ranks) must generate the same values.
        part = "/".join(str(take.start) for take in source.take)
        _fill(into, source.name, source.shape[-1], f"{seed}/{source.name}/{part}")


def _generator(device: torch.device, key: str) -> torch.Generator:
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little"))
    return generator


def _fill(tensor: torch.Tensor, name: str, fan_in: int, key: str) -> None:
    generator = _generator(tensor.device, key)
    if name.endswith("norm.weight"):
        tensor.uniform_(0.9, 1.1, generator=generator)
    elif name.endswith(".bias"):
        tensor.normal_(0.0, 0.1, generator=generator)
    else:
        tensor.normal_(0.0, fan_in**-0.5, generator=generator)
