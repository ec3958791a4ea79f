"""Contexts of blocks of new tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Contexts(NamedTuple):
    """What R blocks have before them."""

    page_table: torch.Tensor
    """[rows, pages_per_row] int32"""
    slots: torch.Tensor
    """[R] int32"""
    lengths: torch.Tensor
    """[rows] int32 by slot: positions of the context."""
