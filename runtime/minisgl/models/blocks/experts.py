"""Mixtures of experts: alone, beside a shared expert, and beside a dense feed-forward."""

from __future__ import annotations

import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.kernels.pointwise.norm import rms_norm
from minisgl.kernels.pointwise.output_gate import add_gated
from minisgl.layers import activation
from minisgl.layers.activation import ACTIVATIONS, FeedForwardActivation, silu_and_mul
from minisgl.layers.weights.allocate import (
    ExpertNames,
    Experts,
    allocate,
    allocate_experts,
    allocate_interleaved_experts,
    allocate_stacked_experts,
)
from minisgl.layers.weights.dense import DenseWeight
from minisgl.layers.weights.inputs import PreNorm, activate
from minisgl.layers.weights.parameters import Parameters
from minisgl.layers.weights.weight import Projection
from minisgl.models.blocks.feed_forward import FeedForward, gate_and_up
from minisgl.models.blocks.norms import norm_before_feed_forward, norm_of
from minisgl.models.config import ModelConfig
from minisgl.models.decoder_config import UNGATED, ClampedGate, FeedForwardConfig, FeedForwardNames, MoeConfig
from minisgl.moe.experts import run_experts
from minisgl.moe.mixture import mixture_of_experts
from minisgl.moe.routing import route_by_scores


class SparseFeedForward:
    """Mixture of experts; every rank holds an equal part of every expert's intermediate features."""

    def __init__(
        self, config: ModelConfig, moe: MoeConfig, parallel: TensorParallel, parameters: Parameters, layer: int
    ) -> None:
        prefix, names, routing = f"model.layers.{layer}", config.decoder.names.moe, moe.routing
        self.norm = norm_before_feed_forward(config, parameters, layer)
        self._parallel = parallel
        self._moe = moe
        self._activation: FeedForwardActivation
        if isinstance(moe.activation, ClampedGate):
            self._activation = activation.ClampedGate(moe.activation.alpha, moe.activation.limit)
        else:
            self._activation = ACTIVATIONS[moe.activation]
        hidden, size = config.hidden_size, moe.intermediate_size
        router = parameters.new(
            moe.num_experts, hidden, dtype=torch.float32 if routing.float32_router else parameters.dtype
        )
        parameters.add_source(f"{prefix}.{names.router}.weight", (moe.num_experts, hidden), router)
        self.router = DenseWeight(router)
        self._router_bias = None
        if moe.router_bias:
            self._router_bias = parameters.replicated(f"{prefix}.{names.router}.bias", moe.num_experts)
        self._selection_bias = None
        if routing.selection_bias:
            self._selection_bias = parameters.new(moe.num_experts, dtype=torch.float32)
            shape = (1, moe.num_experts) if names.selection_bias_is_row else (moe.num_experts,)
            parameters.add_source(f"{prefix}.{names.selection_bias}", shape, self._selection_bias.view(shape))
        self._biases = None
        self._latent = None
        width = moe.latent_size or hidden
        """Size of what experts take and give."""
        if moe.latent_size is not None:
            self._latent = tuple(
                allocate(parameters, [Projection(f"{prefix}.{name}", rows, slice(0, rows))], columns)
                for name, rows, columns in ((names.into_latent, width, hidden), (names.out_of_latent, hidden, width))
            )
        if names.stacked is not None:
            gate_up, down = (f"{prefix}.{each}" for each in names.stacked)
            self.experts = allocate_stacked_experts(
                parameters, gate_up, down, moe.num_experts, width, size, parallel.shard(size)
            )
        elif names.interleaved:
            self.experts, self._biases = allocate_interleaved_experts(
                parameters,
                f"{prefix}.{names.experts}",
                moe.num_experts,
                hidden,
                size,
                parallel,
                biased=moe.expert_bias,
            )
        else:
            each_expert = (f"{prefix}.{names.experts}.{i}" for i in range(moe.num_experts))
            first = (names.up,) if moe.activation in UNGATED else (names.gate, names.up)
            self.experts = allocate_experts(
                parameters,
                [ExpertNames([f"{each}.{name}" for name in first], f"{each}.{names.down}") for each in each_expert],
                width,
                size,
                parallel.shard(size),
                keep=self._activation is silu_and_mul,
            )
        self._shared = None
        if moe.shared is not None:
            gate = f"{prefix}.{names.shared_gate}" if moe.shared_gate else None
            self._shared = SharedExpert(parameters, prefix, names.shared, gate, moe.shared, hidden, parallel)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        routing = self._moe.routing
        x, logits, residual = self.router.norm_and_product(PreNorm(self.norm, x, residual), self._router_bias)
        inputs = x if self._latent is None else self._latent[0].product(x)
        if routing.is_plain:
            out = mixture_of_experts(
                inputs,
                logits,
                *self.experts,
                self._activation,
                self._moe.experts_per_token,
                renormalize=routing.renormalize,
                biases=self._biases,
            )
        else:
            chosen = route_by_scores(logits, self._selection_bias, self._moe.experts_per_token, routing)
            out = run_experts(inputs, *chosen, *self.experts, self._activation, self._biases)
        if self._latent is not None:
            out = self._latent[1].product(out)
        if self._shared is not None:
            out = self._shared.add_to(out, x)
        return self._parallel.all_reduce_sum(out), residual


