"""Parts of a weight in units of blocks."""

from __future__ import annotations

import torch


def blocks(part: slice, size: int) -> slice:
    """Blocks of `size` that contain `part`."""
    return slice(part.start // size, -(-part.stop // size))


def spread(values: torch.Tensor, dim: int, part: slice, size: int) -> torch.Tensor:
    """Values of `blocks(part, size)` to one per element of `part`."""
    return cut(values.repeat_interleave(size, dim), dim, part, size)


def cut(values: torch.Tensor, dim: int, part: slice, size: int) -> torch.Tensor:
    """Elements of `part` among those of `blocks(part, size)`."""
    return values.narrow(dim, part.start % size, part.stop - part.start)


def finite(scale: torch.Tensor, name: str) -> torch.Tensor:
    """`scale`. Raises ValueError if it has values that are not finite."""
    if not bool(scale.isfinite().all()):
        raise ValueError(f"{name} has values that are not finite")
    return scale
