"""Attention of blocks of new tokens, each to all of its block and to all of the context before it, which is paged."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl.kernels.attention.block_contexts import Contexts
from minisgl.kernels.attention.stored_kv import take


def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    contexts: Contexts,
    scale: float,
) -> torch.Tensor:
    """q [R * B, Hq, D], k and v [R * B, Hkv, D], rotated, are those of R blocks of B tokens, one after the other;
    `keys` and `values` [pages, page_size, Hkv, D] are the pool of one layer. The last two dimensions of all are
    contiguous. Returns [R * B, Hq, D]."""
    if q.is_cuda:
        from minisgl.kernels.attention.block_attention_triton import block_attention_cuda

        return block_attention_cuda(q, k, v, keys, values, contexts, scale)
    rows, page_size = len(contexts.slots), keys.shape[1]
    blocks = (part.unflatten(0, (rows, -1)).transpose(1, 2) for part in (q, k, v))
    pools, out = (keys, values), q.new_empty(rows, len(q) // max(rows, 1), *q.shape[1:])
    for row, (queries, own_keys, own_values) in enumerate(zip(*blocks, strict=True)):
        slot = int(contexts.slots[row])
        positions = torch.arange(int(contexts.lengths[slot]))
        places = contexts.page_table[slot, positions // page_size].long() * page_size + positions % page_size
        before_keys, before_values = (take(pool.flatten(0, 1), places, q.dtype).transpose(0, 1) for pool in pools)
        attended = F.scaled_dot_product_attention(
            queries[None],
            torch.cat((before_keys, own_keys), 1)[None],
            torch.cat((before_values, own_values), 1)[None],
            scale=scale,
            enable_gqa=True,
        )
        out[row] = attended[0].transpose(0, 1)
    return out.flatten(0, 1)
