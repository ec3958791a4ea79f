"""Rotation of queries and keys by their positions, and storage of keys and values in the KV pool."""

from __future__ import annotations

import torch

from minisgl.kernels.attention.rotation import Rotation
from minisgl.kernels.attention.stored_kv import UNSCALED, KVScales, as_stored, put


def rotate_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotation: Rotation,
    keys: torch.Tensor,
    values: torch.Tensor,
    locations: torch.Tensor,
    kept_from: int,
    scales: KVScales = UNSCALED,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Store rotated k and v [T, Hkv, D] in `keys` and `values` [pages, page_size, Hkv, D] of one layer with `scales`,
    at `locations` [T] int64, distinct except in the dummy page. The last two dimensions of k and v are contiguous.

    Returns q [T, Hq, D], rotated, and the stored keys and values of the tokens from `kept_from` on,
    [T − kept_from, Hkv, D] in q's type: numbers of the pool, which still have to be multiplied by `scales`.
    """
    if q.is_cuda:
        from minisgl.kernels.attention.rotary_triton import rotate_and_store_cuda

        return rotate_and_store_cuda(q, k, v, rotation, keys, values, locations, kept_from, scales)
    q, k = rotation.apply(q, k)
    k, v = as_stored(k, keys.dtype, scales.key), as_stored(v, values.dtype, scales.value)
    put(keys.flatten(0, 1), locations, k)
    put(values.flatten(0, 1), locations, v)
    return q, k[kept_from:].to(q.dtype), v[kept_from:].to(q.dtype)


def rotate_queries(q: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """q [T, Hq, D], contiguous but for its rows, rotated, for layers that store no keys."""
    if q.is_cuda:
        from minisgl.kernels.attention.rotary_triton import rotate_queries_cuda

        return rotate_queries_cuda(q, rotation)
    return rotation.apply_to_queries(q)
