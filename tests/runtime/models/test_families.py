"""Families of models against Hugging Face transformers, in float32 on a CPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.errors import ModelError
from minisgl.hub.check import check_checkpoint
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
    [("gemma3", "Gemma3ForConditionalGeneration"), ("ministral3", "Mistral3ForConditionalGeneration")],
)
def test_the_text_model_of_a_multimodal_checkpoint_is_served(
    name: str, architecture: str, newer: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = write_family_checkpoint(tmp_path / "text", name, num_hidden_layers=1, layer_types=["full_attention"])
    towers = ["vision_tower", "multi_modal_projector"]
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
