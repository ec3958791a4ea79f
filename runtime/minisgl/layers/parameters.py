"""Parameters of a model, and the parts of checkpoint tensors that fill them.

Layers allocate through `Parameters` and declare their sources at once, so one list serves the loader, random
weights, the check of a checkpoint's headers and the writer of tiny checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Source:
    """A part of a checkpoint tensor and the view of a parameter that it fills."""

    name: str
    """Name of the tensor in the checkpoint."""
    shape: tuple[int, ...]
    """Its whole shape in the checkpoint."""
    take: tuple[slice, ...]
    """Function that takes this rank's part of the tensor."""
    into: torch.Tensor
    """View of the parameter, with the shape of the result of `take`."""


class Parameters:
    """All parameters of one rank's model."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.sources: list[Source] = []
        self.num_bytes = 0

    def new(self, *shape: int) -> torch.Tensor:
        """Allocate a parameter. The caller adds the sources that fill all of it."""
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def add_source(self, name: str, shape: tuple[int, ...], into: torch.Tensor, *take: slice) -> None:
        """Declare that the part `take` (default: all) of checkpoint tensor `name` fills `into`."""
        take += (slice(None),) * (len(shape) - len(take))
        taken = tuple(len(range(*part.indices(size))) for part, size in zip(take, shape, strict=True))
        assert taken == tuple(into.shape), f"{name}: {taken} does not fill {tuple(into.shape)}"
        self.sources.append(Source(name, shape, take, into))

    def replicated(self, name: str, *shape: int) -> torch.Tensor:
        """Allocate a parameter that every rank holds whole."""
        tensor = self.new(*shape)
        self.add_source(name, shape, tensor)
        return tensor
