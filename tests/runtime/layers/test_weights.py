"""Kinds of weights that the product does not have, through the seam for them: a format of 8 bits, and adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import msgspec
import pytest
import torch
import torch.nn.functional as F

from minisgl.config import EngineConfig
from minisgl.engine.engine import create_engine
from minisgl.layers.linear import ColumnParallelLinear, RowParallelLinear
from minisgl.layers.weights import formats, parameters
from minisgl.layers.weights.allocate import KINDS
from minisgl.layers.weights.dense import DenseWeight
from minisgl.layers.weights.formats import Quantization, TensorSpec, WeightCost, WeightFormat
from minisgl.layers.weights.inputs import Input, wide
from minisgl.layers.weights.weight import Draw, Matrix, NewTensor, QuantizedWeight, ReadTensor, Weight
from minisgl.models.blocks.feed_forward import FeedForward
from minisgl.models.decoder import Decoder
from minisgl.toy.quantize import QuantizedWeight as StoredWeight
from minisgl.toy.quantize import quantize
from minisgl.toy.tiny import write_tiny_checkpoint
from support.numerics.ranks import all_logits, load
from support.plans import Segment, make_plan, new_row

PROMPT = [5, 60, 7, 300, 9]


class Int8Channels(msgspec.Struct, frozen=True):
    """Integers of 8 bits with a scale per output channel."""

    name: ClassVar[str] = "int8"

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        return {
            "weight": TensorSpec((out_features, in_features), ("I8",)),
            "weight_scale": TensorSpec((out_features, 1)),
        }

    def kept_cost(self, *, experts: bool) -> WeightCost | None:
        return WeightCost(1.0, 1.0)


@dataclass(frozen=True, eq=False)
class Int8Weight(QuantizedWeight):
    @classmethod
    def keeps(cls, stored: WeightFormat, matrix: Matrix, *, experts: bool) -> bool:
        return True

    @classmethod
    def new(cls, new: NewTensor, stored: WeightFormat, *shape: int) -> Self:
        return cls(new(*shape, dtype=torch.int8), new(*shape[:-1], 1, dtype=torch.float32))

    @property
    def type_name(self) -> str:
        return "int8"

    def part(self, at: int | slice) -> Self:
        return type(self)(self.values[at], self.scales[at])

    def load(self, stored: WeightFormat, read: ReadTensor, rows: slice, columns: slice, place: slice) -> None:
        self.values[place].copy_(read("weight", rows, columns))
        self.scales[place].copy_(read("weight_scale", rows))

    def fill_random(self, draw: Draw) -> None:
        self.values.copy_((draw.normal() * (30 * draw.in_features**0.5)).clamp(-127, 127))
        self.scales.fill_(draw.in_features**-0.5 / 30)

    @staticmethod
    def dequantize(stored: WeightFormat, read: ReadTensor, rows: slice, columns: slice) -> torch.Tensor:
        return read("weight", rows, columns).float() * read("weight_scale", rows).float()

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.values.float() * self.scales).to(dtype)

    def product(self, x: Input, bias: torch.Tensor | None = None, *, in_parts: bool = False) -> torch.Tensor:
        product = F.linear(wide(x), self.values.to(wide(x).dtype)) * self.scales.T
        return product if bias is None else product + bias


def to_int8(weights: Int8Channels, weight: torch.Tensor, scale_type: torch.dtype = torch.bfloat16) -> StoredWeight:
    scale = (weight.float().abs().amax(1, keepdim=True) / 127).to(scale_type)
    values = (weight.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return StoredWeight({"weight": values, "weight_scale": scale}, values.float() * scale.float())


quantize.register(Int8Channels, to_int8)


@pytest.fixture
def int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        formats.READERS, "int8", lambda found: Quantization(format=Int8Channels(), ignored=("lm_head",))
    )
    monkeypatch.setitem(KINDS, Int8Channels, Int8Weight)


def generated(checkpoint: Path) -> tuple[list[int], str]:
    """Tokens that an engine generates, and the type of its weights."""
    engine = create_engine(EngineConfig(model=str(checkpoint), page_size=4, num_pages=32, max_running=2))
    pages = [(0, index, 3 + index) for index in range(8)]
    plans = [
        make_plan(0, prefill=[Segment(0, 0, PROMPT)], pages=pages, rows=[new_row(0)]),
        *(make_plan(step, decode=[(0, len(PROMPT) + step - 1)]) for step in range(1, 20)),
    ]
    tokens = [token for plan in plans for token in engine.collect(engine.launch(plan)).tokens.tolist()]
    [kind] = engine.runner._model.parameters.weights_by_type
    engine.close()
    return tokens, kind


@pytest.mark.usefixtures("int8")
@pytest.mark.parametrize("arch", ["llama", "qwen3-moe"])
def test_a_format_of_one_file_is_loaded_and_generates_the_tokens_of_its_dequantized_weights(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"quantization_config": {"quant_method": "int8"}}
    checkpoint = write_tiny_checkpoint(tmp_path, arch, config_extra=settings)
    expected, kind = generated(checkpoint)
    assert kind == "float32" and len(set(expected)) > 3
    monkeypatch.setattr(parameters, "has_quantized_kernels", lambda dtype, device: True)
    assert generated(checkpoint) == (expected, "int8")


@dataclass(frozen=True, eq=False)
class Adapted(Weight):
    """A weight with an adapter: W x + B (A x)."""

    base: Weight
    a: torch.Tensor
    b: torch.Tensor

    def product(self, x: Input, bias: torch.Tensor | None = None, *, in_parts: bool = False) -> torch.Tensor:
        product = self.base.product(x) + F.linear(F.linear(wide(x), self.a), self.b)
        return product if bias is None else product + bias

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        return self.base.dequantized(dtype) + (self.b @ self.a).to(dtype)


def linear_layers(model: Decoder) -> Iterator[ColumnParallelLinear | RowParallelLinear]:
    for layer in model.layers:
        assert isinstance(layer.feed_forward, FeedForward)
        yield from (layer.attention.qkv, layer.attention.out, layer.feed_forward.gate_up, layer.feed_forward.down)


def adapt(model: Decoder, strength: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for layer in linear_layers(model):
        outputs, inputs = layer.weight.dequantized(torch.float32).shape
        a, b = (torch.randn(shape, generator=generator) for shape in ((8, inputs), (outputs, 8)))
        layer.weight = Adapted(layer.weight, a * inputs**-0.5, b * strength)


BIASES = {"attention_bias": True, "mlp_bias": True}


def test_a_weight_with_an_adapter_is_a_weight(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "llama", config_extra=BIASES)
    adapted, merged = load(checkpoint), load(checkpoint)
    for model in (adapted, merged):
        adapt(model, 0.1)
    for layer in linear_layers(merged):
        layer.weight = DenseWeight(layer.weight.dequantized(torch.float32))
    base, ours, expected = (all_logits(model, [PROMPT]) for model in (load(checkpoint), adapted, merged))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert (ours - base).norm() > 0.01 * base.norm()


@pytest.mark.parametrize("name", ["fp8-block", "fp8-channel", "int4"])
def test_an_adapter_of_zeros_changes_nothing_of_a_quantized_weight(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees the input in the model's type, and the output without bias and activation."""
    monkeypatch.setattr(parameters, "has_quantized_kernels", lambda dtype, device: True)
    sizes = {"hidden": 256, "intermediate": 512, "kv_heads": 4, "head_dim": 64}
    checkpoint = write_tiny_checkpoint(tmp_path, "llama", quantization=name, **sizes)  # type: ignore[arg-type]
    model, adapted = load(checkpoint), load(checkpoint)
    assert "float32" not in adapted.parameters.weights_by_type
    adapt(adapted, 0.0)
    assert torch.equal(all_logits(adapted, [PROMPT]), all_logits(model, [PROMPT]))
