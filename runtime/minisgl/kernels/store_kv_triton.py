# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""`store_kv` on CUDA: one program copies one token's keys and values."""

import torch
import triton
import triton.language as tl


@triton.jit
def _store(keys, values, locations, k, v, k_stride, v_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    location = tl.load(locations + token)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    tl.store(keys + location * WIDTH + columns, tl.load(k + token * k_stride + columns, mask), mask)
    tl.store(values + location * WIDTH + columns, tl.load(v + token * v_stride + columns, mask), mask)


def store_kv_cuda(
    keys: torch.Tensor, values: torch.Tensor, locations: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    width = k.shape[1] * k.shape[2]
    assert keys.is_contiguous() and values.is_contiguous()
    assert k.stride(2) == v.stride(2) == 1 and k.stride(1) == v.stride(1) == k.shape[2]
    if len(k):
        _store[(len(k),)](
            keys, values, locations, k, v, k.stride(0), v.stride(0), WIDTH=width, BLOCK=triton.next_power_of_2(width)
        )
