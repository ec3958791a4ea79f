"""Tensor maps of matrices, through which kernels on Hopper copy parts of them to shared memory and back."""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def tile_map(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles of `rows` × `columns`, in shared memory as the tensor cores read them."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * matrix.itemsize, rank=2)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


def row_map(matrix: torch.Tensor, columns: int) -> TensorDescriptor:
    """Pieces of `columns` numbers of one row, which stay in their order."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * matrix.itemsize, rank=2)
    return TensorDescriptor.from_tensor(matrix, [1, columns], layout)
