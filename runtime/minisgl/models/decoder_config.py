"""A decoder as data: what its layers are made of, whatever family of models it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, get_args

import msgspec

from minisgl.attention.state_shape import StateShape
from minisgl.layers.norm_config import NormConfig
from minisgl.layers.rope_config import RopeConfig
from minisgl.moe.routing_config import RoutingConfig

Activation = Literal["silu", "gelu", "gelu_tanh"]
"""Of a feed-forward with a gate: activation(gate) · up."""
Ungated = Literal["relu2"]
"""Of one without: activation(up). `relu2` is the square of ReLU."""
UNGATED: Final = get_args(Ungated)


class ClampedGate(msgspec.Struct, frozen=True, kw_only=True):
    """Activation gate · sigmoid(alpha · gate) · (up + 1), with gate up to `limit` and up from −`limit` to `limit`
    (gpt-oss)."""

    alpha: float
    limit: float


class QueryGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """Factor 1 + beta · ln(1 + ⌊position / original⌋) of queries, which keeps attention sharp in long contexts
    (Llama 4, Ministral 3)."""

    beta: float
    original_max_position: int


class AttentionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Self-attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    query_key_norm: Literal["head", "projection"] | None = None
    """RMS norm of queries and keys: of each head, or of all heads together (OLMo 2)."""
    norm_after_rotation: bool = False
    """The norm follows the rotation, and does not come before it (Hunyuan)."""
    rope: RopeConfig | None
    """None: the layer knows no positions (NoPE, arXiv:2305.19466)."""
    window: int | None = None
    """Last positions that a token attends to, its own included; None: all. Without `causal` also as many of the next
    ones."""
    causal: bool = True
    """A token attends to no later ones."""
    scale: float
    """Factor of the products of queries and keys; in most models head_dim ** -0.5."""
    softcap: float | None = None
    """c of c · tanh(score / c), which bounds scores (Gemma 2, arXiv:2408.00118)."""
    query_growth: QueryGrowth | None = None
    sinks: bool = False
    """Each head has a learned score that takes part in the softmax and has no value (arXiv:2309.17453)."""
    value_norm: bool = False
    """RMS norm of each head of values, without a gain (Gemma 4)."""
    key_is_value: bool = False
    """Values are the products that keys are before their norm and rotation."""
    output_gate: bool = False
    """Each head has a gate, whose rows follow those of its queries: its output is multiplied with the sigmoid of it
    (Qwen3-Next)."""
    reuses_kv: bool = False
    """The layer has no keys and values: it attends to those of the last layer before it that has some, with as many
    heads of the same size, the same window and the same RoPE."""

    def shares_kv_with(self, other: AttentionConfig) -> bool:
        """Whether keys and values of the `other` layer can be those of this one."""
        same = ("num_kv_heads", "head_dim", "window", "rope")
        return all(getattr(self, name) == getattr(other, name) for name in same)


class GatedDeltaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Linear attention of one layer by the gated delta rule (arXiv:2412.06464). In place of keys and values a sequence
    has a state of fixed size: a matrix for each value head, and the last inputs of a convolution over time."""

    num_key_heads: int
    num_value_heads: int
    """A multiple of the key heads; neighbours read the same one."""
    key_dim: int
    value_dim: int
    """Sizes of a head."""
    kernel_size: int
    """Tokens that the convolution looks at."""
    by_key_head: bool = False
    """The checkpoint has the projections of each key head one after the other: its query, its key, and values and
    output gates of its value heads in one tensor, step and decay of its value heads in another (Qwen3-Next)."""

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def parts(self) -> int:
        """The number of ranks divides it."""
        return self.num_key_heads

    def state_shape(self, ranks: int = 1) -> StateShape:
        """State of a sequence on one of `ranks` ranks."""
        return StateShape(
            kernel_size=self.kernel_size,
            channels=(2 * self.key_width + self.value_width) // ranks,
            heads=self.num_value_heads // ranks,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
        )


