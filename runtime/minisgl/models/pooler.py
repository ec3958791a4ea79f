"""From hidden states of texts to embeddings or scores, in float32 (arXiv:1908.10084, 1901.04085)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
import torch.nn.functional as F

from minisgl.layers.weights.parameters import Parameters
from minisgl.models.config import ModelConfig
from minisgl.models.pooling_config import DenseActivation, DenseConfig, HeadConfig, PoolingConfig

_ACTIVATIONS: Final[Mapping[DenseActivation, Callable[[torch.Tensor], torch.Tensor]]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


class Pooler:
    """Pooling and what is behind it, the same on every rank. `load_weights` or `fill_random` fill its parameters, which
    are some of the model's. Neither method waits for the device, and shapes follow from T and S alone."""

    def __init__(self, config: PoolingConfig, model: ModelConfig, parameters: Parameters) -> None:
        self.config = config
        self._dense = [_Dense(of, parameters) for of in config.dense]
        self._head: _Head | _LabelTokens | None = None
        if config.head is not None:
            self._head = _Head(config.head, model.hidden_size, config.output_size, parameters)
        elif config.label_tokens:
            self._head = _LabelTokens(config.label_tokens, model, parameters)

    def take(self, hidden: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Pool the hidden states [T, hidden] of S texts, one after the other, of which text i begins at token
        `offsets[i]` and ends before `offsets[i + 1]` [S + 1]. Returns [S, hidden], a mean in float32; rows of empty
        texts behind the others mean nothing."""
        match self.config.method:
            case "first":
                return hidden.index_select(0, offsets[:-1].clamp(max=len(hidden) - 1))
            case "last":
                return hidden.index_select(0, offsets[1:] - 1)
            case "mean":
                # `unsafe` leaves out checks that wait for the device.
                return torch.segment_reduce(hidden.float(), "mean", offsets=offsets.long(), axis=0, unsafe=True)

    def output(self, rows: torch.Tensor) -> torch.Tensor:
        """Pooled hidden states [S, hidden] to outputs [S, output_size] in float32."""
        x = rows.float()
        for layer in self._dense:
            x = layer.forward(x)
        if self._head is not None:
            x = self._head.forward(x)
        match self.config.activation:
            case "sigmoid":
                x = torch.sigmoid(x)
            case "softmax":
                x = torch.softmax(x, dim=-1)
        return F.normalize(x, dim=-1) if self.config.normalize else x


class _Dense:
    def __init__(self, of: DenseConfig, parameters: Parameters) -> None:
        name = f"{of.folder}/linear"
        self.weight, self.bias = _linear(parameters, name, of.in_features, of.out_features, bias=of.bias)
        self._activation = _ACTIVATIONS[of.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._activation(F.linear(x, self.weight, self.bias))


class _Head:
    def __init__(self, of: HeadConfig, hidden: int, labels: int, parameters: Parameters) -> None:
        self._of, self._hidden = of, hidden
        self.dense = self.norm = None
        if of.dense is not None:
            self.dense = _linear(parameters, of.dense, hidden, hidden, bias=of.dense_bias)
        if of.norm is not None:
            gain = parameters.replicated(f"{of.norm}.weight", hidden, dtype=torch.float32)
            bias = parameters.replicated(f"{of.norm}.bias", hidden, dtype=torch.float32) if of.norm_bias else None
            self.norm = gain, bias
        self.output = _linear(parameters, of.output, hidden, labels, bias=of.output_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.dense is not None:
            x = _ACTIVATIONS[self._of.activation](F.linear(x, *self.dense))
        if self.norm is not None:
            x = F.layer_norm(x, (self._hidden,), *self.norm, self._of.norm_eps)
        return F.linear(x, *self.output)


class _LabelTokens:
    """Logit of a token, less that of another one."""

    def __init__(self, tokens: tuple[int, ...], model: ModelConfig, parameters: Parameters) -> None:
        self._decoder = model.decoder
        name = model.decoder.names.embedding if model.decoder.tied_embeddings else "lm_head"
        self.weight = parameters.new(len(tokens), model.hidden_size, dtype=torch.float32)
        for row, token in enumerate(tokens):
            into, shape = self.weight[row : row + 1], (model.vocab_size, model.hidden_size)
            parameters.add_source(f"{name}.weight", shape, into, slice(token, token + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = F.linear(x, self.weight) / self._decoder.logit_divisor
        if (cap := self._decoder.logit_softcap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits[:, :1] - logits[:, 1:].sum(-1, keepdim=True)


def _linear(
    parameters: Parameters, name: str, in_features: int, out_features: int, *, bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias in float32."""
    weight = parameters.replicated(f"{name}.weight", out_features, in_features, dtype=torch.float32)
    return weight, parameters.replicated(f"{name}.bias", out_features, dtype=torch.float32) if bias else None
