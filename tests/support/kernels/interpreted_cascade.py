"""The cascade kernels in Triton's interpreter on a CPU, against float64.

Run `python -m support.kernels.interpreted_cascade`.

A process of its own, for whether kernels are interpreted is settled when Triton is imported. Prints, as JSON, the
largest error of each case; an error that is not finite is −1. In float16: the interpreter multiplies bfloat16 wrongly.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minisgl.attention.cascade import MAX_SPLITS, CascadeLayout
from minisgl.kernels.attention.stored_kv import FP8
from minisgl.wire.shared_prefixes import SharedPrefix
from support.kernels.dense_attention import DenseCase, Sequences, attention_shape


@dataclass(frozen=True)
class Case:
    decode: Sequence[int]
    prefixes: Sequence[SharedPrefix] = ()
    group: int = 2
    page_size: int = 64
    head_dim: int = 64
    fp8: bool = False
    programs: int = 8
    """The smaller, the fewer parts the shared pages are divided into."""


def _group(pages: int, *rows: int) -> SharedPrefix:
    return SharedPrefix(pages, np.array(rows, np.int32))


CASES = {
    "no group": Case((1, 64, 65, 130)),
    "one group": Case((200, 129, 193, 256), [_group(2, 0, 1, 2, 3)]),
    "ends of pages": Case((129, 192, 193, 128, 65), [_group(2, 0, 1, 2), _group(1, 3, 4)], group=32),
    "rows without a group between": Case((150, 3, 140, 64, 300), [_group(2, 0, 2, 4)]),
    "two groups": Case((70, 200, 71, 250, 90, 1), [_group(1, 0, 2, 4), _group(3, 1, 3)], group=40),
    "more parts than pages": Case((100, 90, 80), [_group(1, 0, 1, 2)], programs=16),
    "two tiles": Case((66, 67, 68, 69, 70, 71), [_group(1, 0, 1, 2, 3, 4, 5)], group=40),
    "a group that has no tile": Case((66, 67, 68, 69), [_group(1, 0, 1), _group(1, 2, 3)]),
    "five heads in a group": Case((140, 150, 129), [_group(2, 0, 1, 2)], group=5),
    "wide heads": Case((140, 150, 129), [_group(2, 0, 1, 2)], head_dim=128, group=8),
    "pages of 16": Case((50, 33, 100, 49), [_group(2, 0, 1), _group(3, 2, 3)], page_size=16, group=64),
    "pages of 32": Case((100, 133, 97), [_group(3, 0, 1, 2)], page_size=32, programs=4),
    "pages of 128": Case((129, 300, 257), [_group(1, 0, 1)], page_size=128),
    "FP8": Case((140, 150, 129), [_group(2, 0, 1, 2)], group=5, fp8=True),
    "FP8, wide heads and pages of 16": Case((50, 33, 100), [_group(2, 0, 1)], head_dim=128, page_size=16, fp8=True),
}


def largest_error(case: Case) -> float:
    from minisgl.kernels.attention.cascade_decode_triton import cascade_decode

    kv_heads = 2
    shape = attention_shape(
        query_heads=case.group * kv_heads,
        kv_heads=kv_heads,
        head_dim=case.head_dim,
        page_size=case.page_size,
        longest=max(case.decode),
        dtype=torch.float16,
        device="cpu",
        kv_dtype=FP8 if case.fp8 else None,
    )
    dense = DenseCase(shape, Sequences(decode=case.decode, prefixes=case.prefixes))
    layout = CascadeLayout(group=case.group, kv_heads=kv_heads, programs=case.programs, part_pages=1)
    dense.use_prefixes(layout)
    kv, batch, tables = dense.kv, dense.batch, dense.batch.cascade
    assert tables is not None
    dense.store()
    scratch = (MAX_SPLITS, len(case.decode) + 1, shape.query_heads)
    out = torch.full_like(dense.q, math.nan)
    cascade_decode(
        dense.q,
        kv.keys[0],
        kv.values[0],
        batch.page_table[batch.decode_slots],
        batch.decode_lengths,
        tables.counts,
        tables.prefix_pages,
        tables.tiles,
        torch.full((*scratch, case.head_dim), math.nan),
        torch.full(scratch, math.nan),
        out,
        scale=case.head_dim**-0.5 * math.log2(math.e),
        scales=dense.scales,
        programs=case.programs,
    )
    error = float((out.flatten(1).double() - dense.expected()).abs().max())
    return error if math.isfinite(error) else -1.0


def allow_loops_to_a_loaded_end() -> None:
    """Triton 3.6 takes `int()` of arrays of one element there, which NumPy has refused since 2.4."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    allow_loops_to_a_loaded_end()
    print(json.dumps({name: largest_error(case) for name, case in CASES.items()}))
