"""What a kind of weight must know: how it is stored and allocated, and its products."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self, TypeAlias

import torch

from minisgl.layers.activation import FeedForwardActivation, silu_and_mul
from minisgl.layers.weights.formats import WeightFormat
from minisgl.layers.weights.inputs import Input, InputForm, PreNorm, activate

ReadTensor: TypeAlias = Callable[..., torch.Tensor]
"""Called with the suffix of a tensor's name and one slice per dimension; returns that part of the tensor."""
NewTensor: TypeAlias = Callable[..., torch.Tensor]
"""Called with a shape and, for another type than the model's, `dtype`; allocates a parameter."""


class NotFiniteError(ValueError):
    """A tensor of a checkpoint has values that are not finite: it comes from damaged files or tools, and makes every
    answer garbage. The argument is the suffix of its name."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Place of a matrix among the equal ones of all experts, which a checkpoint stores as one tensor."""

    index: int
    count: int
    transposed: bool = False
    """Each is stored as [in, out]."""

    def shape(self, *of_one: int) -> tuple[int, ...]:
        """Shape of the tensor that holds matrices or vectors of this shape."""
        return self.count, *(reversed(of_one) if self.transposed else of_one)

    def take(self, part: Sequence[slice]) -> tuple[slice, ...]:
        """The `part` of this matrix, in the tensor of all."""
        return slice(self.index, self.index + 1), *(reversed(part) if self.transposed else part)

    def one(self, taken: torch.Tensor) -> torch.Tensor:
        """What was read at `take`, as a part of the matrix."""
        return taken[0].T if self.transposed else taken[0]


class Projection(NamedTuple):
    """One projection of a checkpoint and this rank's rows of it."""

    name: str
    out_features: int
    rows: slice
    """With a step where rows of several projections alternate."""
    order: tuple[int, ...] | None = None
    """Order in which the rows of each head are wanted; None: that of the checkpoint."""
    stack: Stack | None = None
    """`name` is that of a tensor with the matrices of all experts; None: that of a layer."""

    @property
    def num_rows(self) -> int:
        return len(range(*self.rows.indices(self.out_features)))


class Matrix(NamedTuple):
    """Projections of one input, one below the other, of which this rank has some columns."""

    projections: Sequence[Projection]
    in_features: int
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        return sum(each.num_rows for each in self.projections), self.columns.stop - self.columns.start


class Draw(NamedTuple):
    """Random numbers for a part of a weight."""

    in_features: int
    """Inputs of the whole weight; `in_features` ** -0.5 is the standard deviation that keeps activations near 1."""
    normal: Callable[[], torch.Tensor]
    """Makes the numbers of the part, [rows, columns] in the model's dtype."""
    generator: Callable[[], torch.Generator]


class Kernel(NamedTuple):
    """One of the kernels of an operation on a GPU. They are tried in order."""

    fits: Callable[..., object]
    """Whether this kernel is to run, or the tile with which it does. That follows from shapes alone, so that a captured
    step can be replayed."""
    run: Callable[..., torch.Tensor]


class Weight(ABC):
    """W [out, in] of a linear layer, or that of each expert [experts, out, in].

    The defaults here are those of a weight whose products take inputs in the model's dtype and have no fused kernels. A
    weight that holds another one and changes its product, such as one with adapters, needs no more: it sees the input
    in 16 bits, and the output of `product` before bias and activation.
    """

    @abstractmethod
    def product(self, x: Input, bias: torch.Tensor | None = None, *, in_parts: bool = False) -> torch.Tensor:
        """[T, in] and [out] to [T, out] or, where `in_parts` allows it and there is no bias, to partial sums
        [parts, T, out] in float32 for the next norm to add up: that gives a small product with few outputs enough
        programs for the whole GPU."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Values and scales, as the kernels of experts take them."""
        return ()

    @abstractmethod
    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """[…, out, in] of a float type."""

    @property
    def form(self) -> InputForm:
        """Form in which products of several rows take their inputs."""
        return InputForm.WIDE

    def form_of(self, x: torch.Tensor) -> InputForm:
        """Form for inputs of as many rows and of the type as `x`, by shapes alone."""
        return self.form

    def normed_product(self, block: PreNorm, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The product with the norm of `block`, and its sum."""
        if fused := self.fused(block, bias, gated=False):
            return fused
        normed, residual = block.normalize(self.form_of(block.x))
        return self.product(normed, bias), residual

    def gated_product(
        self, block: PreNorm, bias: torch.Tensor | None, activation: FeedForwardActivation, consumer: Weight
    ) -> tuple[Input, torch.Tensor]:
        """`normed_product`, then the `activation` of the product in the form that `consumer` takes."""
        form = consumer.form_of(block.x)
        may_fuse = activation is silu_and_mul and form is InputForm.WIDE
        if may_fuse and (fused := self.fused(block, bias, gated=True)):
            return fused
        product, residual = self.normed_product(block, bias)
        return activate(activation, product, form), residual

    def fused(
        self, block: PreNorm, bias: torch.Tensor | None, *, gated: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`normed_product` or, if `gated`, SiLU of its first half × the rest, where a kernel computes more than the
        product; None: no kernel does."""
        return None

    @property
    def has_expert_kernels(self) -> bool:
        """Whether `kernels.experts.choose` knows the `tensors` of this kind."""
        return False


@dataclass(frozen=True, eq=False)
class QuantizedWeight(Weight):
    """A weight that stays as the checkpoint stores it, or is quantized while it is loaded."""

    values: torch.Tensor
    scales: torch.Tensor

    row_multiple: ClassVar[int] = 1
    """The rows of each projection are padded with zeros to a multiple of this number."""

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.values, self.scales

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in] or [experts, out, in]."""
        return self.values.shape

    @classmethod
    @abstractmethod
    def keeps(cls, stored: WeightFormat, matrix: Matrix, *, experts: bool) -> bool:
        """Whether this rank's part of `matrix`, or of one of several `experts`, can stay as it is stored."""

    @classmethod
    @abstractmethod
    def new(cls, new: NewTensor, stored: WeightFormat, *shape: int) -> Self:
        """Allocate a weight of `shape` [out, in] or [experts, out, in]."""

    @property
    @abstractmethod
    def type_name(self) -> str:
        """Type in which it is kept, for logs and reports."""

    @abstractmethod
    def part(self, at: int | slice) -> Self:
        """View of one expert, or of some outputs of a linear layer."""

    @abstractmethod
    def load(self, stored: WeightFormat, read: ReadTensor, rows: slice, columns: slice, place: slice) -> None:
        """Fill the outputs `place` with [rows, columns] of the stored weight. Raises as `dequantize`, and
        NotFiniteError."""

    @abstractmethod
    def fill_random(self, draw: Draw) -> None:
        """Fill a linear layer or an expert, or some outputs of it."""

    @staticmethod
    @abstractmethod
    def dequantize(stored: WeightFormat, read: ReadTensor, rows: slice, columns: slice) -> torch.Tensor:
        """Weights [rows, columns] of a layer: those of the format's own tool, bit for bit, in the type of its scales.

        Raises ValueError with the reason when the tensors contradict the format.
        """


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
