"""Training of the very small models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl.errors import ModelError
from minisgl.models.config import ModelConfig
from minisgl.toy.demo import demo_config, demo_tokenizer, write_demo_checkpoint
from minisgl.toy.demo_rows import ROW_TOKENS, DemoRows
from minisgl.toy.muon import orthogonal
from minisgl.toy.tiny import write_checkpoint
from minisgl.toy.tiny_tokenizer import FAMILIES
from minisgl.toy.training import IGNORED, Training, one_thread
from support.numerics.ranks import all_logits, load


def test_margins_are_those_of_the_weights_that_are_written(tmp_path: Path) -> None:
    tokenizer = demo_tokenizer()
    config = demo_config(tokenizer)
    tokens, labels = DemoRows(tokenizer, 0).batch()
    with one_thread():
        training = Training(ModelConfig.parse(config), 0, ROW_TOKENS)
        training.step(tokens, labels, 1.0)
        _, margins = training.margins([(tokens[:1], labels[:1]), (tokens, labels)])
    write_checkpoint(tmp_path, config, tokenizer, FAMILIES["qwen3"], training.weights())
    logits = all_logits(load(tmp_path), tokens.tolist()).view(*tokens.shape, -1)
    for row, column in (labels != IGNORED).nonzero().tolist()[::50]:
        label = labels[row, column]
        others = logits[row, column].clone()
        others[label] = -torch.inf
        expected = logits[row, column, label] - others.max()
        torch.testing.assert_close(margins[row, column], expected, atol=1e-4, rtol=0)


def test_judging_changes_no_weights() -> None:
    tokenizer = demo_tokenizer()
    tokens, labels = DemoRows(tokenizer, 0).batch()

    def trained(*, is_judged: bool) -> torch.Tensor:
        with one_thread():
            training = Training(ModelConfig.parse(demo_config(tokenizer)), 0, ROW_TOKENS)
            for _ in range(2):
                training.step(tokens, labels, 1.0)
                if is_judged:
                    training.margins([(tokens, labels)])
        return training.weights()["model.embed_tokens.weight"]

    assert torch.equal(trained(is_judged=True), trained(is_judged=False))


def test_a_model_that_has_not_learned_its_answers_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.toy.demo._STEPS", 1)
    monkeypatch.setattr("minisgl.toy.demo._ROUNDS", 0)
    steps: list[int] = []
    with pytest.raises(ModelError, match="wrong with 3 seeds of 1 steps; try another --seed") as raised:
        write_demo_checkpoint(tmp_path / "demo", progress=lambda step, loss: steps.append(step))
    assert raised.value.code == "not_trained"
    assert steps == [1, 1, 1]
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("shape", [(128, 128), (384, 128), (128, 256)])
def test_muon_makes_singular_values_about_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert values.max() < 1.3
    assert (values > 0.6).float().mean() > 0.9
