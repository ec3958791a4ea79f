"""Draft heads: small models that draft the next tokens of another one, their target, from its hidden states.

DFlash (arXiv:2602.06036): a few layers of Qwen3's kind compute a whole block of tokens at once. The first token of the
block is the last known one; the others are masks, each of which becomes the draft of the token in its place. All tokens
of a block attend to each other, and to the context before the block. Keys and values of the context are projections of
hidden states of some layers of the target, at the same positions. Embedding and output head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from minisgl.attention.interface import Attention
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.errors import ModelError
from minisgl.kernels.attention.rotary import rotate_queries
from minisgl.kernels.attention.rotation import Rotation
from minisgl.layers.rotary import Rotary
from minisgl.layers.weights.allocate import allocate
from minisgl.layers.weights.dense import DenseWeight
from minisgl.layers.weights.parameters import Parameters
from minisgl.layers.weights.weight import Projection
from minisgl.models.blocks.norms import norm_of
from minisgl.models.blocks.self_attention import Angles
from minisgl.models.config import ModelConfig, read_json
from minisgl.models.decoder import Decoder, DecoderLayer
from minisgl.models.decoder_config import AttentionConfig
from minisgl.models.fields import Fields

ARCHITECTURE: Final = "DFlashDraftModel"
_FIELDS: Final = frozenset({"block_size", "mask_token_id", "target_layer_ids"})


class DrafterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A draft head."""

    model: ModelConfig
    """Its layers."""
    block_size: int
    """Tokens of a block, the first of which is known."""
    mask_token: int
    target_layers: tuple[int, ...]
    """Layers of the target behind which hidden states are taken."""
    num_target_layers: int | None
    """Layers that the target must have; None: the file does not say."""

    @property
    def attention(self) -> AttentionConfig:
        """That of each layer."""
        return self.model.attention

    @staticmethod
    def read(directory: str | Path) -> DrafterConfig:
        """Read config.json of a checkpoint. Raises ModelError with the problem and the remedy."""
        file = Path(directory) / "config.json"
        if not file.is_file():
            raise ModelError(
                "config_not_found", f"--draft-model: {directory} has no config.json; give the directory of a draft head"
            )
        return DrafterConfig.parse(read_json(file))

    @staticmethod
    def parse(config: Mapping[str, Any]) -> DrafterConfig:
        """Parse the contents of config.json."""
        names = config.get("architectures")
        if not isinstance(names, list) or ARCHITECTURE not in names:
            found = ", ".join(map(str, names)) if isinstance(names, list) else str(names)
            raise _unsupported(f"its architecture is {found:.100}; supported is {ARCHITECTURE}")
        special = config.get("dflash_config")
        if not isinstance(special, dict):
            raise ModelError("invalid_config", f"config.json: dflash_config is {special!r:.80}, not an object")
        if unknown := sorted(name for name, value in special.items() if value and name not in _FIELDS):
            raise _unsupported(f"its dflash_config has {', '.join(map(str, unknown)):.200}")
        if "sliding_attention" in (config.get("layer_types") or ()):
            raise _unsupported("some of its layers have a sliding window")
        if config.get("is_causal"):
            raise _unsupported("tokens of a block do not attend to later ones")
        plain = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False, "layer_types": None}
        model = ModelConfig.parse({**config, **plain})
        if model.quantization is not None:
            raise _unsupported("its weights are quantized")
        fields = Fields({**config, **special})
        layers = fields.raw("target_layer_ids", None)
        if not isinstance(layers, list) or not layers or not all(type(each) is int and each >= 0 for each in layers):
            raise ModelError("invalid_config", f"config.json: target_layer_ids is {layers!r:.80}, not a list of layers")
        if layers != sorted({*layers}):
            raise _unsupported("its target_layer_ids are not in ascending order")
        stated = config.get("num_target_layers")
        return DrafterConfig(
            model=model,
            block_size=fields.count("block_size", most=64),
            mask_token=fields.count("mask_token_id", may_be_zero=True),
            target_layers=tuple(layers),
            num_target_layers=None if stated is None else fields.count("num_target_layers"),
        )

    def check_target(self, target: ModelConfig) -> None:
        """Raise ModelError if the head was not made for this target."""
        own = self.model
        for what, found, wanted in (
            ("hidden size", target.hidden_size, own.hidden_size),
            ("vocabulary", target.vocab_size, own.vocab_size),
            ("number of layers", target.num_layers, self.num_target_layers),
        ):
            if wanted is not None and found != wanted:
                raise _mismatch(f"its target has a {what} of {wanted}, that of the model is {found}")
        # The hidden states behind the last layer are not kept for all tokens.
        if max(self.target_layers) >= target.num_layers - 1:
            listed = ", ".join(map(str, self.target_layers))
            raise _mismatch(f"it reads layers {listed} of its target, and the model has {target.num_layers}")
        if self.mask_token >= target.vocab_size:
            raise _mismatch(f"its mask_token_id is {self.mask_token}, beyond the vocabulary of {target.vocab_size}")


