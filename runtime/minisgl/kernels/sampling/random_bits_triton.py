"""The random numbers of `random_bits`, in uint32 arithmetic inside a kernel.

Constants are literals: several kernels call these functions, and Triton leaves the values of names out of the hash of
all but one of such kernels.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice


@triton.jit
def _u32(value: tl.constexpr):
    return tl.full((), value, tl.uint32)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * _u32(0x7FEB352D)
    x = (x ^ (x >> 15)) * _u32(0x846CA68B)
    return x ^ (x >> 16)


@triton.jit
def row_keys(seed_low, seed_high, position):
    """Two uint32 key halves of int32 scalars."""
    low = seed_low.to(tl.uint32, bitcast=True)
    high = seed_high.to(tl.uint32, bitcast=True)
    at = position.to(tl.uint32, bitcast=True)
    first = _mix(_mix(_mix(low ^ _u32(0x85EBCA6B)) ^ high) ^ at)
    second = _mix(_mix(_mix(high ^ _u32(0xC2B2AE35)) ^ low) ^ at)
    return first, second


@triton.jit
def keys_from(first, index):
    """First key half with which vocabulary index 0 has the random numbers of `index` (int32) with `first`."""
    return index.to(tl.uint32, bitcast=True) * _u32(0x9E3779B9) + first


@triton.jit
def gumbel_noise_log2(first, second, index):
    """float32 noise of the vocabulary indices `index` (int32) over −log 2.

    These instructions dominate the sampler's time: lg2.approx is one, an exact logarithm takes about twenty.
    Its relative error here is below 2^-18, a few units of the last place of a score.
    """
    x = index.to(tl.uint32, bitcast=True) * _u32(0x9E3779B9) + first
    x = (x ^ (x >> 16)) * _u32(0x7FEB352D)
    x = (x ^ (x >> 15)) * _u32(0x846CA68B) + second * _u32(0x846CA68B)
    x = (x ^ (x >> 16)) * _u32(0x9E3779B1)
    x = x ^ (x >> 15)
    v = tl.minimum(x.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994039535522)
    series = v * (1.0 + v * (0.5 + v * (0.3333333333333333 + v * (0.25 + v * 0.2))))
    return libdevice.fast_log2f(tl.where(v < 0.0625, series, -0.6931471805599453 * libdevice.fast_log2f(1.0 - v)))
