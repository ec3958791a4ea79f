"""Linear attention of a layer by the gated delta rule."""

from __future__ import annotations

import torch

from minisgl.attention.gated_delta import GatedDeltaRule
from minisgl.attention.recurrent import RecurrentStates
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.kernels.pointwise.gated_norm import norm_then_gate
from minisgl.layers.linear import ColumnParallelLinear, stacked
from minisgl.layers.weights.parameters import Parameters
from minisgl.layers.weights.weight import Projection
from minisgl.models.blocks.convolution import new_convolution
from minisgl.models.blocks.norms import norm_before
from minisgl.models.blocks.output import new_output
from minisgl.models.config import ModelConfig
from minisgl.models.decoder_config import GatedDeltaConfig, recurrences


class GatedDeltaNet:
    """Every rank holds an equal part of the heads."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, parameters: Parameters, layer: int) -> None:
        of, block = config.layers[layer].attention, f"model.layers.{layer}.linear_attn"
        assert isinstance(of, GatedDeltaConfig)
        self._layer = len(recurrences(config.layers[:layer]))
        """Number among the layers with recurrent states."""
        self._config = of
        self._eps = config.decoder.norm.eps
        heads, hidden = parallel.shard(of.num_value_heads), config.hidden_size
        parts = self._parts(of, parallel)
        self._heads = heads.stop - heads.start
        self.norm = norm_before(config, parameters, layer, config.decoder.names.attention_norm)
        mixed = stacked(f"{block}.in_proj_qkv", [Projection("", size, rows) for size, rows in parts])
        gate = Projection(f"{block}.in_proj_z", of.value_width, parts[-1][1])
        wide, narrow = (
            [*mixed, gate],
            [Projection(f"{block}.in_proj_{name}", of.num_value_heads, heads) for name in ("b", "a")],
        )
        if of.by_key_head:
            wide, narrow = (
                [Projection(f"{block}.in_proj_{name}", size, parallel.shard(size))]
                for name, size in (("qkvz", 2 * (of.key_width + of.value_width)), ("ba", 2 * of.num_value_heads))
            )
        self.mixed_and_gate = ColumnParallelLinear(parameters, hidden, wide, bias=False)
        self.step_and_decay = ColumnParallelLinear(parameters, hidden, narrow, bias=False)
        self._channels = sum(each.num_rows for each in mixed)
        self.convolution = new_convolution(parameters, f"{block}.conv1d", mixed, of.kernel_size)
        log_decay, decay_bias = (parameters.new(self._heads, dtype=torch.float32) for _ in range(2))
        for name, tensor in (("A_log", log_decay), ("dt_bias", decay_bias)):
            parameters.add_source(f"{block}.{name}", (of.num_value_heads,), tensor, heads)
        key_heads = of.num_key_heads // parallel.size
        self._rule = GatedDeltaRule(key_heads, self._heads, of.key_dim, of.value_dim, log_decay, decay_bias)
        self.gain = parameters.replicated(f"{block}.norm.weight", of.value_dim)
        self.out = new_output(config, parallel, parameters, layer, f"{block}.out_proj", of.value_width, bias=False)

    @staticmethod
    def _parts(of: GatedDeltaConfig, parallel: TensorParallel) -> list[tuple[int, slice]]:
        """Width of queries, keys and values, and this rank's part of each."""
        return [(width, parallel.shard(width)) for width in (of.key_width, of.key_width, of.value_width)]

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        states: RecurrentStates,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `SelfAttention.forward`; positions follow from the order of tokens."""
        x, residual = self.norm.forward(x, residual)
        mixed, gate, step, decay = self._projected(x)
        out = states.mix(self._layer, mixed, self.convolution, self._rule, decay, step)
        if rows is not None:
            out, gate, residual = out[rows], gate[rows], residual[rows]
        return self.out.forward(norm_then_gate(out, gate, self.gain, self._eps)), residual

    def _projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values side by side, output gates, and step and decay, all as projected."""
        of = self._config
        wide, narrow = self.mixed_and_gate.weight.product(x), self.step_and_decay.weight.product(x)
        if not of.by_key_head:
            return *wide.split((self._channels, self._heads * of.value_dim), -1), *narrow.split(self._heads, -1)
        group = of.num_value_heads // of.num_key_heads
        keys, values = of.key_dim, group * of.value_dim
        by_head = wide.unflatten(-1, (-1, 2 * (keys + values))).split((keys, keys, values, values), -1)
        *mixed, gate, step, decay = (
            part.flatten(1) for part in (*by_head, *narrow.unflatten(-1, (-1, 2 * group)).split(group, -1))
        )
        return torch.cat(mixed, -1), gate, step, decay