def _unsupported(reason: str) -> ModelError:
    return ModelError("draft_model_unsupported", f"the draft model is not supported: {reason}; use another one")


def _mismatch(reason: str) -> ModelError:
    return ModelError(
        "draft_model_mismatch", f"the draft model is not one of this model: {reason}; use one that was made for it"
    )


class Drafter:
    """A draft head on one rank. `load_weights` or `fill_random` fill its parameters."""

    def __init__(
        self,
        config: DrafterConfig,
        parallel: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str,
        max_position: int,
    ) -> None:
        """`max_position`: upper bound of known positions."""
        self.config = config
        model, of = config.model, config.attention
        self.parameters = parameters = Parameters(dtype, torch.device(device))
        hidden = model.hidden_size
        whole = slice(0, hidden)
        self._combine = allocate(parameters, [Projection("fc", hidden, whole)], len(config.target_layers) * hidden)
        self._context_norm = norm_of(model, parameters, "hidden_norm")
        self._layers = [DecoderLayer(model, parallel, parameters, layer) for layer in range(model.num_layers)]
        self._norm = norm_of(model, parameters, "norm")
        # Layers name their tensors as those of a whole model.
        parameters.sources[:] = [
            replace(source, name=source.name.removeprefix("model.")) for source in parameters.sources
        ]
        self._rotary = {
            (of.rope, of.head_dim): Rotary(of.rope, of.head_dim, max_position + config.block_size, parameters.device)
        }

    @staticmethod
    def of_headers(config: DrafterConfig, parallel: TensorParallel) -> Drafter:
        """A head without memory for its weights, of which only names and shapes are wanted."""
        return Drafter(config, parallel, torch.bfloat16, "meta", 1)

    def context(
        self, states: Sequence[torch.Tensor], positions: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [T, Hkv, D] of each layer for a context whose `states` [T, hidden] are those behind each of
        the target's layers."""
        of, kind = self.config.attention, self.config.model.decoder.norm
        mixed = self._combine.product(torch.cat(list(states), dim=-1))
        normed, _ = self._context_norm.forward(mixed, None)
        cos_sin = Angles(self._rotary, positions).of(of.rope, of.head_dim)
        found = []
        for layer in self._layers:
            attention = layer.attention
            weight = attention.qkv.weight
            assert isinstance(weight, DenseWeight), "weights of draft heads are not quantized"
            # Queries, of which a context has none, come first.
            begin = of.num_heads * of.head_dim
            bias = None if attention.qkv.bias is None else attention.qkv.bias[begin:]
            both = DenseWeight(weight.values[begin:]).product(normed, bias).unflatten(1, (2, -1, of.head_dim))
            gain = attention.k_norm
            rotation = Rotation(cos_sin, gain, gain, kind.eps, kind.unit_offset, kind.round_last)
            found.append((rotate_queries(both[:, 0], rotation), both[:, 1]))
        return found

    def hidden(
        self, target: Decoder, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Final hidden states [R, B, hidden] of the blocks that begin with the known `tokens` [R] at `positions` [R].
        `attention` lets blocks attend to themselves and their contexts."""
        size = self.config.block_size
        block = tokens.new_full((len(tokens), size), self.config.mask_token)
        block[:, 0] = tokens
        places = positions[:, None] + torch.arange(size, dtype=positions.dtype, device=positions.device)
        angles = Angles(self._rotary, places.flatten())
        x, residual = target.embedding.forward(block.flatten()), None
        for layer in self._layers:
            x, residual = layer.forward(x, residual, angles, attention)
        x, _ = self._norm.forward(x, residual)
        return x.view(len(tokens), size, -1)