class Mamba2Config(msgspec.Struct, frozen=True, kw_only=True):
    """State space of one layer (Mamba-2, arXiv:2405.21060). In place of keys and values a sequence has a state of fixed
    size: a matrix for each head, and the last inputs of a convolution over time."""

    num_heads: int
    head_dim: int
    num_groups: int
    """Groups of neighbouring heads with the same keys and queries, B and C in the paper."""
    state_size: int
    """Size of these keys and queries."""
    kernel_size: int
    convolution_bias: bool
    projection_bias: bool

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def parts(self) -> int:
        """The number of ranks divides it."""
        return self.num_heads

    def local_groups(self, rank: int, ranks: int) -> slice:
        """Groups of one rank's heads. With fewer groups than ranks, neighbours hold the same group."""
        if ranks <= self.num_groups:
            size = self.num_groups // ranks
            return slice(rank * size, (rank + 1) * size)
        group = rank * self.num_groups // ranks
        return slice(group, group + 1)

    def state_shape(self, ranks: int = 1) -> StateShape:
        """State of a sequence on one of `ranks` ranks."""
        shared = max(1, self.num_groups // ranks) * self.state_size
        return StateShape(
            kernel_size=self.kernel_size,
            channels=self.width // ranks + 2 * shared,
            heads=self.num_heads // ranks,
            key_dim=self.state_size,
            value_dim=self.head_dim,
        )


class ShortConvolutionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Convolution of one layer over a few tokens, with a gate before and behind it (LFM2). In place of keys and values
    a sequence has its last inputs."""

    width: int
    kernel_size: int
    bias: bool

    @property
    def parts(self) -> int:
        """The number of ranks divides it."""
        return self.width

    def state_shape(self, ranks: int = 1) -> StateShape:
        """State of a sequence on one of `ranks` ranks."""
        return StateShape(kernel_size=self.kernel_size, channels=self.width // ranks)


Recurrence = GatedDeltaConfig | Mamba2Config | ShortConvolutionConfig
"""What a layer with a recurrent state has in place of attention."""


class FeedForwardConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Dense feed-forward of one layer."""

    intermediate_size: int
    activation: Activation | Ungated
    bias: bool = False


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Mixture of experts of one layer."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Intermediate size of one expert."""
    activation: Activation | Ungated | ClampedGate
    routing: RoutingConfig
    latent_size: int | None = None
    """Experts take and give vectors of this size, between projections from the hidden size and back (Nemotron 3)."""
    shared: FeedForwardConfig | None = None
    """Feed-forward of every token, which is added to the sum of its experts."""
    shared_gate: bool = False
    """Multiply the output of `shared` with the sigmoid of a product of each token with a vector."""
    router_bias: bool = False
    expert_bias: bool = False
    """Both projections of each expert have a bias."""


class LayerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One layer: attention, then feed-forward, each added to the residual stream. It may have only one of the two."""

    attention: AttentionConfig | Recurrence | None
    feed_forward: FeedForwardConfig | MoeConfig | None
    experts_beside: MoeConfig | None = None
    """Mixture of experts beside a dense feed-forward: both begin at the same stream with norms of their own, and the
    sum of their normalized outputs is the output of the block. Router and experts' weights have scales (Gemma 4)."""
    norms: Literal["pre", "post", "sandwich"] = "pre"
    """Norms of each of the two blocks: before it, behind it, or both."""
    residual_scale: float = 1.0
    """Factor of what each block adds to the residual stream (Granite)."""
    scales_stream: bool = False
    """The residual stream behind the layer is multiplied with a number of the checkpoint (Gemma 4)."""

    @property
    def moe(self) -> MoeConfig | None:
        """The layer's mixture of experts."""
        return self.feed_forward if isinstance(self.feed_forward, MoeConfig) else self.experts_beside


class TokenInputs(msgspec.Struct, frozen=True, kw_only=True):
    """A vector for each token and layer, from the token's id and its embedding, with which the layer multiplies a
    projection of its output (per-layer embeddings, Gemma 3n and 4)."""

    size: int
    vocab_size: int
    activation: Activation


class FeedForwardNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the tensors of a dense feed-forward."""

    prefix: str = "mlp"
    gate: str = "gate_proj"
    """Not read where there is no gate."""
    up: str = "up_proj"
    down: str = "down_proj"
    fused: str | None = None
    """One tensor with the rows of gate and up projection."""


class MoeNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the tensors of a mixture of experts."""

    router: str = "mlp.gate"
    selection_bias: str = "mlp.gate.e_score_correction_bias"
    selection_bias_is_row: bool = False
    """Its shape is [1, experts]."""
    experts: str = "mlp.experts"
    """Prefix of the numbers of experts, which are followed by the names of their three projections."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stacked: tuple[str, str] | None = None
    """Instead of these, two tensors with all experts of a layer: gate and up projections [experts, 2 N, hidden], first
    the gates, and down projections [experts, hidden, N]."""
    interleaved: bool = False
    """Instead of these, a tensor `gate_up_proj`, in which gates and gated values take turns, and one `down_proj`, both
    as [experts, in, out]; quantized ones as [experts, out, in]."""
    shared: FeedForwardNames = FeedForwardNames(prefix="mlp.shared_experts")
    shared_gate: str = "mlp.shared_expert_gate"
    into_latent: str = ""
    out_of_latent: str = ""
    """Projections around experts of a latent size."""


def kv_layers(layers: Sequence[LayerConfig]) -> list[int]:
    """For each layer with keys and values the one whose it attends to, as a number among these layers: its own, unless
    it reuses others."""
    blocks, found = attentions(layers), list[int]()
    for number, of in enumerate(blocks):
        source = number
        if of.reuses_kv:
            source = next(i for i in reversed(found) if of.shares_kv_with(blocks[i]))
        found.append(source)
    return found


def recurrences(layers: Sequence[LayerConfig]) -> list[Recurrence]:
    """What the layers with a recurrent state have in place of attention."""
    return [layer.attention for layer in layers if isinstance(layer.attention, Recurrence)]


def representative_layers(layers: Sequence[LayerConfig]) -> list[int]:
    """The layers that launch all kernels of a model: the first, which has no layer before it, one of each other kind,
    and the last, which computes only the rows that sample."""
    return sorted({0, *(layers.index(kind) for kind in {*layers}), len(layers) - 1})


def attentions(layers: Sequence[LayerConfig]) -> list[AttentionConfig]:
    """Attention of the layers that have keys and values."""
    return [layer.attention for layer in layers if isinstance(layer.attention, AttentionConfig)]


class TensorNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of a checkpoint's tensors where families differ, behind `model.layers.N` but for those that say so."""

    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    fused_qkv: str | None = None
    """One tensor with the rows of queries, keys and values."""
    attention_output: str = "o_proj"
    embedding: str = "model.embed_tokens"
    """By its whole name."""
    attention: str = "self_attn"
    """Beginning of the names of an attention block, as the next one."""
    mamba: str = "mamba"
    attention_norm: str = "input_layernorm"
    """Norm before the attention, or what a layer has in its place."""
    attention_end_norm: str = "post_attention_layernorm"
    """Norm behind the attention."""
    feed_forward_norm: str = "post_attention_layernorm"
    """Norm before the feed-forward. Llama's name is that of the norm behind the attention where there is one."""
    feed_forward_end_norm: str = "post_feedforward_layernorm"
    """Norm behind the feed-forward."""
    last_norm: str = "model.norm"
    """Norm behind the last layer, by its whole name."""
    feed_forward: FeedForwardNames = FeedForwardNames()
    moe: MoeNames = MoeNames()
    left_out: tuple[str, ...] = ()
    """Beginnings of the whole names of tensors that are not read on purpose, such as layers that predict further
    tokens."""


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder: what the reader of a family returns."""

    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    names: TensorNames = TensorNames()
    tied_embeddings: bool
    """The output head is the embedding."""
    embedding_scale: float = 1.0
    """Factor of embeddings, rounded to the model's dtype."""
    token_inputs: TokenInputs | None = None
    logit_divisor: float = 1.0
    logit_softcap: float | None = None
    """c of c · tanh(logit / c)."""
