"""Training of the very small models."""

from __future__ import annotations

import pytest
import torch

from minisgl.toy.muon import orthogonal


@pytest.mark.parametrize("shape", [(128, 128), (384, 128), (128, 256)])
def test_muon_makes_singular_values_about_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert values.max() < 1.3
    assert (values > 0.6).float().mean() > 0.9
