"""What sets families apart changes the logits of their tiny checkpoints, so that tests with these see it missing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from minisgl.models.config import ModelConfig
from minisgl.models.decoder_config import AttentionConfig, LayerConfig, Mamba2Config, MoeConfig, ShortConvolutionConfig
from support.numerics.family_checkpoints import write_family_checkpoint
from support.numerics.ranks import all_logits, load

SEQUENCE: Final = [int(t) for t in torch.randint(3, 300, (70,), generator=torch.Generator().manual_seed(1))]
Change = Callable[[LayerConfig], LayerConfig]


def attention(**changes: Any) -> Change:
    def change(layer: LayerConfig) -> LayerConfig:
        of = layer.attention
        return replace(layer, attention=replace(of, **changes)) if isinstance(of, AttentionConfig) else layer

    return change


def mamba(**changes: Any) -> Change:
    def change(layer: LayerConfig) -> LayerConfig:
        of = layer.attention
        return replace(layer, attention=replace(of, **changes)) if isinstance(of, Mamba2Config) else layer

    return change


def short(**changes: Any) -> Change:
    def change(layer: LayerConfig) -> LayerConfig:
        of = layer.attention
        return replace(layer, attention=replace(of, **changes)) if isinstance(of, ShortConvolutionConfig) else layer

    return change


def rope(**changes: Any) -> Change:
    def change(layer: LayerConfig) -> LayerConfig:
        of = layer.attention
        if not isinstance(of, AttentionConfig):
            return layer
        assert of.rope is not None
        return attention(rope=replace(of.rope, **changes))(layer)

    return change


def experts(**changes: Any) -> Change:
    def change(layer: LayerConfig) -> LayerConfig:
        moe = layer.feed_forward
        return replace(layer, feed_forward=replace(moe, **changes)) if isinstance(moe, MoeConfig) else layer

    return change


def routing(**changes: Any) -> Change:
    def change(layer: LayerConfig) -> LayerConfig:
        moe = layer.feed_forward
        return experts(routing=replace(moe.routing, **changes))(layer) if isinstance(moe, MoeConfig) else layer

    return change


KNOBS: Final[tuple[tuple[str, dict[str, Change]], ...]] = (
    (
        "glm4-moe",
        {
            "scores": routing(scores="softmax"),
            "selection bias": routing(selection_bias=False),
            "renormalization": routing(renormalize=False),
            "scale": routing(scale=1.0),
            "shared expert": experts(shared=None),
            "rotated share": rope(rotated_share=1.0),
        },
    ),
    ("glm4-moe with norms, without dense layers", {"norms of heads": attention(query_key_norm=None)}),
    ("glm4", {"interleaved": rope(interleaved=False), "rotated share": rope(rotated_share=1.0)}),
    (
        "qwen2-moe",
        {
            "renormalization": routing(renormalize=True),
            "shared expert": experts(shared=None),
            "its gate": experts(shared_gate=False),
        },
    ),
    ("qwen2-moe, windows, dense layers", {"window": attention(window=None)}),
    (
        "granite-moe",
        {
            "renormalization": routing(renormalize=False),
            "scale of scores": attention(scale=24**-0.5),
            "residual scale": lambda layer: replace(layer, residual_scale=1.0),
        },
    ),
    (
        "minimax-m2",
        {
            "scores": routing(scores="softmax"),
            "selection bias": routing(selection_bias=False),
            "renormalization": routing(renormalize=False),
            "norms of projections": attention(query_key_norm=None),
            "rotated share": rope(rotated_share=1.0),
        },
    ),
    (
        "qwen3-next",
        {
            "renormalization": routing(renormalize=False),
            "its gate": experts(shared_gate=False),
            "rotated share": rope(rotated_share=1.0),
            "norms of heads": attention(query_key_norm=None),
        },
    ),
    (
        "granite4",
        {
            "renormalization": routing(renormalize=False),
            "shared expert": experts(shared=None),
            "residual scale": lambda layer: replace(layer, residual_scale=1.0),
            "bias of the convolution": mamba(convolution_bias=False),
            "groups": mamba(num_groups=1, state_size=24),
        },
    ),
    ("granite4, dense, RoPE", {"rotation": attention(rope=None)}),
    (
        "nemotron-h",
        {
            "scores": routing(scores="softmax"),
            "selection bias": routing(selection_bias=False),
            "renormalization": routing(renormalize=False),
            "scale": routing(scale=1.0),
            "shared expert": experts(shared=None),
        },
    ),
    (
        "lfm2-moe",
        {
            "scores": routing(scores="softmax"),
            "selection bias": routing(selection_bias=False),
            "renormalization": routing(renormalize=False),
            "norms of heads": attention(query_key_norm=None),
        },
    ),
    ("lfm2", {"bias of the convolution": short(bias=False)}),
    (
        "ernie4.5-moe",
        {
            "scores": routing(scores="sigmoid"),
            "selection bias": routing(selection_bias=False),
            "renormalization": routing(renormalize=False),
            "smallest sum": routing(smallest_sum=9.0),
            "shared expert": experts(shared=None),
            "interleaved": rope(interleaved=False),
        },
    ),
)


def changed(config: ModelConfig, change: Change) -> ModelConfig:
    return replace(config, body=replace(config.decoder, layers=tuple(map(change, config.layers))))


@pytest.mark.parametrize(("name", "knobs"), KNOBS, ids=[name for name, _ in KNOBS])
def test_each_knob_of_a_family_moves_the_logits(name: str, knobs: dict[str, Change], tmp_path: Path) -> None:
    checkpoint = write_family_checkpoint(tmp_path, name)
    config = ModelConfig.read(checkpoint)
    expected = all_logits(load(checkpoint), [SEQUENCE])
    moved = {}
    for knob, change in knobs.items():
        without = changed(config, change)
        # What the knob reads is left out.
        names = replace(without.decoder.names, left_out=("model.",))
        without = replace(without, body=replace(without.decoder, names=names))
        logits = all_logits(load(checkpoint, config=without), [SEQUENCE])
        moved[knob] = float((logits - expected).abs().max() / expected.std())
    assert {knob: by for knob, by in moved.items() if not by > 0.1} == {}


def test_a_router_in_float32_tells_experts_apart_that_are_equal_in_16_bits(tmp_path: Path) -> None:
    checkpoint = write_family_checkpoint(tmp_path, "glm4-moe", n_routed_experts=2, num_experts_per_tok=1)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("gate.weight"):
            tensor[0] = tensor[0].bfloat16().float()
            tensor[1] = tensor[0] * (1 + 2**-10)
        elif name.endswith("e_score_correction_bias"):
            tensor.zero_()
    save_file(tensors, file, {"format": "pt"})
    in_16_bits = partial(load, checkpoint, dtype=torch.bfloat16)
    expected = all_logits(in_16_bits(), [SEQUENCE]).float()
    config = changed(ModelConfig.read(checkpoint), routing(float32_router=False))
    assert float((all_logits(in_16_bits(config=config), [SEQUENCE]) - expected).abs().max() / expected.std()) > 0.1
