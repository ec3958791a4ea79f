"""Activations in FP8 with one scale per 128 inputs of a row, or per row."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

BLOCK: Final = 128
"""Inputs that share a scale."""
E4M3_MAX: Final = 448.0
E4M3_NAN: Final = 0x7F
"""Bits of an FP8 number that is not a number, without its sign."""
SMALLEST: Final = 1e-10
"""Smallest scale times 448, for rows of zeros."""
_ROWS_MULTIPLE: Final = 16
"""Rows to which memory is padded: cuBLAS needs aligned columns of scales."""


class Fp8Rows(NamedTuple):
    """Rows [rows, K] of FP8 numbers (e4m3). Memory behind the rows is undefined."""

    values: torch.Tensor
    """[rows padded to a multiple of 16, K] float8_e4m3fn."""
    scales: torch.Tensor
    """[K / 128, rows padded] or, with one per row, [1, rows padded] float32: what each value is multiplied with."""
    rows: int

    @property
    def per_row(self) -> bool:
        return len(self.scales) == 1 and self.values.shape[1] > BLOCK

    def __len__(self) -> int:
        return self.rows


def new_fp8_rows(rows: int, inputs: int, device: torch.device, *, per_row: bool = False) -> Fp8Rows:
    """Allocate rows whose content is undefined."""
    padded = -(-rows // _ROWS_MULTIPLE) * _ROWS_MULTIPLE
    values = torch.empty((padded, inputs), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty((1 if per_row else inputs // BLOCK, padded), dtype=torch.float32, device=device)
    return Fp8Rows(values, scales, rows)


def dequantize_rows(x: Fp8Rows) -> torch.Tensor:
    """[rows, K] in float32."""
    scales = x.scales[:, : x.rows].T.repeat_interleave(x.values.shape[1] // len(x.scales), 1)
    return x.values[: x.rows].float() * scales