class SharedExpert:
    """Feed-forward of every token beside its experts. Each rank computes a part of the sum."""

    def __init__(
        self,
        parameters: Parameters,
        layer: str,
        names: FeedForwardNames,
        gate_name: str | None,
        of: FeedForwardConfig,
        hidden: int,
        parallel: TensorParallel,
    ) -> None:
        """`layer`: what its names begin with."""
        name = f"{layer}.{names.prefix}"
        self._activation = ACTIVATIONS[of.activation]
        self.gate_up = allocate(parameters, gate_and_up(name, names, of, parallel), hidden)
        down = Projection(f"{name}.{names.down}", hidden, slice(0, hidden))
        self.down = allocate(parameters, [down], of.intermediate_size, parallel.shard(of.intermediate_size))
        self.gate = parameters.replicated(f"{gate_name}.weight", 1, hidden) if gate_name else None

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`total` [T, hidden] plus this rank's part of the output for x [T, hidden]."""
        inner = activate(self._activation, self.gate_up.product(x), self.down.form_of(x))
        out = self.down.product(inner)
        return total + out if self.gate is None else add_gated(total, out, x, self.gate)


class FeedForwardBesideExperts:
    """Dense feed-forward and mixture of experts of one stream."""

    def __init__(
        self, config: ModelConfig, moe: MoeConfig, parallel: TensorParallel, parameters: Parameters, layer: int
    ) -> None:
        name, hidden = f"model.layers.{layer}", config.hidden_size
        of = config.layers[layer].feed_forward
        assert isinstance(of, FeedForwardConfig) and config.layers[layer].norms == "sandwich"
        self._moe, self._parallel, self._kind = moe, parallel, config.decoder.norm
        assert isinstance(moe.activation, str)
        self._activation = ACTIVATIONS[moe.activation]
        self.dense = FeedForward(config, of, parallel, parameters, layer)
        self.dense_end, self.norm, self.experts_end = (
            norm_of(config, parameters, f"{name}.{each}_feedforward_layernorm_{number}")
            for each, number in (("post", 1), ("pre", 2), ("post", 2))
        )
        self.router = DenseWeight(parameters.replicated(f"{name}.router.proj.weight", moe.num_experts, hidden))
        self.router_scale = parameters.replicated(f"{name}.router.scale", hidden)
        self.expert_scales = parameters.replicated(f"{name}.router.per_expert_scale", moe.num_experts)
        self.experts = self._allocate_experts(parameters, f"{name}.experts", moe, hidden, parallel)

    @staticmethod
    def _allocate_experts(
        parameters: Parameters, name: str, moe: MoeConfig, hidden: int, parallel: TensorParallel
    ) -> Experts:
        """llm-compressor writes tensors for each expert that it quantizes; otherwise two have all of a layer."""
        size = moe.intermediate_size
        each_expert = [
            ExpertNames([f"{name}.{i}.gate_proj", f"{name}.{i}.up_proj"], f"{name}.{i}.down_proj")
            for i in range(moe.num_experts)
        ]
        if parameters.stored_format_of(each_expert[0].down) is not None:
            return allocate_experts(parameters, each_expert, hidden, size, parallel.shard(size), keep=False)
        both, down = f"{name}.gate_up_proj", f"{name}.down_proj"
        return allocate_stacked_experts(parameters, both, down, moe.num_experts, hidden, size, parallel.shard(size))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        dense, stream = self.dense.forward(x, residual)
        dense, _ = self.dense_end.forward(dense, None)
        routed = rms_norm(stream, None, self._kind.eps) * self.router_scale * stream.shape[-1] ** -0.5
        logits = self.router.product(routed)
        weights, chosen = route_by_scores(logits, None, self._moe.experts_per_token, self._moe.routing)
        weights = weights * self.expert_scales[chosen]
        normed, _ = self.norm.forward(stream, None)
        experts = self._parallel.all_reduce_sum(run_experts(normed, weights, chosen, *self.experts, self._activation))
        experts, _ = self.experts_end.forward(experts, None)
        return dense + experts, stream
