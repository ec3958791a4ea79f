"""Writes one INT4 tensor of each format, packed and dequantized by that format's original tool, for the tests of the
readers: `python -m support.numerics.packed_tensors FOLDER`, with autoawq 0.2.7.post3, auto-gptq 0.7.1 and
compressed-tensors 0.20.0 unpacked in PYTHONPATH. The tools are old and large: they are no dependency of the tests."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from safetensors.torch import save_file

ROWS, COLUMNS, GROUP = 64, 256, 64


def main(folder: Path) -> None:
    # Their packages import models, and libraries, that the packing does not need.
    for name in ("awq", "awq.modules", "awq.modules.linear", "auto_gptq", "auto_gptq.nn_modules", "auto_gptq.utils"):
        package = ModuleType(name)
        package.__path__ = [str(Path(each, *name.split("."))) for each in sys.path]
        sys.modules[name] = package
    import_module("transformers.pytorch_utils")
    sys.modules["accelerate"] = MagicMock(__spec__=None)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, generator=generator).half() * 0.1
    weight[3:5] += 0.2
    low = weight.float().view(ROWS, -1, GROUP).amin(2).clamp(max=0)
    high = weight.float().view(ROWS, -1, GROUP).amax(2).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    for name, make in (("awq", awq), ("gptq", gptq), ("compressed-tensors", compressed_tensors)):
        tensors, version = make(weight, scales, zeros)
        tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(tensors, folder / f"{name}.safetensors", {"tool": version})


def linear(weight: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight.data = weight.clone()
    return layer


def awq(weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> tuple[dict[str, torch.Tensor], str]:
    gemm: Any = import_module("awq.modules.linear.gemm")
    packing: Any = import_module("awq.utils.packing_utils")
    layer = gemm.WQLinear_GEMM.from_linear(linear(weight), 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T)
    packed = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}
    dense = packing.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, GROUP)
    return {**packed, "dense": dense.T}, "autoawq 0.2.7.post3"


def gptq(weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> tuple[dict[str, torch.Tensor], str]:
    module: Any = import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda_old")
    module.AUTOGPTQ_CUDA_AVAILABLE = False
    layer = module.QuantLinear(4, GROUP, COLUMNS, ROWS, bias=False, use_cuda_fp16=False)
    layer.pack(linear(weight), scales, zeros.clone(), None)
    layer.autogptq_cuda_available = False
    packed = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales, "g_idx": layer.g_idx}
    # It dequantizes only for a product: that with the unit matrix is exact.
    dense = layer.forward(torch.eye(COLUMNS, dtype=torch.float16)).T
    return {**packed, "dense": dense}, "auto-gptq 0.7.1"


def compressed_tensors(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> tuple[dict[str, torch.Tensor], str]:
    forward: Any = import_module("compressed_tensors.quantization.lifecycle.forward")
    arguments: Any = import_module("compressed_tensors.quantization.quant_args")
    helpers: Any = import_module("compressed_tensors.compressors.pack_quantized.helpers")
    args = arguments.QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False)
    points = (zeros - 8).to(torch.int8)
    numbers = forward.quantize(weight, scales, points, args, dtype=torch.int8)
    packed = {
        "weight_packed": helpers.pack_to_int32(numbers, 4),
        "weight_scale": scales,
        "weight_zero_point": helpers.pack_to_int32(points, 4, packed_dim=0),
        "weight_shape": torch.tensor([ROWS, COLUMNS]),
    }
    return {**packed, "dense": forward.dequantize(numbers, scales, points, args)}, "compressed-tensors 0.20.0"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
