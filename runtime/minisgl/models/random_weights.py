"""Random weights that keep activations near unit variance, so that logits stay finite in every dtype."""

from __future__ import annotations

import hashlib
from functools import partial

import torch

from minisgl.layers.weights.parameters import Parameters, Source, in_order
from minisgl.layers.weights.weight import Draw


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The whole checkpoint tensor `name`, float32 on the CPU, determined by (seed, name, shape)."""
    tensor = torch.empty(shape)
    _fill(tensor, name, shape[-1], f"{seed}/{name}")
    return tensor


def fill_random(parameters: Parameters, seed: int = 0) -> None:
    """Fill every parameter. On a CPU the values do not depend on the split over ranks. On other devices each part is
    generated on the device, which takes seconds for any size, and depends on the split."""
    for source in parameters.sources:
        if source.kept is None:
            _fill_part(source.into, source, seed)
        else:
            normal = partial(_normal, source, parameters.dtype, seed)
            generator = partial(_generator, parameters.device, f"{seed}/{source.name}/{_place(source)}")
            source.kept.fill_random(Draw(source.shape[-1], normal, generator))


def _normal(source: Source, dtype: torch.dtype, seed: int) -> torch.Tensor:
    numbers = torch.empty_like(source.into, dtype=dtype)
    _fill_part(numbers, source, seed)
    return numbers


def _place(source: Source) -> str:
    """Name of this rank's part. Ranks that hold the same one (with fewer KV heads than ranks) must generate the same
    values."""
    place = "/".join(str(take.start) for take in source.take)
    return place if source.stack is None else f"{source.stack.index}/{place}"


def _fill_part(into: torch.Tensor, source: Source, seed: int) -> None:
    if into.device.type == "cpu":
        into.copy_(in_order(_taken(source, seed), source.order))
    else:
        _fill(into, source.name, source.shape[-1], f"{seed}/{source.name}/{_place(source)}")


def _taken(source: Source, seed: int) -> torch.Tensor:
    if (stack := source.stack) is None:
        return random_tensor(source.name, source.shape, seed)[source.take]
    return stack.one(random_tensor(source.name, stack.shape(*source.shape), seed)[stack.take(source.take)])


def _generator(device: torch.device, key: str) -> torch.Generator:
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little"))
    return generator


def _fill(tensor: torch.Tensor, name: str, fan_in: int, key: str) -> None:
    generator = _generator(tensor.device, key)
    if name.endswith("norm.weight") or (tensor.dim() == 1 and not name.endswith("bias")):
        tensor.uniform_(0.9, 1.1, generator=generator)
    elif name.endswith(".bias"):
        tensor.normal_(0.0, 0.1, generator=generator)
    else:
        tensor.normal_(0.0, fan_in**-0.5, generator=generator)
