"""FlashAttention-3 (arXiv:2407.08608) from the fa3-fwd package. Its operator is called without the package's Python
functions, which cost the host more time than a launch."""

from __future__ import annotations

import importlib

import torch

from minisgl.kernels.attention.stored_kv import KVScales


def load_fa3() -> None:
    """Register the operator with torch. Raises ImportError or OSError."""
    importlib.import_module("fa3_fwd._C")


def attend_segments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    query_offsets: torch.Tensor,
    key_offsets: torch.Tensor,
    *,
    longest_query: int,
    longest_key: int,
    splits: int,
    scale: float,
    scales: KVScales,
    causal: bool = True,
) -> torch.Tensor:
    """Write the attention of P segments, `q` [T, Hq, D] over `k` and `v` [K, Hkv, D], to `out` [T, Hq, D].

    `query_offsets` and `key_offsets` [P + 1] int32 are on the device. `causal`: the last query of a segment sees all of
    its keys, and each query before it one less; else each query sees all of them. `longest_query` and `longest_key` are
    upper bounds; the keys of a segment are divided over at most `splits` programs; `scale`: factor of scores. Keys and
    values behind the last segment must be finite up to the end of a tile. They are numbers of a pool with `scales`. A
    CUDA graph can capture it. Returns the logarithms of the sums of the softmax, [T, Hq] float32.
    """
    _, sums, *_ = torch.ops.fa3_fwd.fwd(
        q,
        k,
        v,
        out=out,
        cu_seqlens_q=query_offsets,
        cu_seqlens_k=key_offsets,
        max_seqlen_q=longest_query,
        max_seqlen_k=longest_key,
        softmax_scale=scale * scales.key,
        is_causal=causal,
        num_splits=splits,
    )
    if scales.value != 1.0:
        out.mul_(scales.value)
    of_heads: torch.Tensor = sums
    return of_heads.T
