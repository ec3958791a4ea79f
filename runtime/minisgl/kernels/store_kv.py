"""Store keys and values of a step's tokens in a paged pool."""

from __future__ import annotations

import torch


def store_kv(
    keys: torch.Tensor, values: torch.Tensor, locations: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """`keys`, `values` [pages, page_size, Hkv, D] of one layer; `locations` [T] int64, all different but for
    those in the dummy page; `k`, `v` [T, Hkv, D], the last two dimensions contiguous."""
    if keys.is_cuda:
        from minisgl.kernels.store_kv_triton import store_kv_cuda

        store_kv_cuda(keys, values, locations, k, v)
        return
    keys.flatten(0, 1).index_copy_(0, locations, k)
    values.flatten(0, 1).index_copy_(0, locations, v)
