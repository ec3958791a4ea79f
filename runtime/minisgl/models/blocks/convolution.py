"""Convolutions over time, whose channels are split over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.attention.recurrent import Convolution
from minisgl.layers.weights.parameters import Parameters
from minisgl.layers.weights.weight import Projection


def new_convolution(
    parameters: Parameters,
    name: str,
    inputs: Sequence[Projection],
    kernel_size: int,
    *,
    bias: bool = False,
    silu: bool = True,
) -> Convolution:
    """Convolution of the results of projections that a checkpoint has in one tensor; a rank has the channels of its own
    results."""
    rows = [each.num_rows for each in inputs]
    weight = parameters.new(sum(rows), kernel_size)
    channels = inputs[0].out_features
    for each, view in zip(inputs, weight[:, None].split(rows), strict=True):
        parameters.add_source(f"{name}.weight", (channels, 1, kernel_size), view, each.rows)
    if not bias:
        return Convolution(weight, silu=silu)
    added = parameters.new(sum(rows))
    for each, view in zip(inputs, added.split(rows), strict=True):
        parameters.add_source(f"{name}.bias", (channels,), view, each.rows)
    return Convolution(weight, added, silu=silu)
