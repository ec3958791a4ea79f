"""Attention of prompts in Triton's interpreter on a CPU, against dense attention in float64.

Run `python -m support.kernels.interpreted_prefill`. A process of its own, for whether kernels are interpreted is
settled when Triton is imported. Prints, as JSON, the largest error of each case, or -1 for an undefined value.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from minisgl.attention.backend import AttentionShape
from minisgl.attention.torch_backend import TorchDecode, TorchPrefill
from minisgl.attention.triton_backend import TritonPrefill
from minisgl.kernels.attention.stored_kv import FP8
from support.kernels.dense_attention import DenseCase, Sequences, attention_shape
from support.kernels.interpreted_cascade import allow_loops_to_a_loaded_end


@dataclass(frozen=True)
class Case:
    segments: Sequence[tuple[int, int]]
    decode: Sequence[int] = ()
    group: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    fp8: bool = False

    @property
    def shape(self) -> AttentionShape:
        shape = attention_shape(
            query_heads=self.group * self.kv_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            longest=512,
            dtype=torch.float32,
            device="cpu",
            window=self.window,
            kv_dtype=FP8 if self.fp8 else None,
            sinks=self.sinks,
        )
        return replace(shape, softcap=self.softcap)


CASES = {
    "new prompts": Case(((0, 30), (0, 1), (0, 65))),
    "behind prefixes, beside rows": Case(((64, 20), (0, 30), (63, 5)), decode=(5, 40)),
    "more than a tile": Case(((0, 200), (100, 150))),
    "five heads of a KV head, pages of 64": Case(((0, 70), (130, 3)), group=5, page_size=64),
    "one head of a KV head": Case(((0, 20), (7, 9)), group=1),
    "heads of 512": Case(((0, 9), (40, 10)), group=8, kv_heads=1, head_dim=512, page_size=64),
    "a window": Case(((0, 70), (100, 40), (31, 1)), decode=(9,), window=30),
    "a window of one token": Case(((0, 20), (33, 9)), window=1),
    "sinks": Case(((0, 40), (20, 9)), sinks=True, window=16),
    "FP8": Case(((0, 30), (33, 9)), fp8=True),
    "FP8, a window": Case(((0, 70), (100, 40), (31, 1)), decode=(9,), window=30, fp8=True),
    "FP8, sinks and a window, pages of 64": Case(
        ((0, 40), (90, 9)), group=8, kv_heads=1, head_dim=64, page_size=64, sinks=True, window=16, fp8=True
    ),
    "FP8, heads of 512": Case(((0, 9), (40, 10)), group=8, kv_heads=1, head_dim=512, page_size=64, fp8=True),
    "FP8, bounded scores": Case(((0, 40), (20, 30)), softcap=1.5, fp8=True),
    "bounded scores": Case(((0, 40), (20, 30)), softcap=1.5),
    "more segments than are counted at a time": Case(((0, 1), (3, 2), (0, 5)) * 30, kv_heads=1),
}


def largest_error(case: Case) -> float:
    dense = DenseCase(case.shape, Sequences(decode=case.decode, segments=case.segments))
    result = dense.run(TritonPrefill(case.shape), TorchDecode(case.shape)).double()
    expected = (
        dense.expected()
        if case.softcap is None
        else dense.run(TorchPrefill(case.shape), TorchDecode(case.shape)).double()
    )
    error = float((result - expected).abs().max())
    return error if math.isfinite(error) else -1.0


def error_beside_empty_segments() -> float:
    """Error where some of the segments have no tokens, as in a captured step."""
    shape = Case(()).shape
    dense = DenseCase(shape, Sequences(segments=((0, 30), (40, 50))))
    batch = dense.batch
    places = torch.tensor([0, 0, 1, 1])
    lengths = torch.tensor([30, 0, 50, 0])
    dense.batch = replace(
        batch,
        prefill_slots=batch.prefill_slots[places],
        prefill_kv_lengths=torch.tensor([30, 0, 90, 0], dtype=torch.int32),
        query_offsets=torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int(),
        host_prefill_lengths=lengths.numpy().astype(np.int32),
    )
    result = dense.run(TritonPrefill(shape), TorchDecode(shape)).double()
    return float((result - dense.expected()).abs().max())


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    allow_loops_to_a_loaded_end()
    errors = {name: largest_error(case) for name, case in CASES.items()}
    print(json.dumps(errors | {"empty segments": error_beside_empty_segments()}))
