"""Rooflines, compared with their published values."""

from __future__ import annotations

import random

import pytest

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.bench.roofline import HARDWARE, Roofline, hardware_of
from minisgl.models.config import ModelConfig

H200 = HARDWARE["h200"]


def _roofline(name: str, tensor_parallel: int = 1) -> Roofline:
    return Roofline(ModelConfig.parse(BUILTIN_CONFIGS[name]), H200, tensor_parallel)


def _workload_a() -> tuple[list[int], list[int]]:
    rng = random.Random(0)
    prompts = [len([rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))]) for _ in range(256)]
    return prompts, [rng.randint(100, 1024) for _ in range(256)]


@pytest.mark.parametrize(("name", "tokens_per_second"), [("qwen3-0.6b", 34_845), ("qwen3-14b", 7_744)])
def test_offline_batch(name: str, tokens_per_second: float) -> None:
    prompts, outputs = _workload_a()
    assert (sum(prompts), sum(outputs)) == (142_827, 133_966)
    seconds = _roofline(name).offline(prompts, outputs)
    assert sum(outputs) / seconds == pytest.approx(tokens_per_second, rel=0.01)


@pytest.mark.parametrize(
    ("name", "tensor_parallel", "batch", "milliseconds"),
    [
        ("qwen3-0.6b", 1, 1, 0.305),
        ("qwen3-0.6b", 1, 256, 7.513),
        ("qwen3-8b", 1, 1, 3.558),
        ("qwen3-14b", 1, 1, 6.550),
        ("qwen3-14b", 1, 256, 19.652),
        ("qwen3-30b-a3b", 1, 1, 1.435),
        ("qwen3-30b-a3b", 1, 64, 15.514),
        ("gemma-4-26b-a4b", 1, 1, 1.834),
        ("gemma-4-31b", 1, 1, 14.50),
        ("mistral-small-24b", 1, 1, 10.70),
        ("gpt-oss-20b", 1, 1, 0.870),
        ("gpt-oss-120b", 1, 1, 1.175),
        ("qwen3.6-27b", 1, 1, 12.01),
        ("qwen3.6-27b", 1, 64, 17.98),
        ("qwen3.6-35b-a3b", 1, 1, 1.408),
        ("nemotron-3-nano", 1, 1, 1.527),
        ("qwen3-32b", 4, 1, 3.74),
        ("qwen3-32b", 2, 1, 7.48),
    ],
)
def test_decode_step(name: str, tensor_parallel: int, batch: int, milliseconds: float) -> None:
    seconds = _roofline(name, tensor_parallel).decode(batch, context=1024)
    assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.01)


@pytest.mark.parametrize(("name", "prefill", "decode"), [("qwen3-0.6b", 0.0709, 0.2400), ("qwen3-14b", 1.309, 1.475)])
def test_shared_prefix(name: str, prefill: float, decode: float) -> None:
    seconds = _roofline(name).shared_prefix(requests=256, prefix=2048, own=128, output=128)
    assert seconds == pytest.approx(prefill + decode, rel=0.01)


@pytest.mark.parametrize(("batch", "milliseconds"), [(1, 3.48), (256, 15.37)])
def test_weights_in_fp8_blocks_are_read_and_multiplied_in_half_the_time(batch: int, milliseconds: float) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model = ModelConfig.parse({**BUILTIN_CONFIGS["qwen3-14b"], "quantization_config": quantization})
    seconds = Roofline(model, H200).decode(batch, context=1024)
    assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.02)


@pytest.mark.parametrize(("name", "weights"), [("fp8", 1), ("fp8-block", 1), ("int4", 0.5 + 4 / 128), (None, 2)])
def test_only_what_is_quantized_is_read_in_fewer_bytes(name: str | None, weights: float) -> None:
    model = ModelConfig.parse(BUILTIN_CONFIGS["qwen3-14b"], quantization=name)
    linear = 40 * (5120 * (40 + 2 * 8) * 128 + 40 * 128 * 5120 + 3 * 5120 * 17408)
    moved = linear * weights + 2 * 151_936 * 5120 + 2 * 2 * 40 * 8 * 128
    assert Roofline(model, H200).decode(1, 1) == pytest.approx(moved / H200.bandwidth, rel=0.01)


def test_experts_that_are_dequantized_are_read_in_16_bits() -> None:
    plain, block, channel = (
        Roofline(ModelConfig.parse(BUILTIN_CONFIGS["qwen3-30b-a3b"], quantization=name), H200).decode(64, 1024)
        for name in (None, "fp8-block", "fp8")
    )
    assert block < 0.6 * plain
    assert 0.95 * plain < channel < plain


def test_a_kv_cache_in_fp8_is_read_in_half_the_time() -> None:
    model = ModelConfig.parse(BUILTIN_CONFIGS["qwen3-14b"])
    saved = Roofline(model, H200).decode(256, 1024) - Roofline(model, H200, kv_bytes=1).decode(256, 1024)
    # Keys and values of 40 layers and 8 heads of 128.
    assert saved == pytest.approx(256 * 1024 * 40 * 2 * 8 * 128 / H200.bandwidth, rel=0.01)


def test_hardware_is_found_by_the_name_that_the_driver_reports() -> None:
    assert hardware_of("NVIDIA H200") is H200
    assert hardware_of("NVIDIA H100 80GB HBM3") is HARDWARE["h100"]
    assert hardware_of("NVIDIA L4") is None
