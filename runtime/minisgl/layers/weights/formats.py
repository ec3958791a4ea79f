"""Quantization of a checkpoint, from `quantization_config` in its config.json: which layers are quantized, and the
tensors that store one. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol

import msgspec

from minisgl.errors import ModelError
from minisgl.layers.weights.names import stored_names

FLOATS: Final = ("F32", "BF16", "F16")
"""safetensors' names of the element types of weights and scales."""
BLOCK: Final = 128
"""Rows and columns of a block of FP8 weights that share a scale."""


class TensorSpec(NamedTuple):
    """Shape of a tensor in a checkpoint, and the element types that it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS


class WeightCost(NamedTuple):
    """Cost of a weight in products on a Hopper GPU."""

    item_bytes: float
    """Bytes of a number, with its share of the scales of a group."""
    speed: float
    """Operations per second, relative to bfloat16."""


class WeightFormat(Protocol):
    """How a checkpoint stores the weight [out, in] of a layer. `allocate.KINDS` has the class that reads it."""

    @property
    def name(self) -> str:
        """Short name for logs and reports, as `fp8-block` or `int4`."""
        ...

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        """Tensors of one layer by the suffix of their names."""
        ...

    def kept_cost(self, *, experts: bool) -> WeightCost | None:
        """Cost of weights of `experts`, or of other layers, that stay as they are stored; None: they are
        dequantized."""
        ...


_FP8_COST: Final = WeightCost(1.0, 2.0)


class Fp8Blocks(msgspec.Struct, frozen=True):
    """FP8 (e4m3) with one scale per block of 128 × 128 weights."""

    name: ClassVar[str] = "fp8-block"

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        blocks = -(-out_features // BLOCK), -(-in_features // BLOCK)
        return {
            "weight": TensorSpec((out_features, in_features), ("F8_E4M3",)),
            "weight_scale_inv": TensorSpec(blocks),
        }

    def kept_cost(self, *, experts: bool) -> WeightCost | None:
        return _FP8_COST


class Fp8Channels(msgspec.Struct, frozen=True):
    """FP8 (e4m3) with one scale per output channel or, with `per_tensor`, one in all."""

    name: ClassVar[str] = "fp8"
    per_tensor: bool = False
    static_inputs: bool = False
    """The checkpoint must have a scale of each layer's input. Products do not use it: each row has its own scale."""
    while_loading: bool = False
    """The checkpoint is not quantized; its weights are, while they are loaded."""

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        if self.while_loading:
            return {"weight": TensorSpec((out_features, in_features))}
        scale = {"weight_scale": TensorSpec((1,) if self.per_tensor else (out_features, 1))}
        inputs = {"input_scale": TensorSpec((1,))} if self.static_inputs else {}
        return {"weight": TensorSpec((out_features, in_features), ("F8_E4M3",)), **scale, **inputs}

    def kept_cost(self, *, experts: bool) -> WeightCost | None:
        return _FP8_COST if self.per_tensor or not experts else None


