"""Keys and values as the KV pool stores them: in the type of the model, or in FP8 with one scale per layer;
and places of the keys of segments there."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from minisgl.kernels.pointwise.fp8_rows import E4M3_MAX

FP8: Final = torch.float8_e4m3fn


class KVScales(NamedTuple):
    """Factors of one layer: a key is a stored key times `key`. 1 for pools that are not FP8."""

    key: float = 1.0
    value: float = 1.0


UNSCALED: Final = KVScales()


def as_stored(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """`x` as a pool of `dtype` stores it: FP8 rounds x / scale to the nearest number, at most ±448."""
    if dtype != FP8:
        return x
    # The kernels multiply, too: then all devices store the same numbers.
    return (x.float() * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(FP8)


def put(pool: torch.Tensor, rows: torch.Tensor, x: torch.Tensor) -> None:
    """Copy `x` [T, ...] to the `rows` [T] int64 of `pool` [R, ...] of the same type."""
    _bytes(pool).index_copy_(0, rows, _bytes(x))


def take(pool: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The `rows` of `pool` [R, ...] in `dtype`."""
    return _bytes(pool)[rows].view(pool.dtype).to(dtype)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """`x`, with FP8 as bytes: torch indexes FP8 only on some devices."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


GUARD: Final = 256
"""Rows of zeros behind the last key. Attention kernels read whole tiles, and a weight of 0 does not remove a value that
is not finite."""


class KeyRows(NamedTuple):
    """Places of the keys of P segments, the same in all layers."""

    offsets: torch.Tensor
    """[P + 1] int32: offset of each segment among all keys."""
    rows: torch.Tensor
    """[at least keys + GUARD] int32: row of the flattened pool for each key; −1 in the guard, undefined behind it."""
