"""State space of a layer (Mamba-2)."""

from __future__ import annotations

import torch

from minisgl.attention.mamba2 import Mamba2Rule
from minisgl.attention.recurrent import RecurrentStates
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.kernels.pointwise.gated_norm import gate_then_norm, gated
from minisgl.layers.linear import ColumnParallelLinear, stacked
from minisgl.layers.weights.parameters import Parameters
from minisgl.layers.weights.weight import Projection
from minisgl.models.blocks.convolution import new_convolution
from minisgl.models.blocks.norms import norm_before
from minisgl.models.blocks.output import new_output
from minisgl.models.config import ModelConfig
from minisgl.models.decoder_config import Mamba2Config, recurrences


class Mamba2:
    """Every rank holds an equal part of the heads, and the groups of these."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, parameters: Parameters, layer: int) -> None:
        of, names = config.layers[layer].attention, config.decoder.names
        block = f"model.layers.{layer}.{names.mamba}"
        assert isinstance(of, Mamba2Config)
        self._layer = len(recurrences(config.layers[:layer]))
        """Number among the layers with recurrent states."""
        self._config = of
        self._eps = config.decoder.norm.eps
        self._parallel = parallel
        heads, values = parallel.shard(of.num_heads), parallel.shard(of.width)
        self._groups = of.local_groups(parallel.rank, parallel.size)
        shared = slice(self._groups.start * of.state_size, self._groups.stop * of.state_size)
        shared_width = of.num_groups * of.state_size
        self.norm = norm_before(config, parameters, layer, names.attention_norm)
        parts = [(of.width, values), (of.width, values), (shared_width, shared), (shared_width, shared)]
        gate_to_step = stacked(
            f"{block}.in_proj", [Projection("", size, rows) for size, rows in (*parts, (of.num_heads, heads))]
        )
        self.inputs = ColumnParallelLinear(parameters, config.hidden_size, gate_to_step, bias=of.projection_bias)
        mixed = stacked(f"{block}.conv1d", [Projection("", size, rows) for size, rows in parts[1:]])
        self._sizes = [mixed[0].num_rows, sum(each.num_rows for each in mixed), gate_to_step[-1].num_rows]
        self.convolution = new_convolution(
            parameters, f"{block}.conv1d", mixed, of.kernel_size, bias=of.convolution_bias
        )
        count = heads.stop - heads.start
        log_decay, step_bias, skip = (parameters.new(count, dtype=torch.float32) for _ in range(3))
        for name, tensor in (("A_log", log_decay), ("dt_bias", step_bias), ("D", skip)):
            parameters.add_source(f"{block}.{name}", (of.num_heads,), tensor, heads)
        self._rule = Mamba2Rule(count, self._groups.stop - self._groups.start, log_decay, step_bias, skip)
        self.gain = parameters.new(values.stop - values.start)
        parameters.add_source(f"{block}.norm.weight", (of.width,), self.gain, values)
        self.out = new_output(
            config, parallel, parameters, layer, f"{block}.out_proj", of.width, bias=of.projection_bias
        )

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        states: RecurrentStates,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `SelfAttention.forward`; positions follow from the order of tokens."""
        x, residual = self.norm.forward(x, residual)
        gate, mixed, step = self.inputs.weight.product(x, self.inputs.bias).split(self._sizes, -1)
        out = states.mix(self._layer, mixed, self.convolution, self._rule, step)
        if rows is not None:
            out, gate, residual = out[rows], gate[rows], residual[rows]
        return self.out.forward(self._gated(out.flatten(1), gate)), residual

    def _gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Outputs of heads [T, heads · head_dim] times the SiLU of the gate, with the norm of each group."""
        of, groups = self._config, self._groups
        if self._parallel.size <= of.num_groups:
            return gate_then_norm(out, gate, self.gain, groups.stop - groups.start, self._eps)
        # Several ranks have parts of a group.
        wide = gated(out, gate)
        parts = wide.unflatten(-1, (groups.stop - groups.start, -1))
        every = wide.new_zeros(len(wide), of.num_groups)
        every[:, groups] = parts.square().sum(-1)
        sums = self._parallel.all_reduce_sum(every)[:, groups]
        scales = torch.rsqrt(sums * (of.num_groups / of.width) + self._eps)
        normed: torch.Tensor = (parts * scales[..., None]).flatten(1).to(gate.dtype)
        return self.gain * normed
