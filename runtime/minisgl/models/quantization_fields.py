"""Quantization of a checkpoint, from `quantization_config` in its config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from minisgl.layers.quantization import BLOCK, Fp8Blocks, Fp8Channels, Int4Groups, Quantization, WeightFormat
from minisgl.models.errors import ModelError

SUPPORTED: Final = (
    "FP8 in blocks of 128 × 128 (quant_method fp8), FP8 per channel or per tensor (compressed-tensors), and INT4 in "
    "groups of 64 or 128 (compressed-tensors pack-quantized, awq, gptq without desc_act)"
)
_GROUP_SIZES: Final = (64, 128)
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
            f"flag; remove the flag, or use the model's float16 or bfloat16 checkpoint. Supported are {SUPPORTED}",
        )
    return Quantization(format=_REQUESTED[name])


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Quantization of the checkpoint, None if it has none. Raises ModelError `quantized_checkpoint` for formats that
    are not supported, and `invalid_config`."""
    found = config.get("quantization_config")
    if found is None:
        found = config.get("compression_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise ModelError("invalid_config", f"config.json: quantization_config is {found!r:.80}, not an object")
    method = found.get("quant_method")
    readers = {"fp8": _fp8, "compressed-tensors": _compressed_tensors, "awq": _awq, "gptq": _gptq}
    if not isinstance(method, str) or method not in readers:
        raise _unsupported(f"{method or 'quant_method missing'}")
    return readers[method](found)


def _fp8(found: Mapping[str, Any]) -> Quantization:
    """Qwen's and DeepSeek's own FP8 checkpoints."""
    block = found.get("weight_block_size")
    if block is None:
        raise _unsupported("fp8 without weight_block_size")
    if block != [BLOCK, BLOCK]:
        raise _unsupported(f"fp8 with weight_block_size {block!r:.40}")
    if found.get("activation_scheme", "dynamic") != "dynamic":
        raise _unsupported(f"fp8 in blocks with activation_scheme {found['activation_scheme']!r:.40}")
    if found.get("fmt", "e4m3") != "e4m3":
        raise _unsupported(f"fp8 with fmt {found['fmt']!r:.40}")
    return Quantization(format=Fp8Blocks(), ignored=_names(found, "modules_to_not_convert"))


def _compressed_tensors(found: Mapping[str, Any]) -> Quantization:
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(each, Mapping) for each in groups.values()):
        raise ModelError("invalid_config", "config.json: quantization_config has no config_groups")
    if len(groups) > 1:
        raise _unsupported("compressed-tensors with several config_groups")
    group = next(iter(groups.values()))
    if list(_names(group, "targets")) != ["Linear"]:
        raise _unsupported(f"compressed-tensors with targets {group.get('targets')!r:.60}")
    if found.get("sparsity_config"):
        raise _unsupported("compressed-tensors with sparsity")
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping) or not isinstance(inputs, Mapping | None):
        raise ModelError("invalid_config", "config.json: quantization_config's group has no weights")
    kind = f"{weights.get('type')} of {weights.get('num_bits')} bits"
    ignored = _names(found, "ignore")
    patterns = tuple(each.removeprefix("re:") for each in ignored if each.startswith("re:"))
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ModelError(
                "invalid_config",
                f"config.json: quantization_config ignores {pattern!r}, which is not a regular expression: {error}",
            ) from error
    names = tuple(each for each in ignored if not each.startswith("re:"))
    if kind == "float of 8 bits" and inputs is not None:
        fp8 = _compressed_fp8(weights, inputs)
        return Quantization(format=fp8, ignored=names, ignored_patterns=patterns)
    layout = found.get("format")
    if kind == "int of 4 bits" and inputs is None and layout in ("pack-quantized", None):
        if weights.get("strategy") != "group" or weights.get("actorder") in ("group", True):
            raise _unsupported(
                f"compressed-tensors {kind} with strategy {weights.get('strategy')}, actorder {weights.get('actorder')}"
            )
        int4 = Int4Groups("compressed-tensors", _group_size(weights), weights.get("symmetric", True) is True)
        return Quantization(format=int4, ignored=names, ignored_patterns=patterns)
    with_inputs = "" if inputs is None else f", inputs {inputs.get('type')} of {inputs.get('num_bits')} bits"
    raise _unsupported(f"compressed-tensors {layout}: weights {kind}{with_inputs}")


def _compressed_fp8(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Fp8Channels:
    strategy, dynamic = weights.get("strategy"), inputs.get("dynamic") is True
    if strategy not in ("channel", "tensor") or weights.get("dynamic") is True:
        raise _unsupported(f"compressed-tensors FP8 with strategy {strategy}")
    if inputs.get("type") != "float" or inputs.get("num_bits") != 8:
        raise _unsupported(f"compressed-tensors FP8 with inputs {inputs.get('type')} of {inputs.get('num_bits')} bits")
    if inputs.get("strategy") != ("token" if dynamic else "tensor"):
        raise _unsupported(f"compressed-tensors FP8 with inputs per {inputs.get('strategy')}, dynamic {dynamic}")
    return Fp8Channels(per_tensor=strategy == "tensor", static_inputs=not dynamic)


def _awq(found: Mapping[str, Any]) -> Quantization:
    if found.get("version", "gemm") != "gemm":
        raise _unsupported(f"awq version {found['version']!r:.40}")
    int4 = Int4Groups("awq", _group_size(_four_bits(found, "awq")), symmetric=found.get("zero_point") is False)
    return Quantization(format=int4, ignored=_names(found, "modules_to_not_convert"))


def _gptq(found: Mapping[str, Any]) -> Quantization:
    if found.get("desc_act"):
        raise _unsupported("gptq with desc_act true (act-order), whose inputs are in another order in every layer,")
    if found.get("lm_head"):
        raise _unsupported("gptq with a quantized lm_head")
    layout = found.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise _unsupported(f"gptq with checkpoint_format {layout!r:.40}")
    exceptions = found.get("dynamic") or {}
    if not isinstance(exceptions, Mapping) or not all(str(each).startswith("-:") for each in exceptions):
        raise _unsupported("gptq with other settings for some layers (dynamic)")
    int4 = Int4Groups(
        "gptq",
        _group_size(_four_bits(found, "gptq")),
        symmetric=found.get("sym", True) is True,
        plain_zeros=layout == "gptq_v2",
    )
    return Quantization(format=int4, ignored_patterns=tuple(str(each).removeprefix("-:") for each in exceptions))


def _four_bits(found: Mapping[str, Any], method: str) -> Mapping[str, Any]:
    if found.get("bits") != 4:
        raise _unsupported(f"{method} of {found.get('bits')} bits")
    return found


def _group_size(found: Mapping[str, Any]) -> int:
    size = found.get("group_size")
    if size not in _GROUP_SIZES:
        raise _unsupported(f"INT4 in groups of {size}")
    return int(size)


def _names(found: Mapping[str, Any], field: str) -> tuple[str, ...]:
    value = found.get(field)
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise ModelError("invalid_config", f"config.json: quantization_config's {field} is not a list of names")
    return tuple(value)


def _unsupported(what: str) -> ModelError:
    return ModelError(
        "quantized_checkpoint",
        f"the checkpoint is quantized in a way that is not supported: {what}; supported are {SUPPORTED}; use such a "
        "checkpoint, or the model's float16 or bfloat16 one",
    )
