"""Families whose layers differ, compared with Hugging Face transformers: prompts over several windows, chunks of
prompts, cached prefixes and preemption."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl.attention.state_shape import StateShape
from support.numerics.cases import UNLIMITED, Case
from support.numerics.compare import check_features, check_numbers, distance
from support.numerics.family_checkpoints import write_family_checkpoint
from support.numerics.reference import Reference
from support.numerics.run import serve_case
from support.numerics.workload import VOCAB, workload

_CASES = (
    Case("smollm3", UNLIMITED, "cold", True, 16, "alone", False),
    Case("smollm3, windows, biases", 7, "hit", True, 1, "others", False),
    Case("phi-4-mini, window, short", 64, "hit", False, 16, "alone", True),
    Case("granite", UNLIMITED, "hit", True, 64, "alone", False),
    Case("olmo2", 64, "cold", True, 16, "others", False),
    Case("olmo3", 64, "hit", True, 16, "others", True),
    Case("exaone4", 7, "hit", True, 16, "alone", True),
    Case("hunyuan", UNLIMITED, "hit", False, 1, "alone", False),
    Case("ernie4.5", 64, "hit", True, 16, "others", False),
    Case("ministral3", 64, "hit", True, 16, "alone", True),
    Case("gemma2", 64, "hit", True, 16, "others", True),
    Case("glm4", UNLIMITED, "hit", True, 16, "alone", False),
    Case("glm4-moe", 7, "hit", True, 16, "others", True),
    Case("qwen2-moe, windows, dense layers", 7, "hit", True, 16, "alone", True),
    Case("granite-moe", 64, "cold", True, 16, "others", False),
    Case("minimax-m2", 64, "hit", True, 16, "alone", True),
    Case("ernie4.5-moe", 64, "hit", False, 1, "others", False),
    Case("gemma3", 7, "hit", True, 16, "others", True),
    Case("gemma4", 7, "hit", True, 16, "others", True),
    Case("gemma4, shared layers", 64, "hit", True, 16, "others", True),
    Case("gpt-oss", 7, "hit", True, 16, "others", True),
    Case("qwen3-next", 64, "hit", False, 64, "alone", False),
    Case("qwen3.5", 7, "hit", True, 64, "others", True),
    Case("qwen3.5-moe", UNLIMITED, "naive", True, 16, "others", True),
    Case("granite4", 7, "hit", True, 64, "others", True),
    Case("nemotron-h", 7, "hit", True, 64, "others", True),
    Case("lfm2", 7, "hit", True, 64, "others", True),
)


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_logits_and_tokens_match_transformers(case: Case, tmp_path: Path) -> None:
    checkpoint = write_family_checkpoint(tmp_path, case.arch, vocab_size=VOCAB)
    work = workload(case)
    outcome, stats = serve_case(case, work, checkpoint)
    check_numbers(work, outcome, Reference(checkpoint))
    check_features(case, work, outcome, stats)


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h"])
def test_a_state_that_was_saved_in_16_bits_costs_as_much_as_one_rounding(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token behind a cached prefix, where all else is in float32."""
    monkeypatch.setattr(StateShape, "checkpoints_per_row", lambda *_: 2)
    case = Case(name, UNLIMITED, "hit", True, 64, "alone", False)
    checkpoint = write_family_checkpoint(tmp_path, name, vocab_size=VOCAB)
    work = workload(case)
    outcome, stats = serve_case(case, work, checkpoint)
    check_features(case, work, outcome, stats)
    [answer] = Reference(checkpoint).answers([work.asks[work.probe]])
    lost = distance(outcome.stacked([(work.probe, 0)]), torch.stack([answer.logits[0]]))
    assert 1e-6 < lost < 1e-3
