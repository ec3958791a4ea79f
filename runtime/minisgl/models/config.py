"""Model configuration from a Hugging Face checkpoint's config.json and generation_config.json, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from minisgl.config import Device, DType
from minisgl.json_file import read_json_object
from minisgl.layers.rope_config import RopeConfig
from minisgl.layers.weights.formats import (
    Quantization,
    read_quantization,
    refuse_modelopt,
    requested_quantization,
    unsupported_quantization,
)
from minisgl.models.errors import ModelError
from minisgl.models.fields import Fields
from minisgl.models.overrides import override
from minisgl.models.rope_fields import read_rope

Activation = Literal["silu", "gelu", "gelu_tanh"]

_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
}


_MAX_LAYERS: Final = 1024
_MAX_EXPERTS: Final = 1 << 16
"""Experts of all layers. Together with the layers they decide how many tensors a model has."""
_MAX_HEADS: Final = 1 << 14
_MAX_POSITIONS: Final = 1 << 24


class _Architecture(NamedTuple):
    """Differences between the architectures: fixed properties, and Hugging Face's defaults for missing fields."""

    qkv_bias: bool = False
    optional_bias: bool = False
    """`attention_bias` gives all four projections of the attention a bias; elsewhere the field has no effect."""
    qk_norm: bool = False
    moe: bool = False
    default_sliding_window: int | None = None
    """Default when `sliding_window` is not in the file (null in the file means no window)."""
    window_switch: bool = False
    """The window only applies when `use_sliding_window` is true."""
    window_by_layer: bool = False
    """The window only applies from layer `max_window_layers` on, or as `layer_types` lists."""


