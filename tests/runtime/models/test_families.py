"""Families of models against Hugging Face transformers, in float32 on a CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from minisgl.errors import ModelError
from minisgl.hub.check import check_checkpoint
from minisgl.models.config import ModelConfig
from minisgl.models.decoder_config import DecoderConfig
from support.numerics.family_checkpoints import FAMILIES, write_family_checkpoint, write_multimodal_checkpoint
from support.numerics.ranks import all_logits, load, run_ranks

SEQUENCES = [
    [int(t) for t in torch.randint(3, 300, (n,), generator=torch.Generator().manual_seed(n))] for n in (70, 1, 37)
]


def reference_logits(checkpoint: Path, sequences: list[list[int]] = SEQUENCES) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([sequence])).logits[0] for sequence in sequences])


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    checkpoint = write_family_checkpoint(tmp_path / "checkpoint", name)
    # longrope: transformers takes the long factors sequence by sequence.
    sequences = [each for each in SEQUENCES if len(each) > 16] if name == "phi-4-mini, long" else SEQUENCES
    expected = reference_logits(checkpoint, sequences)
    ours = all_logits(load(checkpoint), sequences)
    assert expected.std() > 0.1
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * max(1.0, float(expected.std())))

    def rank_logits(parallel: Any) -> torch.Tensor:
        return all_logits(load(checkpoint, parallel), sequences, parallel)

    for logits in run_ranks(2, tmp_path, rank_logits):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * max(1.0, float(expected.std())))


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("gemma4", "Gemma4ForConditionalGeneration"),
        ("ministral3", "Mistral3ForConditionalGeneration"),
        ("qwen3.5", "Qwen3_5ForConditionalGeneration"),
    ],
)
def test_the_text_model_of_a_multimodal_checkpoint_is_served(
    name: str, architecture: str, newer: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = write_family_checkpoint(tmp_path / "text", name, num_hidden_layers=1, layer_types=["full_attention"])
    towers = ["vision_tower", "embed_vision" if name == "gemma4" else "multi_modal_projector"]
    if name == "qwen3.5":
        towers = ["visual"]
    checkpoint = write_multimodal_checkpoint(tmp_path / "whole", text, architecture, towers, newer=newer)
    expected = all_logits(load(text), SEQUENCES)
    with caplog.at_level(logging.INFO):
        assert torch.equal(all_logits(load(checkpoint), SEQUENCES), expected)
    [message] = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert all(f"{tower} (1)" in message for tower in towers)
    notes = {note.code: note.message for note in check_checkpoint(checkpoint).notes}
    assert notes["left_out_tensors"] == message
    other = write_multimodal_checkpoint(tmp_path / "other", text, architecture, ["video_tower"], newer=newer)
    with pytest.raises(ModelError, match=r"no place for (model\.)?video_tower\.weight") as refused:
        load(other)
    assert refused.value.code == "unexpected_tensor"
    assert "unexpected_tensor" in {problem.code for problem in check_checkpoint(other).problems}


def _changed(family: DecoderConfig, attention: Any = None, rope: Any = None, **layer: Any) -> DecoderConfig:
    """The family with other fields in the `attention` of all layers, in their `rope`, or in the layers themselves."""
    layers = []
    for of in family.layers:
        block = replace(of.attention, **(attention or {}))
        if rope is not None and block.rope is not None:
            block = replace(block, rope=replace(block.rope, **rope))
        layers.append(replace(of, attention=block, **layer))
    return replace(family, layers=tuple(layers))


_WITHOUT: Mapping[tuple[str, str], Callable[[DecoderConfig], DecoderConfig]] = {
    ("gemma4", "norm of values"): lambda family: _changed(family, {"value_norm": False}),
    ("gemma4", "scale of scores"): lambda family: _changed(family, {"scale": 16**-0.5}),
    ("gemma4", "pairs that do not turn"): lambda family: _changed(family, rope={"rotated_share": 1.0}),
    ("gemma4", "windows"): lambda family: _changed(family, {"window": None}),
    ("gemma4", "scales of the stream"): lambda family: _changed(family, scales_stream=False),
    ("gemma4", "norms behind blocks"): lambda family: _changed(family, norms="pre"),
    ("gemma4", "limit of logits"): lambda family: replace(family, logit_softcap=None),
    ("gemma4", "scale of embeddings"): lambda family: replace(family, embedding_scale=1.0),
    ("gemma4, shared layers", "inputs of tokens"): lambda family: replace(family, token_inputs=None),
    ("gemma4, shared layers", "biases"): lambda family: _changed(family, {"qkv_bias": False, "output_bias": False}),
    ("gemma4, experts", "experts"): lambda family: _changed(family, experts_beside=None),
}
"""What a family has, and the family without it."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, torch.Tensor]]:
    """Checkpoint of a case and its logits."""

    @cache
    def make(name: str) -> tuple[Path, torch.Tensor]:
        checkpoint = write_family_checkpoint(tmp_path_factory.mktemp("family"), name)
        return checkpoint, all_logits(load(checkpoint), SEQUENCES)

    return make


@pytest.mark.parametrize(("name", "what"), _WITHOUT)
def test_logits_need_everything_that_a_family_has(
    name: str, what: str, whole: Callable[[str], tuple[Path, torch.Tensor]]
) -> None:
    checkpoint, expected = whole(name)
    config = ModelConfig.read(checkpoint)
    # Any tensor may be left unread.
    names = replace(config.decoder.names, left_out=("model.",))
    family = replace(_WITHOUT[name, what](config.decoder), names=names)
    without = all_logits(load(checkpoint, config=replace(config, body=family)), SEQUENCES)
    assert (without - expected).abs().max() > 0.1 * expected.std()
