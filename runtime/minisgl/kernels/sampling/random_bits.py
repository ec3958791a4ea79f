"""Counter-based random numbers: a pure function of (request seed, position, vocabulary index).

There is no generator state, so the random numbers of a request depend neither on its row nor on its neighbours, are the
same on every device and rank, and continue when the request is resumed elsewhere. Integer
arithmetic modulo 2^32 only; here in int64 with a mask, in the CUDA kernel in uint32. The mixing steps are those of
the `lowbias32` hash (C. Wellons, "Prospecting for hash functions", 2018), with a second key half added between
them, so that rows whose first halves are close do not see permutations of the same numbers.
"""

from __future__ import annotations

from typing import Final

import torch

MASK: Final = 0xFFFFFFFF
MIX_1: Final = 0x7FEB352D
MIX_2: Final = 0x846CA68B
MIX_3: Final = 0x9E3779B1
KEY_1: Final = 0x85EBCA6B
KEY_2: Final = 0xC2B2AE35
STRIDE: Final = 0x9E3779B9


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ (x >> 16)) * MIX_1 & MASK
    x = (x ^ (x >> 15)) * MIX_2 & MASK
    return x ^ (x >> 16)


def row_keys(seed_low: torch.Tensor, seed_high: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Two key halves [2, S] (int64 holding 32 bits) of rows [S]; `positions` counts the tokens before the one that
    is sampled. The inputs are int32, whose bits count."""
    low, high, position = (part.long() & MASK for part in (seed_low, seed_high, positions))
    first = _mix(_mix(_mix(low ^ KEY_1) ^ high) ^ position)
    second = _mix(_mix(_mix(high ^ KEY_2) ^ low) ^ position)
    return torch.stack((first, second))


def random_bits(keys: torch.Tensor, first_index: int, count: int) -> torch.Tensor:
    """[S, count] int64 holding 32 random bits for the vocabulary indices from `first_index` on."""
    index = torch.arange(first_index, first_index + count, device=keys.device)
    x = (index * STRIDE + keys[0, :, None]) & MASK
    x = (x ^ (x >> 16)) * MIX_1 & MASK
    x = ((x ^ (x >> 15)) + keys[1, :, None]) & MASK
    x = x * MIX_2 & MASK
    x = (x ^ (x >> 16)) * MIX_3 & MASK
    return x ^ (x >> 15)


def gumbel_noise(bits: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel numbers, float32, of 32 random bits each: −log(−log(1 − v)) with v = (bits + ½) / 2^32.

    The upper tail, where v is small, decides: there float32 has fine steps, and the series keeps log(1 − v) exact. v is
    below 1, so that no number is infinite.
    """
    v = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * (0.25 + v * 0.2))))
    return -torch.log(torch.where(v < 2.0**-4, series, -torch.log(1.0 - v)))
