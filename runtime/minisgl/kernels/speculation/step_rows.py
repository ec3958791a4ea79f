"""Rows of a step with drafts, on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DecodeRows(NamedTuple):
    """Parts of a step's inputs that `place_drafts` completes: of D decode rows and S rows that sample; all int32."""

    slots: torch.Tensor
    """[D]"""
    positions: torch.Tensor
    """[D] in: number of rows of the same sequence before this one; out: position of the row."""
    lengths: torch.Tensor
    """[D] out: positions that the row attends to."""
    sample_positions: torch.Tensor
    """[S] out, for decode rows: number of tokens before the sampled one."""
    sample_rows: torch.Tensor
    """[S] token of the step after which each row samples; decode rows come first."""


class SampledRows(NamedTuple):
    """R rows of a step whose sampled tokens are verified; all int32."""

    slots: torch.Tensor
    """[R] each one different"""
    first: torch.Tensor
    """[R] index of the row's first sampled token."""
    widths: torch.Tensor
    """[R] number of its sampled tokens: 1 and its verified drafts."""
