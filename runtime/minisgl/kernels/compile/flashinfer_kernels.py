"""flashinfer's kernels that a model needs, and flashinfer's names for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True, slots=True)
class XqaKernel:
    """Decode attention over pages of `page_size` tokens with `group` query heads per KV head."""

    dtype: torch.dtype
    page_size: int
    head_dim: int
    group: int
    window: bool = False
    """With a sliding window."""

    @property
    def name(self) -> str:
        t = DTYPE_NAMES[self.dtype]
        return (
            f"xqa_input_{t}_kv_cache_{t}_output_{t}_page_size_{self.page_size}_head_dim_{self.head_dim}_head_group_"
            f"ratio_{self.group}_use_sliding_window_{self.window}_use_spec_dec_False_spec_q_seq_len_1"
        )

    def specification(self) -> Any:
        """flashinfer's specification to build and load it."""
        from flashinfer.jit.xqa import gen_xqa_module

        return gen_xqa_module(
            input_dtype=self.dtype,
            kv_cache_dtype=self.dtype,
            page_size=self.page_size,
            head_dim=self.head_dim,
            head_group_ratio=self.group,
            use_sliding_window=self.window,
            output_dtype=self.dtype,
        )


@dataclass(frozen=True, slots=True)
class PagedPrefillKernel:
    """FA2 attention of segments over pages of any size, and of decode rows on tensor cores."""

    dtype: torch.dtype
    head_dim: int
    window: bool = False
    """With a sliding window."""
    softcap: bool = False
    """With an upper bound of scores."""

    @property
    def name(self) -> str:
        t, d = DTYPE_NAMES[self.dtype], self.head_dim
        return (
            f"batch_prefill_with_kv_cache_dtype_q_{t}_dtype_kv_{t}_dtype_o_{t}_dtype_idx_i32_head_dim_qk_{d}_"
            f"head_dim_vo_{d}_posenc_0_use_swa_{self.window}_use_logits_cap_{self.softcap}_f16qk_False_kv_stride_equal"
        )

    def specification(self) -> Any:
        # Keys and values of the pool have the same strides, for which flashinfer has a smaller module.
        from flashinfer.jit.attention.modules import _gen_batch_prefill_primary_module

        return _gen_batch_prefill_primary_module(
            backend="fa2",
            dtype_q=self.dtype,
            dtype_kv=self.dtype,
            dtype_o=self.dtype,
            dtype_idx=torch.int32,
            head_dim_qk=self.head_dim,
            head_dim_vo=self.head_dim,
            pos_encoding_mode=0,
            use_sliding_window=self.window,
            use_logits_soft_cap=self.softcap,
            use_fp16_qk_reduction=False,
        )


FlashInferKernel = XqaKernel | PagedPrefillKernel


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of a model on one of `tensor_parallel` ranks."""

    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    tensor_parallel: int = 1
    window: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head of a rank. With fewer KV heads than ranks, several ranks hold the same head."""
        local_kv_heads = max(1, self.kv_heads // self.tensor_parallel)
        return self.query_heads // self.tensor_parallel // local_kv_heads


def kernels_of(shapes: Iterable[HeadShape], page_size: int) -> list[FlashInferKernel]:
    """Kernels of all shapes without duplicates, in order of first use. Dtypes without flashinfer kernels give none."""
    found: dict[FlashInferKernel, None] = {}
    for shape in shapes:
        if shape.dtype in DTYPE_NAMES:
            found[PagedPrefillKernel(shape.dtype, shape.head_dim, shape.window)] = None
            found[XqaKernel(shape.dtype, page_size, shape.head_dim, shape.group, shape.window)] = None
    return list(found)