class Int4Groups(msgspec.Struct, frozen=True):
    """Integers of 4 bits, packed into int32; one scale, and without `symmetric` one zero point, per group of inputs of
    an output channel."""

    name: ClassVar[str] = "int4"
    layout: Literal["compressed-tensors", "awq", "gptq"]
    group_size: int
    symmetric: bool
    plain_zeros: bool = True
    """Zero points are stored as they are; GPTQ's first format stores them minus 1."""

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        groups, int32 = in_features // self.group_size, ("I32",)
        if self.layout == "compressed-tensors":
            zeros = {} if self.symmetric else {"weight_zero_point": TensorSpec((out_features // 8, groups), int32)}
            return {
                "weight_packed": TensorSpec((out_features, in_features // 8), int32),
                "weight_scale": TensorSpec((out_features, groups)),
                "weight_shape": TensorSpec((2,), ("I64", "I32")),
                **zeros,
            }
        scales = {
            "scales": TensorSpec((groups, out_features)),
            "qzeros": TensorSpec((groups, out_features // 8), int32),
        }
        if self.layout == "awq":
            return {"qweight": TensorSpec((in_features, out_features // 8), int32), **scales}
        return {
            "qweight": TensorSpec((in_features // 8, out_features), int32),
            "g_idx": TensorSpec((in_features,), int32),
            **scales,
        }

    def kept_cost(self, *, experts: bool) -> WeightCost | None:
        return WeightCost(0.5 + 4 / self.group_size, 1.0)


class Mxfp4Blocks(msgspec.Struct, frozen=True):
    """FP4 (e2m1) with one exponent per block of 32 inputs, of experts that are stored as one tensor."""

    name: ClassVar[str] = "mxfp4"
    block: ClassVar[int] = 32
    """Inputs that share an exponent."""

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        count = in_features // self.block
        return {
            "_blocks": TensorSpec((out_features, count, self.block // 2), ("U8",)),
            "_scales": TensorSpec((out_features, count), ("U8",)),
        }

    def kept_cost(self, *, experts: bool) -> WeightCost | None:
        return WeightCost(0.5 + 1 / self.block, 1.0) if experts else None


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """Quantization of a checkpoint."""

    format: WeightFormat
    ignored: tuple[str, ...] = ()
    """Layers that are not quantized: names, or parts of names between dots."""
    ignored_patterns: tuple[str, ...] = ()
    """Regular expressions that match the beginning of the names of layers that are not quantized."""

    def format_of(self, layer: str) -> WeightFormat | None:
        """Format of a linear layer such as `model.layers.0.mlp.up_proj`; None: it is not quantized."""
        names = stored_names(layer)
        if any(f".{part}." in f".{name}." for part in self.ignored for name in names):
            return None
        matched = any(re.match(pattern, name) for pattern in self.ignored_patterns for name in names)
        return None if matched else self.format

    @property
    def name(self) -> str:
        return self.format.name


SUPPORTED: Final = (
    "FP8 in blocks of 128 × 128 or per tensor (quant_method fp8), FP8 per channel or per tensor (compressed-tensors), "
    "INT4 in groups of 32, 64 or 128 (compressed-tensors pack-quantized, awq, gptq without desc_act), and gpt-oss's "
    "MXFP4"
)
_GROUP_SIZES: Final = (32, 64, 128)
_PLAIN_ORDERS: Final = (None, False, "weight", "static")
"""`actorder` of compressed-tensors with which inputs stay in their order: it only chose the order of quantization."""
_REQUESTED: Final[Mapping[str, WeightFormat]] = {
    "fp8": Fp8Channels(while_loading=True),
    "fp8-block": Fp8Blocks(),
    "int4": Int4Groups("compressed-tensors", 128, symmetric=True),
}
"""Formats by the value of `--quantization`."""


def requested_quantization(name: str, found: Quantization | None) -> Quantization:
    """Quantization that `--quantization` asks for; `found` is that of the checkpoint. Raises ModelError
    `already_quantized`."""
    if found is not None:
        raise ModelError(
            "already_quantized",
            f"--quantization {name}: the checkpoint is quantized already, as {found.name}, which is found without the "
            "flag; remove the flag, or use the model's float32, float16 or bfloat16 checkpoint. Supported are "
            f"{SUPPORTED}",
        )
    return Quantization(format=_REQUESTED[name])


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Quantization of the checkpoint, None if it has none. Raises ModelError `quantized_checkpoint` for formats that
    are not supported, and `invalid_config`."""
    found = config.get("quantization_config")
    if found is None:
        found = config.get("compression_config")
    if found is None and isinstance(config.get("quantization"), Mapping):
        raise unsupported_quantization("MLX (quantization in config.json)")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise ModelError("invalid_config", f"config.json: quantization_config is {found!r:.80}, not an object")
    method = found.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        # ModelOpt's name of the format, such as NVFP4.
        algorithm = f" {found['quant_algo']!s:.40}" if found.get("quant_algo") else ""
        raise unsupported_quantization(f"{method or 'quant_method missing'}{algorithm}")
    return READERS[method](found)


def refuse_modelopt(found: Mapping[str, Any]) -> None:
    """Raise ModelError for the contents of hf_quant_config.json, in which older versions of modelopt write what others
    write to config.json, if they say that weights are quantized."""
    settings = found.get("quantization")
    algorithm = settings.get("quant_algo") if isinstance(settings, Mapping) else None
    if algorithm is not None:
        raise unsupported_quantization(f"modelopt {algorithm!s:.40} (hf_quant_config.json)")


def unsupported_quantization(what: str) -> ModelError:
    """Error for a checkpoint that is quantized in another way than the supported ones."""
    return ModelError(
        "quantized_checkpoint",
        f"the checkpoint is quantized in a way that is not supported: {what}; supported are {SUPPORTED}; use such a "
        "checkpoint, or the model's float32, float16 or bfloat16 one",
    )


def _fp8(found: Mapping[str, Any]) -> Quantization:
    """Qwen's and DeepSeek's own FP8 checkpoints, in blocks; Mistral's own, and AutoFP8's, per tensor."""
    block, scheme = found.get("weight_block_size"), found.get("activation_scheme")
    if block not in (None, [BLOCK, BLOCK]):
        raise unsupported_quantization(f"fp8 with weight_block_size {block!r:.40}")
    if scheme not in ((None, "dynamic") if block else ("dynamic", "static")):
        kind = "in blocks" if block else "without weight_block_size"
        raise unsupported_quantization(f"fp8 {kind} with activation_scheme {scheme!r:.40}")
    if found.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise unsupported_quantization(f"fp8 with fmt {found['fmt']!r:.40}")
    weights = Fp8Blocks() if block else Fp8Channels(per_tensor=True, static_inputs=scheme == "static")
    return _except_for(weights, found, "modules_to_not_convert", "ignored_layers")


def _compressed_tensors(found: Mapping[str, Any]) -> Quantization | None:
    groups = found.get("config_groups")
    if groups == {} and found.get("kv_cache_scheme"):
        # Only the KV cache is quantized; `read_kv_scales` reads its scales.
        return None
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(each, Mapping) for each in groups.values()):
        raise ModelError("invalid_config", "config.json: quantization_config has no config_groups")
    if len(groups) > 1:
        raise unsupported_quantization("compressed-tensors with several config_groups")
    group = next(iter(groups.values()))
    if list(_names(group, "targets")) != ["Linear"]:
        raise unsupported_quantization(f"compressed-tensors with targets {group.get('targets')!r:.60}")
    sparsity = found.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise unsupported_quantization("compressed-tensors with sparsity")
    if found.get("transform_config"):
        # Some transforms are not part of the weights: inputs are multiplied with them.
        raise unsupported_quantization("compressed-tensors with transforms (transform_config)")
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping) or not isinstance(inputs, Mapping | None):
        raise ModelError("invalid_config", "config.json: quantization_config's group has no weights")
    kind = f"{weights.get('type')} of {weights.get('num_bits')} bits"
    ignored = _names(found, "ignore")
    patterns = _expressions(each.removeprefix("re:") for each in ignored if each.startswith("re:"))
    names = tuple(each for each in ignored if not each.startswith("re:"))
    if kind == "float of 8 bits" and inputs is not None:
        fp8 = _compressed_fp8(weights, inputs)
        return Quantization(format=fp8, ignored=names, ignored_patterns=patterns)
    layout = found.get("format")
    if kind == "int of 4 bits" and inputs is None and layout in ("pack-quantized", None):
        if weights.get("strategy") != "group" or weights.get("actorder") not in _PLAIN_ORDERS:
            raise unsupported_quantization(
                f"compressed-tensors {kind} with strategy {weights.get('strategy')}, actorder {weights.get('actorder')}"
            )
        int4 = Int4Groups("compressed-tensors", _group_size(weights), weights.get("symmetric", True) is True)
        return Quantization(format=int4, ignored=names, ignored_patterns=patterns)
    with_inputs = ", inputs in 16 bits"
    if inputs is not None:
        with_inputs = f", inputs {inputs.get('type')} of {inputs.get('num_bits')} bits"
    raise unsupported_quantization(f"compressed-tensors {layout}: weights {kind}{with_inputs}")


def _compressed_fp8(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Fp8Channels:
    strategy, dynamic = weights.get("strategy"), inputs.get("dynamic") is True
    if strategy not in ("channel", "tensor") or weights.get("dynamic") is True:
        raise unsupported_quantization(f"compressed-tensors FP8 with strategy {strategy}")
    if inputs.get("type") != "float" or inputs.get("num_bits") != 8:
        raise unsupported_quantization(
            f"compressed-tensors FP8 with inputs {inputs.get('type')} of {inputs.get('num_bits')} bits"
        )
    if inputs.get("strategy") != ("token" if dynamic else "tensor"):
        raise unsupported_quantization(
            f"compressed-tensors FP8 with inputs per {inputs.get('strategy')}, dynamic {dynamic}"
        )
    return Fp8Channels(per_tensor=strategy == "tensor", static_inputs=not dynamic)


def _awq(found: Mapping[str, Any]) -> Quantization:
    version = found.get("version") or found.get("format") or "gemm"
    if str(version).lower() != "gemm":
        raise unsupported_quantization(f"awq version {version!r:.40}")
    if found.get("lm_head"):
        raise unsupported_quantization("awq with a quantized lm_head")
    int4 = Int4Groups("awq", _group_size(_four_bits(found, "awq")), symmetric=found.get("zero_point") is False)
    named = _except_for(int4, found, "modules_to_not_convert")
    # GPTQModel writes it for its AWQ checkpoints too.
    more = _expressions(_dynamic(found, "awq"))
    return Quantization(format=int4, ignored=named.ignored, ignored_patterns=(*named.ignored_patterns, *more))


def _gptq(found: Mapping[str, Any]) -> Quantization:
    if found.get("desc_act"):
        raise unsupported_quantization(
            "gptq with desc_act true (act-order), whose inputs are in another order in every layer,"
        )
    if found.get("lm_head"):
        raise unsupported_quantization("gptq with a quantized lm_head")
    layout = found.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise unsupported_quantization(f"gptq with checkpoint_format {layout!r:.40}")
    patterns = _dynamic(found, "gptq")
    int4 = Int4Groups(
        "gptq",
        _group_size(_four_bits(found, "gptq")),
        symmetric=found.get("sym", True) is True,
        plain_zeros=layout == "gptq_v2",
    )
    if found.get("modules_in_block_to_quantize"):
        quantized = "|".join(map(re.escape, _nested_names(found, "modules_in_block_to_quantize")))
        patterns.append(rf"(?!.*\.(?:{quantized})$)")
    return Quantization(format=int4, ignored_patterns=_expressions(patterns))


def _dynamic(found: Mapping[str, Any], method: str) -> list[str]:
    """Expressions of the layers that stay as they are, from `dynamic`."""
    exceptions = found.get("dynamic") or {}
    if not isinstance(exceptions, Mapping) or not all(str(each).startswith("-:") for each in exceptions):
        raise unsupported_quantization(f"{method} with other settings for some layers (dynamic)")
    return [str(each).removeprefix("-:") for each in exceptions]


def _except_for(weights: WeightFormat, found: Mapping[str, Any], *fields: str) -> Quantization:
    """Quantization but for the layers in these fields. Like transformers: a name is that of a layer or of a module
    around it, or an expression that matches such a name from its beginning."""
    entries = [entry for field in fields for entry in _names(found, field)]
    names = tuple(name for entry in entries if (name := entry.strip(".")))
    expressions = [rf"(?:{entry})(?:(?<=\.)|(?=\.|$))" for entry in entries if re.search(r"[^\w.\-]", entry)]
    return Quantization(format=weights, ignored=names, ignored_patterns=_expressions(expressions))


def _expressions(patterns: Iterable[str]) -> tuple[str, ...]:
    """The same patterns. Raises ModelError for one that is not a regular expression."""
    checked = tuple(patterns)
    for pattern in checked:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ModelError(
                "invalid_config",
                f"config.json: quantization_config excepts layers by {pattern!r}, which is not a regular expression: "
                f"{error}",
            ) from error
    return checked


def _four_bits(found: Mapping[str, Any], method: str) -> Mapping[str, Any]:
    if found.get("bits") != 4:
        raise unsupported_quantization(f"{method} of {found.get('bits')} bits")
    return found


def _group_size(found: Mapping[str, Any]) -> int:
    size = found.get("group_size")
    if size not in _GROUP_SIZES:
        raise unsupported_quantization(f"INT4 in groups of {size}")
    return int(size)


def _names(found: Mapping[str, Any], field: str) -> tuple[str, ...]:
    value = found.get(field)
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise ModelError("invalid_config", f"config.json: quantization_config's {field} is not a list of names")
    return tuple(value)


def _nested_names(found: Mapping[str, Any], field: str) -> list[str]:
    """Names in a list of lists of names."""
    groups = found[field]
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise ModelError("invalid_config", f"config.json: quantization_config's {field} is not a list of lists")
    return [name for group in groups for name in _names({field: group}, field)]


def _mxfp4(found: Mapping[str, Any]) -> Quantization:
    """gpt-oss. Only its experts are in MXFP4."""
    but_experts = r"(?!.*\.experts\.)"
    named = _except_for(Mxfp4Blocks(), found, "modules_to_not_convert")
    return Quantization(
        format=named.format, ignored=named.ignored, ignored_patterns=(*named.ignored_patterns, but_experts)
    )


READERS: Final[dict[str, Callable[[Mapping[str, Any]], Quantization | None]]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
"""Readers of `quantization_config` by its `quant_method`."""
