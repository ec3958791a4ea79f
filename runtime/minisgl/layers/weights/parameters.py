"""Parameters of a model, and the parts of checkpoint tensors that fill them.

Layers allocate through `Parameters` and declare their sources at once, so one list serves the loader, random
weights, the check of a checkpoint's headers and the writer of tiny checkpoints.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from minisgl.layers.weights.formats import Fp8Channels, Quantization, TensorSpec, WeightFormat
from minisgl.layers.weights.weight import QuantizedWeight, Stack


def in_order(rows: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """Rows of whole heads, those of each in `order`, which names the row of the checkpoint in each place."""
    if order is None:
        return rows
    heads = rows.view(-1, len(order), *rows.shape[1:])
    return heads.index_select(1, torch.tensor(order, device=rows.device)).view_as(rows)


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
    """View of the parameter, with the shape of the part, or the values of `kept`."""
    format: WeightFormat | None = None
    """Format of a quantized weight, also of one that shall be quantized while it is loaded."""
    kept: QuantizedWeight | None = None
    """The part of a weight with a format, if it stays quantized; None: it is dequantized."""
    order: tuple[int, ...] | None = None
    """Order in which the rows of each head are wanted; None: that of the checkpoint."""
    stack: Stack | None = None
    """The tensor has the matrices or vectors of all experts, of which `shape` and `take` describe one."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Tensors of the checkpoint that are read, by name."""
        if self.format is None:
            specs = {self.name: TensorSpec(self.shape)}
        else:
            layer = self.name.removesuffix("weight")
            specs = {f"{layer}{suffix}": spec for suffix, spec in self.format.tensors(*self.shape).items()}
        if self.stack is None:
            return specs
        return {name: TensorSpec(self.stack.shape(*spec.shape), spec.dtypes) for name, spec in specs.items()}

    @property
    def num_taken(self) -> int:
        """Number of elements that are read."""
        return math.prod(len(range(*part.indices(size))) for part, size in zip(self.take, self.shape, strict=True))


def has_quantized_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products with quantized weights run on this device, with activations of `dtype`: a Hopper GPU."""
    return device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) == (9, 0)


class Parameters:
    """All parameters of one rank's model."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
        *,
        keep_quantized: bool | None = None,
        left_out: tuple[str, ...] = (),
    ) -> None:
        """`quantization`: that of the checkpoint. `keep_quantized`: weights stay as the checkpoint stores them where
        kernels can take them so; None: if the device has such kernels. `left_out`: beginnings of the names of tensors
        of the checkpoint that are not read on purpose."""
        self.left_out = left_out
        self.dtype = dtype
        self.device = device
        self._quantization = quantization
        self.keeps_quantized = has_quantized_kernels(dtype, device) if keep_quantized is None else keep_quantized
        self.sources: list[Source] = []
        self.num_elements = 0
        self.num_bytes = 0
        self.weights_by_type: Counter[str] = Counter()
        """Number of weights of linear layers and experts, by the type in which they are kept: `fp8-block`,
        `fp8-channel`, `int4` or the name of the model's dtype."""
        self.num_dequantized = 0
        """Number of these weights that are quantized, or shall be while they are loaded, and are kept in the model's
        dtype."""

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate a parameter, of the model's dtype by default. The caller adds the sources that fill all of it."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.num_elements += tensor.numel()
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders of modules that have weights of their own, see `add_source`."""
        return tuple(sorted({source.name.rpartition("/")[0] for source in self.sources if "/" in source.name}))

    @property
    def dequantized_share(self) -> float:
        """Share of `num_dequantized` in the weights of linear layers and experts."""
        return self.num_dequantized / max(1, self.weights_by_type.total())

    @property
    def dtype_name(self) -> str:
        """Name of the model's data type, such as `bfloat16`."""
        return str(self.dtype).removeprefix("torch.")

    def format_of(self, layer: str) -> WeightFormat | None:
        """Format in which the checkpoint stores the weight of a linear layer; None: it is not quantized."""
        return None if self._quantization is None else self._quantization.format_of(layer)

    def stored_format_of(self, layer: str) -> WeightFormat | None:
        """The same; None also for a weight in 16 or 32 bits that is quantized while it is loaded."""
        found = self.format_of(layer)
        return None if isinstance(found, Fp8Channels) and found.while_loading else found

    def add_source(
        self,
        name: str,
        shape: tuple[int, ...],
        into: torch.Tensor,
        *take: slice,
        order: tuple[int, ...] | None = None,
        stack: Stack | None = None,
    ) -> None:
        """Declare that the part `take` (default: all) of checkpoint tensor `name` fills `into`. `{folder}/{name}`: a
        tensor in a folder of the checkpoint."""
        take += (slice(None),) * (len(shape) - len(take))
        self._add(Source(name, shape, take, into, order=order, stack=stack))

    def add_weight(
        self,
        layer: str,
        shape: tuple[int, int],
        into: torch.Tensor,
        *take: slice,
        kept: QuantizedWeight | None = None,
        order: tuple[int, ...] | None = None,
        stack: Stack | None = None,
    ) -> None:
        """As `add_source`, for the weight [out, in] of a linear layer, which is dequantized if the checkpoint has
        quantized it, or `kept`. `stack`: `layer` is the name of a tensor with several weights."""
        stored = self.format_of(layer)
        if stored is not None and kept is None:
            self.num_dequantized += into.numel()
        name = f"{layer}.weight" if stack is None else layer
        self._add(Source(name, shape, take, into, stored, kept, order, stack))

    def _add(self, source: Source) -> None:
        taken = tuple(len(range(*part.indices(size))) for part, size in zip(source.take, source.shape, strict=True))
        into = tuple(source.into.shape)
        assert source.kept is not None or taken == into, f"{source.name}: {taken} does not fill {into}"
        self.sources.append(source)

    def replicated(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate a parameter that every rank holds whole."""
        tensor = self.new(*shape, dtype=dtype)
        self.add_source(name, shape, tensor)
        return tensor
