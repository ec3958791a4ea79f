"""Parameters of a model, and the parts of checkpoint tensors that fill them.

Layers allocate through `Parameters` and declare their sources at once, so one list serves the loader, random
weights, the check of a checkpoint's headers and the writer of tiny checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from minisgl.layers.quantization import Quantization, TensorSpec, WeightFormat


@dataclass(frozen=True, slots=True)
class Source:
    """A part of a checkpoint tensor and the view of a parameter that it fills."""

    name: str
    """Name of the tensor in the checkpoint; that of a quantized weight before it was quantized."""
    shape: tuple[int, ...]
    """Its whole shape in the checkpoint."""
    take: tuple[slice, ...]
    """This rank's part of the tensor: one slice per dimension."""
    into: torch.Tensor
    """View of the parameter, with the shape of the part."""
    format: WeightFormat | None = None
    """Format of a quantized weight, which is dequantized while it is loaded."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Tensors of the checkpoint that are read, by name."""
        if self.format is None:
            return {self.name: TensorSpec(self.shape)}
        layer = self.name.removesuffix("weight")
        return {f"{layer}{suffix}": spec for suffix, spec in self.format.tensors(*self.shape).items()}


class Parameters:
    """All parameters of one rank's model."""

    def __init__(self, dtype: torch.dtype, device: torch.device, quantization: Quantization | None = None) -> None:
        """`quantization`: that of the checkpoint."""
        self.dtype = dtype
        self.device = device
        self._quantization = quantization
        self.sources: list[Source] = []
        self.num_bytes = 0

    def new(self, *shape: int) -> torch.Tensor:
        """Allocate a parameter. The caller adds the sources that fill all of it."""
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def add_source(self, name: str, shape: tuple[int, ...], into: torch.Tensor, *take: slice) -> None:
        """Declare that the part `take` (default: all) of checkpoint tensor `name` fills `into`."""
        self._add(name, shape, into, take, None)

    def add_weight(self, layer: str, shape: tuple[int, int], into: torch.Tensor, *take: slice) -> None:
        """As `add_source`, for the weight [out, in] of a linear layer, which the checkpoint may have quantized."""
        quantized = None if self._quantization is None else self._quantization.format_of(layer)
        self._add(f"{layer}.weight", shape, into, take, quantized)

    def _add(
        self, name: str, shape: tuple[int, ...], into: torch.Tensor, take: tuple[slice, ...], kind: WeightFormat | None
    ) -> None:
        take += (slice(None),) * (len(shape) - len(take))
        taken = tuple(len(range(*part.indices(size))) for part, size in zip(take, shape, strict=True))
        assert taken == tuple(into.shape), f"{name}: {taken} does not fill {tuple(into.shape)}"
        self.sources.append(Source(name, shape, take, into, kind))

    def replicated(self, name: str, *shape: int) -> torch.Tensor:
        """Allocate a parameter that every rank holds whole."""
        tensor = self.new(*shape)
        self.add_source(name, shape, tensor)
        return tensor
