"""A mixture of experts drawn by a seed, and what it gives by plain torch."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

import torch

from minisgl.kernels.linear.int4_packed import pack_scales, pack_words, unpack_scales, unpack_words
from minisgl.kernels.pointwise.fp8_rows import BLOCK, E4M3_MAX
from minisgl.layers.activation import FeedForwardActivation, silu_and_mul
from minisgl.layers.weights.allocate import ExpertBiases
from minisgl.layers.weights.formats import Mxfp4Blocks
from minisgl.layers.weights.fp8 import Fp8Weight
from minisgl.layers.weights.int4 import Int4Weight
from minisgl.layers.weights.mxfp4 import Mxfp4Weight
from minisgl.moe.experts import experts_one_by_one
from support.numerics.mxfp4 import in_mxfp4 as store_in_mxfp4

if TYPE_CHECKING:
    from minisgl.kernels.build.triton import Launches


class Sizes(NamedTuple):
    hidden: int
    width: int
    experts: int
    top_k: int


def draw(sizes: Sizes, tokens: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, gate_up and down."""
    generator = torch.Generator(device).manual_seed(tokens)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

    x = normal(tokens, sizes.hidden)
    gate_up = normal(sizes.experts, 2 * sizes.width, sizes.hidden, scale=sizes.hidden**-0.5)
    return x, gate_up, normal(sizes.experts, sizes.hidden, sizes.width, scale=sizes.width**-0.5)


def in_fp8(weight: torch.Tensor) -> Fp8Weight:
    """[experts, out, in] in blocks, whose scales differ."""
    experts, outputs, inputs = weight.shape
    blocks = weight.float().view(experts, outputs // BLOCK, BLOCK, inputs // BLOCK, BLOCK)
    scales = blocks.abs().amax((2, 4)) / E4M3_MAX
    values = (blocks / scales[:, :, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    factors = 1 + torch.arange(scales.numel(), device=weight.device).view(scales.shape) % 7
    return Fp8Weight(values.view(weight.shape), scales * factors)


def in_int4(weight: torch.Tensor, group_size: int) -> Int4Weight:
    """[experts, out, in] in groups of inputs with scales and zero points."""
    experts, outputs, inputs = weight.shape
    groups = weight.float().view(experts * outputs, inputs // group_size, group_size)
    lowest, highest = groups.aminmax(dim=2)
    scales = ((highest - lowest) / 15).bfloat16().float()
    zeros = (-lowest / scales).round().clamp(0, 15)
    numbers = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
    words, packed = pack_words(numbers.int().flatten(1)), pack_scales(scales, zeros.int())
    return Int4Weight(words.unflatten(0, (experts, -1)), packed.unflatten(0, (experts, -1)))


def in_mxfp4(weight: torch.Tensor, projections: int = 1) -> Mxfp4Weight:
    """[experts, out, in], whose outputs are those of equal `projections`, each padded by itself."""
    experts, outputs, inputs = weight.shape
    rows = outputs // projections
    padded = -(-rows // Mxfp4Weight.row_multiple) * Mxfp4Weight.row_multiple
    found = Mxfp4Weight.new(
        lambda *shape, dtype: torch.empty(shape, dtype=dtype, device=weight.device),
        Mxfp4Blocks(), experts, projections * padded, inputs,
    )  # fmt: skip
    for expert in range(experts):
        for projection in range(projections):
            part = weight[expert, projection * rows : (projection + 1) * rows]
            stored = dict(zip(("_blocks", "_scales"), store_in_mxfp4(part.cpu()), strict=True))
            place = slice(projection * padded, projection * padded + rows)
            _load(found.part(expert), stored, slice(0, rows), slice(0, inputs), place)
    return found


def _load(weight: Mxfp4Weight, stored: dict[str, torch.Tensor], rows: slice, columns: slice, place: slice) -> None:
    def read(name: str, *take: slice) -> torch.Tensor:
        return stored[name][take].to(weight.values.device)

    weight.load(Mxfp4Blocks(), read, rows, columns, place)


def exact_int4(weight: Int4Weight) -> torch.Tensor:
    """[experts, out, in] in float32."""
    numbers = unpack_words(weight.values.flatten(0, 1))
    scales, zeros = unpack_scales(weight.scales.flatten(0, 1))
    groups = numbers.unflatten(1, (scales.shape[1], -1)) - zeros[..., None]
    exact: torch.Tensor = (groups * scales[..., None]).view(weight.shape)
    return exact


def weights_of_experts(launches: Launches) -> set[str]:
    """Types of the weights that the kernels for very few tokens were launched with."""
    return {
        ast.literal_eval(key[: key.index("{")])[3][0]
        for name, key in launches.keys
        if name.startswith("minisgl.kernels.experts.gemv_gluon.")
    }


def choices(sizes: Sizes, tokens: int) -> torch.Tensor:
    """[tokens, top_k] int32, on the CPU."""
    generator = torch.Generator().manual_seed(tokens)
    picks = [torch.randperm(sizes.experts, generator=generator)[: sizes.top_k] for _ in range(tokens)]
    return torch.stack(picks).int()


def by_plain_torch(
    dtype: torch.dtype,
    x: torch.Tensor,
    shares: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    activation: FeedForwardActivation = silu_and_mul,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """Computed in `dtype`: [tokens, hidden]."""
    wide = None if biases is None else ExpertBiases(*(each.to(dtype) for each in biases))
    chosen = experts_one_by_one(x.to(dtype), experts, gate_up.to(dtype), down.to(dtype), activation, wide)
    return (chosen * shares.to(dtype).unsqueeze(-1)).sum(1)
