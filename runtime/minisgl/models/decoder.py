"""The decoder-only transformer that all supported models are cases of."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from minisgl.attention.interface import Attention
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.kernels.attention.rotation import Rotation, rotate
from minisgl.kernels.pointwise.norm import rms_norm
from minisgl.layers import activation
from minisgl.layers.activation import GATED_ACTIVATIONS, GatedActivation, silu_and_mul
from minisgl.layers.linear import ColumnParallelLinear, RowParallelLinear, stacked
from minisgl.layers.norm import BlockNorm, ResidualSum, RMSNorm
from minisgl.layers.rope_config import RopeConfig
from minisgl.layers.rotary import Rotary
from minisgl.layers.vocabulary import LMHead, VocabParallelEmbedding, VocabularyShard
from minisgl.layers.weights.allocate import (
    ExpertNames,
    allocate,
    allocate_experts,
    allocate_interleaved_experts,
    allocate_stacked_experts,
)
from minisgl.layers.weights.dense import DenseWeight
from minisgl.layers.weights.inputs import PreNorm, activate
from minisgl.layers.weights.parameters import Parameters
from minisgl.layers.weights.weight import Projection, Weight
from minisgl.models.config import ModelConfig
from minisgl.models.decoder_config import (
    AttentionConfig,
    ClampedGate,
    FeedForwardConfig,
    MoeConfig,
    QueryGrowth,
    TokenInputs,
)
from minisgl.moe.experts import run_experts
from minisgl.moe.mixture import mixture_of_experts
from minisgl.moe.routing import route_by_scores


class SelfAttention:
    def __init__(self, config: ModelConfig, parallel: TensorParallel, parameters: Parameters, layer: int) -> None:
        of, names, block = config.layers[layer].attention, config.decoder.names, f"model.layers.{layer}.self_attn"
        self._layer = layer
        self._config = of
        self._norm_kind = config.decoder.norm
        self._parallel = parallel
        local = parallel.shard(of.num_heads), local_kv_heads(of, parallel), local_kv_heads(of, parallel)
        self._sinks = None
        if of.sinks:
            self._sinks = parameters.new(_length(local[0]))
            parameters.add_source(f"{block}.sinks", (of.num_heads,), self._sinks, local[0])
        order = None if of.rope is None else of.rope.order(of.head_dim)
        parts = 1 if of.reuses_kv else 2 if of.key_is_value else 3
        assert order is None or not of.key_is_value, "values have the checkpoint's order of dimensions"
        self._heads = [_length(each) for each in local[:parts]]
        self.norm = _norm_before(config, parameters, layer, "input_layernorm")
        self.qkv = ColumnParallelLinear(
            parameters,
            config.hidden_size,
            stacked(
                f"{block}.{names.fused_qkv}" if names.fused_qkv else None,
                [
                    Projection(f"{block}.{part}_proj", heads * of.head_dim, _scaled(rows, of.head_dim), of_part)
                    for part, heads, rows, of_part in zip(
                        "qkv",
                        (of.num_heads, of.num_kv_heads, of.num_kv_heads),
                        local,
                        (order, order, None),
                        strict=True,
                    )
                ][:parts],
            ),
            bias=of.qkv_bias,
        )
        self.q_norm, self.k_norm = (
            _head_gain(parameters, f"{block}.{name}.weight", of, heads, rows, order) if is_there else None
            for name, heads, rows, is_there in (
                (names.query_norm, of.num_heads, local[0], True),
                (names.key_norm, of.num_kv_heads, local[1], not of.reuses_kv),
            )
        )
        self.out = RowParallelLinear(
            parameters,
            f"{block}.o_proj",
            of.num_heads * of.head_dim,
            config.hidden_size,
            parallel,
            bias=of.output_bias,
            in_parts=_sums_in_norm(config, layer),
        )
        self._norms_in_kernel = (
            of.query_key_norm == "head"
            and not (of.norm_after_rotation or of.reuses_kv)
            and config.decoder.norm.is_plain
        )

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        angles: Angles,
        attention: Attention,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend, then keep only `rows` if given."""
        qkv, residual = self.qkv.weight.normed_product(PreNorm(self.norm, x, residual), self.qkv.bias)
        q, *stored = torch.split(qkv.view(len(qkv), -1, self._config.head_dim), self._heads, dim=1)
        k, v = (stored[0], stored[-1]) if stored else (None, None)
        if v is not None and self._config.value_norm:
            v = rms_norm(v, None, self._norm_kind.eps)
        q, k, rotation = self._prepared(q, k, angles)
        heads = attention.attend(self._layer, q, k, v, rotation, self._sinks)
        if rows is not None:
            heads, residual = heads[rows], residual[rows]
        return self.out.forward(heads), residual

    def _prepared(
        self, q: torch.Tensor, k: torch.Tensor | None, angles: Angles
    ) -> tuple[torch.Tensor, torch.Tensor | None, Rotation]:
        """Queries and keys as the kernel that rotates and stores them takes them: all that it does not do is done."""
        of, kind = self._config, self._norm_kind
        cos_sin = angles.of(of.rope, of.head_dim)
        if of.query_growth is not None:
            q = q * angles.growth(of.query_growth).to(q.dtype)
        if self._norms_in_kernel:
            return q, k, Rotation(cos_sin, self.q_norm, self.k_norm, kind.eps)
        if self.q_norm is None:
            return q, k, Rotation(cos_sin)
        if k is None or self.k_norm is None:
            assert of.query_key_norm == "head" and not of.norm_after_rotation
            return self._head_norm(q, self.q_norm), None, Rotation(cos_sin)
        if of.norm_after_rotation:
            q, k, cos_sin = rotate(q, cos_sin), rotate(k, cos_sin), angles.of(None, of.head_dim)
        if of.query_key_norm == "head":
            q, k = self._head_norm(q, self.q_norm), self._head_norm(k, self.k_norm)
        else:
            q, k = self._whole_norms(q, k, self.q_norm, self.k_norm)
        return q, k, Rotation(cos_sin)

    def _head_norm(self, part: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        kind = self._norm_kind
        return rms_norm(part, gain, kind.eps, unit_offset=kind.unit_offset, round_last=kind.round_last)

    def _whole_norms(
        self, q: torch.Tensor, k: torch.Tensor, q_gain: torch.Tensor, k_gain: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalize the queries of all heads together, and the keys."""
        of, ranks = self._config, self._parallel.size
        wide = q.float().flatten(1), k.float().flatten(1)
        sums = torch.stack([part.square().sum(-1) for part in wide], dim=-1)
        # Ranks beyond the number of KV heads hold the same ones.
        copies = max(1, ranks // of.num_kv_heads)
        sums[:, 1] /= of.num_kv_heads * of.head_dim * copies
        sums[:, 0] /= of.num_heads * of.head_dim
        if ranks > 1:
            sums = self._parallel.all_reduce_sum(sums)
        scales = torch.rsqrt(sums + self._norm_kind.eps)
        normed_q, normed_k = (
            _apply_gain(part * scales[:, i, None], gain, q.dtype, round_last=self._norm_kind.round_last)
            for i, (part, gain) in enumerate(zip(wide, (q_gain, k_gain), strict=True))
        )
        return normed_q.view_as(q), normed_k.view_as(k)


class FeedForward:
    def __init__(
        self, config: ModelConfig, of: FeedForwardConfig, parallel: TensorParallel, parameters: Parameters, layer: int
    ) -> None:
        name, names = f"model.layers.{layer}.mlp", config.decoder.names
        size = of.intermediate_size
        self.norm = _norm_before_feed_forward(config, parameters, layer)
        self._activation = GATED_ACTIVATIONS[of.activation]
        self.gate_up = ColumnParallelLinear(
            parameters,
            config.hidden_size,
            stacked(
                f"{name}.{names.fused_gate_up}" if names.fused_gate_up else None,
                [Projection(f"{name}.{part}", size, parallel.shard(size)) for part in ("gate_proj", "up_proj")],
            ),
            bias=of.bias,
        )
        self.down = RowParallelLinear(
            parameters,
            f"{name}.down_proj",
            size,
            config.hidden_size,
            parallel,
            bias=of.bias,
            in_parts=_sums_in_norm(config, layer),
        )

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        block, both = PreNorm(self.norm, x, residual), self.gate_up
        inner, residual = both.weight.gated_product(block, both.bias, self._activation, self.down.weight)
        return self.down.forward(inner), residual


class SparseFeedForward:
    """Mixture of experts; every rank holds an equal part of every expert's intermediate features."""

    def __init__(
        self, config: ModelConfig, moe: MoeConfig, parallel: TensorParallel, parameters: Parameters, layer: int
    ) -> None:
        prefix, names, routing = f"model.layers.{layer}", config.decoder.names.moe, moe.routing
        self.norm = _norm_before_feed_forward(config, parameters, layer)
        self._parallel = parallel
        self._moe = moe
        self._activation: GatedActivation
        if isinstance(moe.activation, ClampedGate):
            self._activation = activation.ClampedGate(moe.activation.alpha, moe.activation.limit)
        else:
            self._activation = GATED_ACTIVATIONS[moe.activation]
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
        if names.stacked is not None:
            gate_up, down = (f"{prefix}.{each}" for each in names.stacked)
            self.experts = allocate_stacked_experts(
                parameters, gate_up, down, moe.num_experts, hidden, size, parallel.shard(size)
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
            self.experts = allocate_experts(
                parameters,
                [
                    ExpertNames(*(f"{each}.{name}" for name in (names.gate, names.up, names.down)))
                    for each in each_expert
                ],
                hidden,
                size,
                parallel.shard(size),
                keep=self._activation is silu_and_mul,
            )
        self._shared = None
        if moe.shared is not None:
            gate = f"{prefix}.{names.shared_gate}" if moe.shared_gate else None
            self._shared = SharedExpert(parameters, f"{prefix}.{names.shared}", gate, moe.shared, hidden, parallel)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routing = self._moe.routing
        if routing.float32_router:
            x, residual = self.norm.forward(x, residual)
            logits = self.router.product(x.float(), self._router_bias)
        else:
            x, logits, residual = self.router.norm_and_product(PreNorm(self.norm, x, residual), self._router_bias)
        if routing.is_plain:
            out = mixture_of_experts(
                x,
                logits,
                *self.experts,
                self._activation,
                self._moe.experts_per_token,
                renormalize=routing.renormalize,
                biases=self._biases,
            )
        else:
            chosen = route_by_scores(logits, self._selection_bias, self._moe.experts_per_token, routing)
            out = run_experts(x, *chosen, *self.experts, self._activation, self._biases)
        if self._shared is not None:
            out = out + self._shared.forward(x)
        return self._parallel.all_reduce_sum(out), residual


class SharedExpert:
    """Feed-forward of every token beside its experts. Each rank computes a part of the sum."""

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        gate_name: str | None,
        of: FeedForwardConfig,
        hidden: int,
        parallel: TensorParallel,
    ) -> None:
        part = parallel.shard(of.intermediate_size)
        self._activation = GATED_ACTIVATIONS[of.activation]
        both = [Projection(f"{name}.{each}", of.intermediate_size, part) for each in ("gate_proj", "up_proj")]
        self.gate_up = allocate(parameters, both, hidden)
        down = Projection(f"{name}.down_proj", hidden, slice(0, hidden))
        self.down = allocate(parameters, [down], of.intermediate_size, part)
        self.gate = parameters.replicated(f"{gate_name}.weight", 1, hidden) if gate_name else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to this rank's part of [T, hidden]."""
        inner = activate(self._activation, self.gate_up.product(x), self.down.form_of(x))
        out = self.down.product(inner)
        return out if self.gate is None else torch.sigmoid(F.linear(x, self.gate)) * out


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
        self._activation = GATED_ACTIVATIONS[moe.activation]
        self.dense = FeedForward(config, of, parallel, parameters, layer)
        self.dense_end, self.norm, self.experts_end = (
            _norm(config, parameters, f"{name}.{each}_feedforward_layernorm_{number}")
            for each, number in (("post", 1), ("pre", 2), ("post", 2))
        )
        self.router = DenseWeight(parameters.replicated(f"{name}.router.proj.weight", moe.num_experts, hidden))
        self.router_scale = parameters.replicated(f"{name}.router.scale", hidden)
        self.expert_scales = parameters.replicated(f"{name}.router.per_expert_scale", moe.num_experts)
        size = moe.intermediate_size
        self.experts = allocate_stacked_experts(
            parameters,
            f"{name}.experts.gate_up_proj",
            f"{name}.experts.down_proj",
            moe.num_experts,
            hidden,
            size,
            parallel.shard(size),
        )

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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


class DecoderLayer:
    """Attention and feed-forward. Each adds the output of the previous block to the residual stream, and begins with
    the sum."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, parameters: Parameters, layer: int) -> None:
        of = config.layers[layer]
        self.attention = SelfAttention(config, parallel, parameters, layer)
        names = config.decoder.names
        self.attention_end = BlockEnd(config, parameters, layer, names.attention_end_norm)
        self.feed_forward: FeedForward | SparseFeedForward | FeedForwardBesideExperts
        if of.experts_beside is not None:
            self.feed_forward = FeedForwardBesideExperts(config, of.experts_beside, parallel, parameters, layer)
        elif isinstance(of.feed_forward, MoeConfig):
            self.feed_forward = SparseFeedForward(config, of.feed_forward, parallel, parameters, layer)
        else:
            self.feed_forward = FeedForward(config, of.feed_forward, parallel, parameters, layer)
        self.feed_forward_end = BlockEnd(config, parameters, layer, names.feed_forward_end_norm)
        self.token_input = None
        if config.decoder.token_inputs is not None:
            self.token_input = TokenInput(config, config.decoder.token_inputs, parameters, layer)
        self.stream_scale = parameters.replicated(f"model.layers.{layer}.layer_scalar", 1) if of.scales_stream else None

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        angles: Angles,
        attention: Attention,
        rows: torch.Tensor | None = None,
        token_inputs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`rows`: compute only these behind the attention; nothing reads the others. `token_inputs`: [T, layers, size],
        if the model has some."""
        x, stream = self.attention.forward(x, residual, angles, attention, rows)
        x = self.attention_end.forward(x)
        # A chunk in the middle of a prompt leaves no rows.
        if not len(stream):
            return x, stream
        x, stream = self.feed_forward.forward(x, stream)
        x = self.feed_forward_end.forward(x)
        if self.token_input is None and self.stream_scale is None:
            return x, stream
        x = x + stream
        if self.token_input is not None:
            assert token_inputs is not None
            x = self.token_input.forward(x, token_inputs if rows is None else token_inputs[rows])
        return x if self.stream_scale is None else x * self.stream_scale, None


class TokenInput:
    """End of a layer that depends on the token itself."""

    def __init__(self, config: ModelConfig, of: TokenInputs, parameters: Parameters, layer: int) -> None:
        name, hidden = f"model.layers.{layer}", config.hidden_size
        self._layer = layer
        self._activation = GATED_ACTIVATIONS[of.activation]
        self.gate = _whole_linear(parameters, f"{name}.per_layer_input_gate", hidden, of.size)
        self.out = _whole_linear(parameters, f"{name}.per_layer_projection", of.size, hidden)
        self.norm = _norm(config, parameters, f"{name}.post_per_layer_input_norm")

    def forward(self, x: torch.Tensor, token_inputs: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], the residual stream, and inputs of all layers [T, layers, size] to the new stream."""
        both = torch.cat((self.gate.product(x), token_inputs[:, self._layer]), dim=-1)
        added, _ = self.norm.forward(self.out.product(self._activation(both)), None)
        return x + added


class TokenInputTable:
    """Inputs of all layers from the ids and the embeddings of tokens."""

    def __init__(
        self, config: ModelConfig, of: TokenInputs, parameters: Parameters, parallel: TensorParallel, dtype: torch.dtype
    ) -> None:
        self._shape = config.num_layers, of.size
        width, hidden = config.num_layers * of.size, config.hidden_size
        shard = VocabularyShard(of.vocab_size, parallel)
        self.table = VocabParallelEmbedding(parameters, "model.embed_tokens_per_layer", width, shard, parallel)
        self.projection = _whole_linear(parameters, "model.per_layer_model_projection", hidden, width)
        self.gain = parameters.replicated("model.per_layer_projection_norm.weight", of.size)
        self._kind = config.decoder.norm
        self._scale = torch.tensor(of.size**0.5, dtype=dtype).item()
        self._projection_scale = hidden**-0.5

    def forward(self, tokens: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """tokens [T] and embeddings [T, hidden] to [T, layers, size]."""
        kind = self._kind
        own = (self.table.forward(tokens) * self._scale).view(-1, *self._shape)
        context = (self.projection.product(embeddings) * self._projection_scale).view(-1, *self._shape)
        normed = rms_norm(context, self.gain, kind.eps, unit_offset=kind.unit_offset, round_last=kind.round_last)
        return (normed + own) * 2**-0.5


class BlockEnd:
    """What happens to the output of a block before it is added to the residual stream."""

    def __init__(self, config: ModelConfig, parameters: Parameters, layer: int, name: str) -> None:
        of = config.layers[layer]
        self._norm = None
        if of.norms != "pre":
            self._norm = _norm(config, parameters, f"model.layers.{layer}.{name}")
        self._scale = of.residual_scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._norm is not None:
            x, _ = self._norm.forward(x, None)
        return x if self._scale == 1.0 else x * self._scale


class Angles:
    """Angles of the tokens of a step, for all layers."""

    def __init__(self, rotary: Mapping[tuple[RopeConfig | None, int], Rotary], positions: torch.Tensor) -> None:
        """`rotary`: by RoPE and size of the heads."""
        self._cos_sin = {key: table.at(positions) for key, table in rotary.items()}
        self._positions = positions

    def of(self, rope: RopeConfig | None, head_dim: int) -> torch.Tensor:
        """[T, head_dim], see `Rotary.at`."""
        return self._cos_sin[rope, head_dim]

    def growth(self, growth: QueryGrowth) -> torch.Tensor:
        """[T, 1, 1] float32: factor of each token's queries."""
        steps = torch.floor(self._positions.float() / growth.original_max_position)
        return (1 + growth.beta * torch.log(1 + steps))[:, None, None]


class Decoder:
    """One rank's part of a model. `load_weights` or `fill_random` fill its parameters.

    Neither `forward` nor `local_logits` waits for the device, and shapes follow from T and S alone: both can be
    captured in a CUDA graph.
    """

    def __init__(
        self,
        config: ModelConfig,
        parallel: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str,
        max_position: int | None = None,
        *,
        keep_quantized: bool | None = None,
        has_lm_head: bool = True,
    ) -> None:
        """`max_position`: upper bound of positions; None: that of the model. `keep_quantized`: see `Parameters`.
        `has_lm_head`: false for a model of which only hidden states are wanted. Raises ModelError if the model cannot
        be split over the ranks.
        """
        config.check_tensor_parallel(parallel.size)
        device = torch.device(device)
        self.config = config
        self.parameters = Parameters(
            dtype,
            device,
            config.quantization,
            keep_quantized=keep_quantized,
            left_out=config.decoder.names.left_out,
        )
        shard = VocabularyShard(config.vocab_size, parallel)
        self.vocab_start = shard.start
        """First token of this rank's shard of the vocabulary."""
        self.vocab_local = shard.size
        """Tokens in the shard, the same on every rank; padding behind the vocabulary has the lowest logit."""
        self.num_kv_heads_local = _length(local_kv_heads(config.attention, parallel))
        """KV heads on this rank, which its KV pool stores per layer and token."""

        self.embedding = VocabParallelEmbedding(
            self.parameters, "model.embed_tokens", config.hidden_size, shard, parallel
        )
        length = max_position or config.max_model_len
        blocks = [layer.attention for layer in config.layers]
        kinds = {(of.rope, of.head_dim): None for of in blocks}
        # Rotated queries and keys whose norm follows are stored as they are.
        kinds |= {(None, of.head_dim): None for of in blocks if of.norm_after_rotation}
        self.rotary = {(rope, size): Rotary(rope, size, length, device) for rope, size in kinds}
        self.token_inputs = None
        if config.decoder.token_inputs is not None:
            self.token_inputs = TokenInputTable(config, config.decoder.token_inputs, self.parameters, parallel, dtype)
        self.layers = [DecoderLayer(config, parallel, self.parameters, i) for i in range(config.num_layers)]
        family = config.decoder
        self.norm = _norm(config, self.parameters, "model.norm")
        self.head = None
        if has_lm_head:
            head = self.embedding.weight
            if not family.tied_embeddings:
                head = shard.new_weight(self.parameters, "lm_head", config.hidden_size)
            self.head = LMHead(head, shard, family.logit_divisor, family.logit_softcap)
        self._embedding_scale = torch.tensor(family.embedding_scale, dtype=dtype).item()

    def with_layers(self, layers: Sequence[int]) -> Decoder:
        """A model with only these layers. It shares their parameters."""
        model = copy.copy(self)
        model.layers = [self.layers[layer] for layer in layers]
        return model

    @property
    def parameter_bytes(self) -> int:
        """Bytes of this rank's parameters."""
        return self.parameters.num_bytes

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """tokens and positions [T] int32 or int64 to final hidden states in the model's dtype: [T, hidden], or only
        `rows` [S], [S, hidden]. For other rows the last layer only writes keys and values."""
        x = self.embedding.forward(tokens)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        angles = Angles(self.rotary, positions)
        inputs = None if self.token_inputs is None else self.token_inputs.forward(tokens, x)
        residual = None
        for layer in self.layers[:-1]:
            x, residual = layer.forward(x, residual, angles, attention, token_inputs=inputs)
        x, residual = self.layers[-1].forward(x, residual, angles, attention, rows, inputs)
        x, _ = self.norm.forward(x, residual)
        return x

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result [S, hidden] to [S, vocab_local]: the logits of this rank's shard, in the model's
        dtype. Concatenated over the ranks and cut to `config.vocab_size`, they are the logits of the model."""
        assert self.head is not None
        return self.head.forward(hidden)


def _norm(config: ModelConfig, parameters: Parameters, name: str) -> RMSNorm:
    return RMSNorm(parameters.replicated(f"{name}.weight", config.hidden_size), config.decoder.norm)


def _norm_before(config: ModelConfig, parameters: Parameters, layer: int, name: str) -> BlockNorm:
    if config.layers[layer].norms == "post":
        return ResidualSum()
    return _norm(config, parameters, f"model.layers.{layer}.{name}")


def _norm_before_feed_forward(config: ModelConfig, parameters: Parameters, layer: int) -> BlockNorm:
    return _norm_before(config, parameters, layer, config.decoder.names.feed_forward_norm)


def _sums_in_norm(config: ModelConfig, layer: int) -> bool:
    """Whether the output of a block goes to the next norm as it is."""
    of = config.layers[layer]
    is_last_part = config.decoder.token_inputs is None and not of.scales_stream
    return of.norms == "pre" and of.residual_scale == 1.0 and is_last_part


def _whole_linear(parameters: Parameters, name: str, in_features: int, out_features: int) -> Weight:
    """Weight of a linear layer that every rank holds whole."""
    return allocate(parameters, [Projection(name, out_features, slice(0, out_features))], in_features)


def _head_gain(
    parameters: Parameters,
    name: str,
    of: AttentionConfig,
    heads: int,
    local: slice,
    order: tuple[int, ...] | None,
) -> torch.Tensor | None:
    """Gain of the norm of queries or keys: [head_dim], or that of this rank's heads one after the other."""
    if of.query_key_norm is None:
        return None
    if of.query_key_norm == "head":
        gain = parameters.new(of.head_dim)
        parameters.add_source(name, (of.head_dim,), gain, order=order)
        return gain
    rows = _scaled(local, of.head_dim)
    gain = parameters.new(_length(rows))
    parameters.add_source(name, (heads * of.head_dim,), gain, rows, order=order)
    return gain


def _apply_gain(normed: torch.Tensor, gain: torch.Tensor, dtype: torch.dtype, *, round_last: bool) -> torch.Tensor:
    return (normed * gain.float()).to(dtype) if round_last else gain * normed.to(dtype)


def local_kv_heads(of: AttentionConfig, parallel: TensorParallel) -> slice:
    """KV heads that this rank's query heads read. With fewer KV heads than ranks, neighbours hold the same head."""
    if parallel.size <= of.num_kv_heads:
        return parallel.shard(of.num_kv_heads)
    head = parallel.rank * of.num_kv_heads // parallel.size
    return slice(head, head + 1)


def _scaled(part: slice, size: int) -> slice:
    return slice(part.start * size, part.stop * size)


def _length(part: slice) -> int:
    return int(part.stop - part.start)