_ARCHITECTURES: Final[Mapping[str, _Architecture]] = {
    "LlamaForCausalLM": _Architecture(optional_bias=True),
    "MistralForCausalLM": _Architecture(default_sliding_window=4096),
    "Qwen2ForCausalLM": _Architecture(
        qkv_bias=True, default_sliding_window=4096, window_switch=True, window_by_layer=True
    ),
    "Qwen3ForCausalLM": _Architecture(
        optional_bias=True, qk_norm=True, default_sliding_window=4096, window_switch=True, window_by_layer=True
    ),
    "Qwen3MoeForCausalLM": _Architecture(
        optional_bias=True, qk_norm=True, moe=True, default_sliding_window=4096, window_switch=True
    ),
}


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a mixture of experts."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Intermediate size of one expert."""
    renormalize: bool
    """Normalize the weights of a token's experts to sum to 1."""
    layers: tuple[bool, ...]
    """Whether each layer has experts; else a dense feed-forward."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    activation: Activation
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Bias of the attention's output projection."""
    mlp_bias: bool
    qk_norm: bool
    """Queries and keys are RMS-normalized per head before RoPE."""
    max_position_embeddings: int
    rope: RopeConfig
    dtype: Literal["float32", "bfloat16", "float16"]
    """Element type of the checkpoint; bfloat16 if config.json names none."""
    eos_token_ids: tuple[int, ...]
    """All tokens that end an answer: those of generation_config.json, then those of config.json."""
    sliding_window: int | None = None
    """Every layer attends to this many last tokens only, a token itself included."""
    partial_window: int | None = None
    """Only some layers have a window, of this many tokens. That is not supported beyond the window."""
    dual_chunk_after: int | None = None
    """Tokens up to which attention is plain; longer sequences need dual chunk attention, which is not supported."""
    moe: MoeConfig | None = None
    quantization: Quantization | None = None
    """Quantization of the checkpoint's weights."""

    def dtype_on(self, device: Device, choice: DType = "auto") -> Literal["float32", "bfloat16", "float16"]:
        """Data type of weights and KV cache. `auto` is the checkpoint's, but float32 on a CPU, and on a GPU bfloat16
        for float32, which would take twice the memory and has no fast attention, and for quantized weights, whose
        kernels compute in it: AWQ and GPTQ checkpoints are usually float16."""
        if choice != "auto":
            return choice
        if device == "cpu":
            return "float32"
        return "bfloat16" if self.dtype == "float32" or self.quantization is not None else self.dtype

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens that the position embedding supports."""
        # Qwen's instructions add yarn to config.json and leave max_position_embeddings at the pre-training length.
        if self.rope.kind == "yarn":
            return max(self.max_position_embeddings, int(self.rope.factor * self.rope.original_max_position))
        return self.max_position_embeddings

    def check_length(self, max_model_len: int) -> None:
        """Raise ModelError if sequences of `max_model_len` tokens need attention that is not supported."""
        if self.partial_window is not None and max_model_len > self.partial_window:
            raise ModelError(
                "sliding_window",
                f"some layers of the model attend to the last {self.partial_window} tokens only and others to all, "
                f"which is not supported for longer sequences; start with --max-model-len {self.partial_window} or "
                f"less (it is {max_model_len})",
            )
        if self.dual_chunk_after is not None and max_model_len > self.dual_chunk_after:
            raise ModelError(
                "dual_chunk_attention",
                f"sequences of more than {self.dual_chunk_after} tokens need the model's dual chunk attention, which "
                f"is not supported; start with --max-model-len {self.dual_chunk_after} or less (it is {max_model_len})",
            )

    def check_tensor_parallel(self, size: int) -> None:
        """Raise ModelError if the model cannot be split over `size` ranks; the message lists sizes that fit."""
        if not self._splits(size):
            feed_forward = " and ".join(map(str, self._feed_forward_sizes()))
            raise ModelError(
                "tensor_does_not_divide",
                f"{self.num_heads} attention heads, {self.num_kv_heads} KV heads and feed-forward size {feed_forward} "
                f"cannot be split over {size} ranks; use --tp with one of "
                + ", ".join(map(str, self.tensor_parallel_sizes())),
            )

    def tensor_parallel_sizes(self) -> list[int]:
        """Tensor-parallel sizes that the model can be split over, ascending."""
        return [size for size in range(1, self.num_heads + 1) if self._splits(size)]

    def _splits(self, size: int) -> bool:
        kv_split = self.num_kv_heads % size == 0 or size % self.num_kv_heads == 0
        feed_forward = math.gcd(*self._feed_forward_sizes())
        return self.num_heads % size == 0 and kv_split and feed_forward % size == 0

    def _feed_forward_sizes(self) -> list[int]:
        if self.moe is None:
            return [self.intermediate_size]
        sizes = [self.moe.intermediate_size]
        return sizes if all(self.moe.layers) else [*sizes, self.intermediate_size]

    @staticmethod
    def read(
        directory: str | Path, overrides: Mapping[str, Any] | None = None, quantization: str | None = None
    ) -> ModelConfig:
        """Read a checkpoint directory. `overrides`: changes of config.json, see `overrides.override`; `quantization`:
        format in which to quantize the weights. Raises ModelError with the problem and the remedy."""
        folder = Path(directory)
        if not folder.is_dir():
            raise ModelError("model_not_found", f"{folder} is not a directory; give that of a downloaded checkpoint")
        if not (folder / "config.json").is_file():
            if any(folder.glob("*.gguf")):
                raise unsupported_quantization("GGUF")
            raise ModelError(
                "config_not_found",
                f"{folder} has no config.json; give the directory of a Hugging Face checkpoint, the one that holds "
                "config.json and *.safetensors",
            )
        config = read_json(folder / "config.json")
        modelopt = folder / "hf_quant_config.json"
        if config.get("quantization_config") is None and modelopt.is_file():
            refuse_modelopt(read_json(modelopt))
        generation = folder / "generation_config.json"
        settings = read_json(generation) if generation.is_file() else None
        try:
            parsed = ModelConfig.parse(config, settings, overrides, quantization)
            longest = parsed.max_model_len
        except ArithmeticError as error:
            raise ModelError(
                "invalid_config", f"config.json: its numbers are out of range ({error}); download the file again"
            ) from error
        if longest > _MAX_POSITIONS:
            raise ModelError(
                "invalid_config", f"config.json: sequences of {longest} tokens; at most {_MAX_POSITIONS} are supported"
            )
        return parsed

    @staticmethod
    def parse(
        config: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
        quantization: str | None = None,
    ) -> ModelConfig:
        """Parse the contents of config.json, with `overrides`, and generation_config.json. `quantization`: format in
        which to quantize the weights, see `requested_quantization`."""
        if overrides:
            config = override(config, overrides)
        name, architecture = _architecture(config)
        stored = read_quantization(config)
        if quantization is not None:
            stored = requested_quantization(quantization, stored)
        fields = Fields(config)
        hidden = fields.count("hidden_size")
        heads = fields.count("num_attention_heads", most=_MAX_HEADS)
        kv_heads = fields.count("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise ModelError(
                "invalid_config", f"config.json: {heads} attention heads are not a multiple of {kv_heads} KV heads"
            )
        layers = fields.count("num_hidden_layers", most=_MAX_LAYERS)
        max_position = fields.count("max_position_embeddings", most=_MAX_POSITIONS)
        attention_bias = fields.flag("attention_bias") and architecture.optional_bias
        window, every_layer = _sliding_window(config, architecture, layers)
        head_dim = fields.count("head_dim", default=128 if name == "Qwen3ForCausalLM" else hidden // heads)
        if head_dim % 2:
            raise ModelError("invalid_config", f"config.json: head_dim {head_dim} is odd, RoPE rotates pairs")
        return ModelConfig(
            architecture=name,
            hidden_size=hidden,
            intermediate_size=fields.count("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=fields.count("vocab_size"),
            rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
            activation=_activation(config),
            tied_embeddings=fields.flag("tie_word_embeddings"),
            qkv_bias=architecture.qkv_bias or attention_bias,
            output_bias=attention_bias,
            mlp_bias=fields.flag("mlp_bias") and name == "LlamaForCausalLM",
            qk_norm=architecture.qk_norm,
            max_position_embeddings=max_position,
            rope=read_rope(config, max_position),
            dtype=_dtype(config),
            eos_token_ids=_eos_token_ids(generation or {}, config),
            sliding_window=window if every_layer else None,
            partial_window=None if every_layer else window,
            dual_chunk_after=_dual_chunk_after(config),
            moe=_moe(fields, layers) if architecture.moe else None,
            quantization=stored,
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ModelError when the file is not one."""
    try:
        return read_json_object(path)
    except (ValueError, OSError) as error:
        raise ModelError("malformed_json", f"{path} cannot be read: {error}; download the file again") from error


