"""Model configuration from a Hugging Face checkpoint's config.json and generation_config.json, without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from minisgl.layers.rope_config import RopeConfig
from minisgl.models.errors import ModelError

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
    moe: MoeConfig | None = None

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
    def read(directory: str | Path) -> ModelConfig:
        """Read a checkpoint directory. Raises ModelError with the problem and the remedy."""
        folder = Path(directory)
        if not folder.is_dir():
            raise ModelError("model_not_found", f"{folder} is not a directory; give that of a downloaded checkpoint")
        if not (folder / "config.json").is_file():
            raise ModelError(
                "config_not_found",
                f"{folder} has no config.json; give the directory of a Hugging Face checkpoint, the one that holds "
                "config.json and *.safetensors",
            )
        generation = folder / "generation_config.json"
        return ModelConfig.parse(
            read_json(folder / "config.json"), read_json(generation) if generation.is_file() else None
        )

    @staticmethod
    def parse(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Parse the contents of config.json and generation_config.json."""
        name, architecture = _architecture(config)
        _refuse_quantized(config)
        fields = _Fields(config)
        hidden = fields.count("hidden_size")
        heads = fields.count("num_attention_heads")
        kv_heads = fields.count("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise ModelError(
                "invalid_config", f"config.json: {heads} attention heads are not a multiple of {kv_heads} KV heads"
            )
        layers = fields.count("num_hidden_layers")
        max_position = fields.count("max_position_embeddings")
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
            rope=_rope(config, max_position),
            dtype=_dtype(config),
            eos_token_ids=_eos_token_ids(generation or {}, config),
            sliding_window=window if every_layer else None,
            partial_window=None if every_layer else window,
            moe=_moe(fields, layers) if architecture.moe else None,
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ModelError when the file is not one."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise ModelError("malformed_json", f"{path} cannot be read: {error}; download the file again") from error
    if not isinstance(content, dict):
        raise ModelError("malformed_json", f"{path} does not hold a JSON object; download the file again")
    return content


class _Fields:
    """Typed access to config.json: a missing or mistyped field is an error that names it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def count(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError("invalid_config", f"config.json: {name} is {value!r}, not a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError("invalid_config", f"config.json: {name} is {value!r}, not a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ModelError("invalid_config", f"config.json: {name} is {value!r}, not true or false")
        return value

    def layers(self, name: str) -> list[int]:
        value = self._get(name, ())
        if not isinstance(value, list | tuple) or not all(isinstance(v, int) for v in value):
            raise ModelError("invalid_config", f"config.json: {name} is {value!r}, not a list of layer numbers")
        return list(value)

    def _get(self, name: str, default: object) -> Any:
        value = self._config.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError("invalid_config", f"config.json has no {name}")
        return value


def _architecture(config: Mapping[str, Any]) -> tuple[str, _Architecture]:
    names = config.get("architectures") or []
    for name in names:
        if name in _ARCHITECTURES:
            return name, _ARCHITECTURES[name]
    raise ModelError(
        "unsupported_architecture",
        f"architecture {', '.join(map(str, names)) or '(none given)'} is not supported; supported are "
        + ", ".join(_ARCHITECTURES),
    )


def _refuse_quantized(config: Mapping[str, Any]) -> None:
    for key in ("quantization_config", "compression_config"):
        if (quantization := config.get(key)) is not None:
            method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
            raise ModelError(
                "quantized_checkpoint",
                f"the checkpoint is quantized ({method}), which is not supported; use the model's float16 or "
                "bfloat16 checkpoint",
            )


def _activation(config: Mapping[str, Any]) -> Activation:
    name = config.get("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise ModelError(
            "unsupported_activation", f"config.json: hidden_act {name!r} is not one of {', '.join(_ACTIVATIONS)}"
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
    raise ModelError("unsupported_dtype", f"config.json: dtype {name!r} is not one of float32, bfloat16, float16")


def _eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for config in configs:
        value = config.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int):
                ids[token] = None
            elif token is not None:
                raise ModelError("invalid_config", f"eos_token_id {value!r} is neither an integer nor a list of them")
    return tuple(ids)


def _sliding_window(
    config: Mapping[str, Any], architecture: _Architecture, layers: int
) -> tuple[int | None, bool]:
    """The window, None if no layer has one, and whether every layer has it."""
    window = config.get("sliding_window", architecture.default_sliding_window)
    if window is None or architecture.default_sliding_window is None:
        return None, True
    if not isinstance(window, int) or window < 1:
        raise ModelError("invalid_config", f"config.json: sliding_window is {window!r}, not a positive integer or null")
    if architecture.window_switch and not config.get("use_sliding_window", False):
        return None, True
    if not architecture.window_by_layer:
        return window, True
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise ModelError("invalid_config", f"config.json: max_window_layers is {first!r}, not an integer")
        windowed = [layer >= first for layer in range(layers)]
    else:
        windowed = [kind == "sliding_attention" for kind in types]
    return window if any(windowed) else None, all(windowed)


def _moe(fields: _Fields, layers: int) -> MoeConfig:
    every = fields.count("decoder_sparse_step", default=1)
    dense = fields.layers("mlp_only_layers")
    # transformers 5 writes the second name.
    experts = fields.count("num_experts", default=fields.count("num_local_experts", default=128))
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


def _rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Both spellings: `rope_parameters`, and the older `rope_theta` with `rope_scaling`."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ModelError("invalid_config", f"config.json: the RoPE parameters are {given!r}, not an object")
    if any(isinstance(value, dict) for value in given.values()):
        raise ModelError("unsupported_rope", "config.json: RoPE parameters that differ by layer are not supported")
    rope = _Fields({"rope_theta": config.get("rope_theta"), **given})
    kind = given.get("rope_type") or given.get("type") or "default"
    partial = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if kind not in ("default", "linear", "llama3", "yarn") or partial != 1.0:
        what = f"rope type {kind!r}" if partial == 1.0 else f"partial_rotary_factor {partial}"
        raise ModelError(
            "unsupported_rope",
            f"config.json: {what} is not supported; supported are whole-head "
            "rotations of type default, linear, llama3 and yarn",
        )
    theta = rope.number("rope_theta", default=10000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = rope.number("factor", default=0.0)
    # In transformers, a value next to the RoPE parameters overrides one inside them.
    outside = config.get("original_max_position_embeddings")
    inside = rope.count("original_max_position_embeddings", default=max_position)
    original = outside if isinstance(outside, int) else inside
    if kind == "yarn" and not factor:
        factor = max_position / original
    if factor <= 0:
        raise ModelError("invalid_config", f"config.json: rope type {kind!r} needs a positive factor")
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=factor)
    if kind == "llama3":
        return RopeConfig(
            kind="llama3",
            theta=theta,
            factor=factor,
            original_max_position=original,
            low_freq_factor=rope.number("low_freq_factor", default=1.0),
            high_freq_factor=rope.number("high_freq_factor", default=4.0),
        )
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", default=32.0) or 32.0,
        beta_slow=rope.number("beta_slow", default=1.0) or 1.0,
        attention_factor=_yarn_attention_factor(rope, factor),
        truncate=rope.flag("truncate", default=True),
    )


def _yarn_attention_factor(rope: _Fields, factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = rope.number("attention_factor", default=0.0)
    if given:
        return given
    mscale, mscale_all = rope.number("mscale", default=0.0), rope.number("mscale_all_dim", default=0.0)
    return scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1.0)
