"""The decoder-only transformer that all supported models are cases of."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from minisgl.attention.interface import Attention
from minisgl.attention.recurrent import RecurrentStates
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.layers.rotary import Rotary
from minisgl.layers.vocabulary import LMHead, VocabParallelEmbedding, VocabularyShard
from minisgl.layers.weights.parameters import Parameters
from minisgl.models.blocks.experts import FeedForwardBesideExperts, SparseFeedForward
from minisgl.models.blocks.feed_forward import FeedForward
from minisgl.models.blocks.gated_delta import GatedDeltaNet
from minisgl.models.blocks.mamba2 import Mamba2
from minisgl.models.blocks.norms import BlockEnd, norm_of
from minisgl.models.blocks.self_attention import Angles, SelfAttention, length_of, local_kv_heads
from minisgl.models.blocks.short_convolution import ShortConvolution
from minisgl.models.blocks.token_inputs import TokenInput, TokenInputTable
from minisgl.models.config import ModelConfig
from minisgl.models.decoder_config import GatedDeltaConfig, Mamba2Config, MoeConfig, ShortConvolutionConfig


class DecoderLayer:
    """Attention and feed-forward. Each adds the output of the previous block to the residual stream, and begins with
    the sum."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, parameters: Parameters, layer: int) -> None:
        of = config.layers[layer]
        self.mixer: SelfAttention | GatedDeltaNet | Mamba2 | ShortConvolution | None
        match of.attention:
            case GatedDeltaConfig():
                self.mixer = GatedDeltaNet(config, parallel, parameters, layer)
            case Mamba2Config():
                self.mixer = Mamba2(config, parallel, parameters, layer)
            case ShortConvolutionConfig():
                self.mixer = ShortConvolution(config, parallel, parameters, layer)
            case None:
                self.mixer = None
            case _:
                self.mixer = SelfAttention(config, parallel, parameters, layer)
        names = config.decoder.names
        self.attention_end = BlockEnd(config, parameters, layer, names.attention_end_norm)
        self.feed_forward: FeedForward | SparseFeedForward | FeedForwardBesideExperts | None
        if of.feed_forward is None:
            self.feed_forward = None
        elif of.experts_beside is not None:
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

    @property
    def attention(self) -> SelfAttention:
        """That of a layer with keys and values."""
        assert isinstance(self.mixer, SelfAttention)
        return self.mixer

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        angles: Angles,
        attention: Attention,
        rows: torch.Tensor | None = None,
        token_inputs: torch.Tensor | None = None,
        states: RecurrentStates | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`rows`: compute only these behind the attention; nothing reads the others. `token_inputs`: [T, layers, size],
        and `states`, if the model has some."""
        stream = residual
        if isinstance(self.mixer, SelfAttention):
            x, stream = self.mixer.forward(x, residual, angles, attention, rows)
        elif self.mixer is not None:
            assert states is not None
            x, stream = self.mixer.forward(x, residual, states, rows)
        if self.mixer is not None:
            x = self.attention_end.forward(x)
        # A chunk in the middle of a prompt leaves no rows.
        if stream is not None and not len(stream):
            return x, stream
        if self.feed_forward is not None:
            x, stream = self.feed_forward.forward(x, stream)
            x = self.feed_forward_end.forward(x)
        if self.token_input is None and self.stream_scale is None:
            return x, stream
        assert stream is not None
        x = x + stream
        if self.token_input is not None:
            assert token_inputs is not None
            x = self.token_input.forward(x, token_inputs if rows is None else token_inputs[rows])
        return x if self.stream_scale is None else x * self.stream_scale, None


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
        self.num_kv_heads_local = length_of(local_kv_heads(config.attention, parallel))
        """KV heads on this rank, which its KV pool stores per layer and token."""

        self.embedding = VocabParallelEmbedding(
            self.parameters, config.decoder.names.embedding, config.hidden_size, shard, parallel
        )
        length = max_position or config.max_model_len
        blocks = config.attentions
        kinds = {(of.rope, of.head_dim): None for of in blocks}
        # Rotated queries and keys whose norm follows are stored as they are.
        kinds |= {(None, of.head_dim): None for of in blocks if of.norm_after_rotation}
        self.rotary = {(rope, size): Rotary(rope, size, length, device) for rope, size in kinds}
        self.token_inputs = None
        if config.decoder.token_inputs is not None:
            self.token_inputs = TokenInputTable(config, config.decoder.token_inputs, self.parameters, parallel, dtype)
        self.layers = [DecoderLayer(config, parallel, self.parameters, i) for i in range(config.num_layers)]
        family = config.decoder
        self.norm = norm_of(config, self.parameters, family.names.last_norm)
        self.head = None
        if has_lm_head:
            head = self.embedding.weight
            if not family.tied_embeddings:
                head = shard.new_weight(self.parameters, "lm_head", config.hidden_size)
            self.head = LMHead(head, shard, family.logit_divisor, family.logit_softcap)
        self._embedding_scale = torch.tensor(family.embedding_scale, dtype=dtype).item()
        self.tapped: tuple[int, ...] = ()
        """Layers behind which `forward` keeps the hidden states of all tokens; −1: before the first."""

    def with_layers(self, layers: Sequence[int]) -> Decoder:
        """A model with only these layers. It shares their parameters."""
        model = copy.copy(self)
        model.layers = [self.layers[layer] for layer in layers]
        # Others are not there; it is only a question of shapes.
        model.tapped = (-1,) * len(self.tapped)
        return model

    @property
    def parameter_bytes(self) -> int:
        """Bytes of this rank's parameters."""
        return self.parameters.num_bytes

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        rows: torch.Tensor | None = None,
        states: RecurrentStates | None = None,
        kept_states: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """tokens and positions [T] int32 or int64 to final hidden states in the model's dtype: [T, hidden], or only
        `rows` [S], [S, hidden]. For other rows the last layer with attention only writes keys and values, and no layer
        behind it does anything. `states`: of a model with recurrent states. `kept_states`: gets the hidden states
        [T, hidden] behind each of the layers `tapped`, which are in ascending order before the last one."""
        x = self.embedding.forward(tokens)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        angles = Angles(self.rotary, positions)
        inputs = None if self.token_inputs is None else self.token_inputs.forward(tokens, x)
        residual = None
        if kept_states is not None:
            kept_states += [x] * self.tapped.count(-1)
        last = max(number for number, layer in enumerate(self.layers) if layer.mixer is not None)
        for number, layer in enumerate(self.layers):
            kept = rows if number == last else None
            x, residual = layer.forward(x, residual, angles, attention, kept, inputs, states)
            if kept_states is not None and number in self.tapped:
                kept_states.append(_stream(x, residual))
        x, _ = self.norm.forward(x, residual)
        return x

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result [S, hidden] to [S, vocab_local]: the logits of this rank's shard, in the model's
        dtype. Concatenated over the ranks and cut to `config.vocab_size`, they are the logits of the model."""
        assert self.head is not None
        return self.head.forward(hidden)


def _stream(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """The residual stream behind a layer [T, hidden], a copy. `x` may be partial sums."""
    if x.dim() == 3:
        x = x.sum(0)
    return x.clone() if residual is None else (x + residual).to(residual.dtype)