def _architecture(config: Mapping[str, Any]) -> tuple[str, _Architecture]:
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise ModelError("invalid_config", f"config.json: architectures is {names!r:.80}, not a list of names")
    for name in names:
        if isinstance(name, str) and name in _ARCHITECTURES:
            return name, _ARCHITECTURES[name]
    raise ModelError(
        "unsupported_architecture",
        f"architecture {', '.join(map(str, names[:10])) or '(none given)':.500} is not supported; supported are "
        + ", ".join(_ARCHITECTURES),
    )


def _activation(config: Mapping[str, Any]) -> Activation:
    name = config.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelError(
            "unsupported_activation", f"config.json: hidden_act {name!r:.80} is not one of {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _dtype(config: Mapping[str, Any]) -> Literal["float32", "bfloat16", "float16"]:
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    match str(name).removeprefix("torch."):
        case "float32":
            return "float32"
        case "bfloat16":
            return "bfloat16"
        case "float16":
            return "float16"
    raise ModelError("unsupported_dtype", f"config.json: dtype {name!r:.80} is not one of float32, bfloat16, float16")


def _eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for config in configs:
        value = config.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and not isinstance(token, bool) and abs(token) < 2**31:
                ids[token] = None
            elif token is not None:
                raise ModelError(
                    "invalid_config", f"eos_token_id {value!r:.80} is neither a token id nor a list of them"
                )
    return tuple(ids)


def _sliding_window(config: Mapping[str, Any], architecture: _Architecture, layers: int) -> tuple[int | None, bool]:
    """The window, None if no layer has one, and whether every layer has it."""
    window = config.get("sliding_window", architecture.default_sliding_window)
    if window is None or architecture.default_sliding_window is None:
        return None, True
    if not isinstance(window, int) or window < 1:
        raise ModelError(
            "invalid_config", f"config.json: sliding_window is {window!r:.80}, not a positive integer or null"
        )
    if architecture.window_switch and not Fields(config).flag("use_sliding_window"):
        return None, True
    if not architecture.window_by_layer:
        return window, True
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise ModelError("invalid_config", f"config.json: max_window_layers is {first!r:.80}, not an integer")
        windowed = [layer >= first for layer in range(layers)]
    else:
        if not isinstance(types, list) or len(types) != layers:
            raise ModelError(
                "invalid_config", f"config.json: layer_types is {types!r:.80}, not a list of {layers} types"
            )
        windowed = [kind == "sliding_attention" for kind in types]
    return window if any(windowed) else None, all(windowed)


def _dual_chunk_after(config: Mapping[str, Any]) -> int | None:
    """Length of the model's plain pre-training, behind which it needs dual chunk attention; None: it never does."""
    parameters = config.get("dual_chunk_attention_config")
    if parameters is None:
        return None
    if not isinstance(parameters, dict):
        raise ModelError(
            "invalid_config", f"config.json: dual_chunk_attention_config is {parameters!r:.80}, not an object or null"
        )
    fields = Fields(parameters)
    original = "original_max_position_embeddings"
    return fields.count("chunk_size" if parameters.get(original) is None else original)


def _moe(fields: Fields, layers: int) -> MoeConfig:
    every = fields.count("decoder_sparse_step", default=1)
    dense = frozenset(fields.layers("mlp_only_layers"))
    # transformers 5 writes the second name.
    experts = fields.count("num_experts", default=fields.count("num_local_experts", default=128))
    if experts * layers > _MAX_EXPERTS:
        raise ModelError(
            "invalid_config",
            f"config.json: {experts} experts in each of {layers} layers; at most {_MAX_EXPERTS} in all are supported",
        )
    chosen = fields.count("num_experts_per_tok", default=8)
    if chosen > experts:
        raise ModelError("invalid_config", f"config.json: {chosen} experts per token of only {experts}")
    return MoeConfig(
        num_experts=experts,
        experts_per_token=chosen,
        intermediate_size=fields.count("moe_intermediate_size", default=768),
        renormalize=fields.flag("norm_topk_prob"),
        layers=tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(layers)),
    )
