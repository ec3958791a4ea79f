"""Parameters of a model, and the parts of checkpoint tensors that fill them.

Layers allocate through `Parameters` and declare their sources at once, so one list serves the loader, random
weights, the check of a checkpoint's headers and the writer of tiny checkpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from minisgl.layers.quantization import FLOATS, Quantization, TensorSpec, WeightFormat


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
    dtypes: tuple[str, ...] = FLOATS
    """Element types that the tensor may have; unused with a format."""
    scales: torch.Tensor | None = None
    """[rows of the part, 1] float32: `into` is FP8, and the loader quantizes the part and writes its scales here."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Tensors of the checkpoint that are read, by name."""
        if self.format is None:
            return {self.name: TensorSpec(self.shape, self.dtypes)}
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
        self.num_elements = 0
        self.num_bytes = 0
        self.weights_by_type: Counter[str] = Counter()
        """Number of weights of linear layers and experts, by the type in which they are kept: `fp8-block`,
        `fp8-channel` or the name of the model's dtype."""

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate a parameter, of the model's dtype by default. The caller adds the sources that fill all of it."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.num_elements += tensor.numel()
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor

    @property
    def dtype_name(self) -> str:
        """Name of the model's data type, such as `bfloat16`."""
        return str(self.dtype).removeprefix("torch.")

    def format_of(self, layer: str) -> WeightFormat | None:
        """Format in which the checkpoint stores the weight of a linear layer; None: it is not quantized."""
        return None if self._quantization is None else self._quantization.format_of(layer)

    def add_source(
        self, name: str, shape: tuple[int, ...], into: torch.Tensor, *take: slice, dtypes: tuple[str, ...] = FLOATS
    ) -> None:
        """Declare that the part `take` (default: all) of checkpoint tensor `name` fills `into`."""
        self._add(Source(name, shape, take, into, dtypes=dtypes))

    def add_weight(self, layer: str, shape: tuple[int, int], into: torch.Tensor, *take: slice) -> None:
        """As `add_source`, for the weight [out, in] of a linear layer, which is dequantized if the checkpoint has
        quantized it."""
        self._add(Source(f"{layer}.weight", shape, take, into, self.format_of(layer)))

    def add_quantized(
        self, layer: str, shape: tuple[int, int], into: torch.Tensor, scales: torch.Tensor, *take: slice
    ) -> None:
        """As `add_source`, for the weight [out, in] of a linear layer, which is quantized to FP8 while it is loaded."""
        self._add(Source(f"{layer}.weight", shape, take, into, scales=scales))

    def _add(self, source: Source) -> None:
        take = source.take + (slice(None),) * (len(source.shape) - len(source.take))
        taken = tuple(len(range(*part.indices(size))) for part, size in zip(take, source.shape, strict=True))
        assert taken == tuple(source.into.shape), f"{source.name}: {taken} does not fill {tuple(source.into.shape)}"
        self.sources.append(replace(source, take=take))

    def replicated(self, name: str, *shape: int) -> torch.Tensor:
        """Allocate a parameter that every rank holds whole."""
        tensor = self.new(*shape)
        self.add_source(name, shape, tensor)
        return tensor
