"""The projection at the end of a block, and what takes its results."""

from __future__ import annotations

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.layers.linear import RowParallelLinear
from minisgl.layers.weights.parameters import Parameters
from minisgl.models.config import ModelConfig


def new_output(
    config: ModelConfig,
    parallel: TensorParallel,
    parameters: Parameters,
    layer: int,
    name: str,
    in_features: int,
    *,
    bias: bool,
) -> RowParallelLinear:
    """Projection `name` of a block of `layer`, whose features are split over the ranks, to the hidden size."""
    in_parts = _sums_in_norm(config, layer)
    return RowParallelLinear(parameters, name, in_features, config.hidden_size, parallel, bias=bias, in_parts=in_parts)


def _sums_in_norm(config: ModelConfig, layer: int) -> bool:
    """Whether the output of a block goes to the next norm as it is."""
    of = config.layers[layer]
    is_last_part = config.decoder.token_inputs is None and not of.scales_stream
    return of.norms == "pre" and of.residual_scale == 1.0 and is_last_part
