"""Models from their configuration, encoders and decoders."""

from __future__ import annotations

from typing import Literal

import torch

from minisgl.attention.packed import PackedAttention
from minisgl.attention.packed_shape import PackedShape
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.layers.weights.parameters import Parameters
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.decoder_config import kv_layers
from minisgl.models.encoder import Encoder
from minisgl.models.pooler import Pooler
from minisgl.models.pooling_config import PoolingConfig


def build_pooled(
    config: ModelConfig,
    pooling: PoolingConfig,
    parallel: TensorParallel,
    dtype: torch.dtype,
    device: torch.device | str,
    max_position: int | None = None,
    *,
    keep_quantized: bool | None = None,
) -> tuple[Decoder | Encoder, Pooler]:
    """A model that does not generate, without an output head, and its pooling; `load_weights` of the model's parameters
    fills both. Arguments as those of `Decoder`. Raises ModelError if the model cannot be split over the ranks."""
    model: Decoder | Encoder
    if config.encoder is not None:
        model = Encoder(config, parallel, dtype, device, max_position, keep_quantized=keep_quantized)
    else:
        model = Decoder(config, parallel, dtype, device, max_position, keep_quantized=keep_quantized, has_lm_head=False)
    return model, Pooler(pooling, config, model.parameters)


def packed_attention(
    config: ModelConfig, parallel: TensorParallel, dtype: torch.dtype, device: torch.device
) -> PackedAttention:
    """Attention over whole texts, for encoders and decoders."""
    shapes = [
        PackedShape(
            query_heads=of.num_heads // parallel.size,
            kv_heads=max(of.num_kv_heads // parallel.size, 1),
            head_dim=of.head_dim,
            scale=of.scale,
            causal=of.causal,
            window=of.window,
            softcap=of.softcap,
            sinks=of.sinks,
        )
        for of in config.attentions
    ]
    sources = list(range(config.num_layers)) if config.encoder is not None else kv_layers(config.layers)
    return PackedAttention(shapes, sources, dtype, device)


def checkpoint_parameters(
    config: ModelConfig,
    pooling: PoolingConfig | None = None,
    *,
    keep_quantized: bool = False,
    ranks: int = 1,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
) -> Parameters:
    """Parameters of a whole model, or of the first of several `ranks`, on the meta device: names and shapes of a
    checkpoint's tensors, without memory. `pooling`: the model does not generate. `keep_quantized`: as on a Hopper GPU;
    else as on others."""
    parallel = TensorParallel()
    # A group without other members, as nothing is computed.
    parallel.size = ranks
    made = getattr(torch, dtype)
    if pooling is not None:
        model, _ = build_pooled(config, pooling, parallel, made, "meta", max_position=1, keep_quantized=keep_quantized)
        return model.parameters
    return Decoder(config, parallel, made, "meta", max_position=1, keep_quantized=keep_quantized).parameters
