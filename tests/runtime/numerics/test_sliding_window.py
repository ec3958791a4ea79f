"""A model with a sliding window compared with Hugging Face transformers: prompts longer than the window, chunks of
prompts, cached prefixes, and answers that cross the window. The prefix cache is correct because it keeps all keys and
values, also those behind the window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minisgl.toy.tiny import write_tiny_checkpoint
from support.numerics.cases import UNLIMITED, Case
from support.numerics.compare import check_features, check_numbers
from support.numerics.reference import Reference
from support.numerics.run import serve_case
from support.numerics.workload import workload


@pytest.mark.parametrize(
    ("case", "window", "extra"),
    [
        (Case("mistral", UNLIMITED, "cold", True, 16, "alone", False), 8, {}),
        (Case("mistral", UNLIMITED, "cold", True, 16, "alone", False), 100, {}),
        (Case("mistral", 7, "hit", True, 16, "others", False), 33, {}),
        (Case("mistral", 64, "hit", False, 1, "alone", True), 64, {}),
        (Case("qwen2", 64, "hit", True, 64, "others", True), 8, {"use_sliding_window": True, "max_window_layers": 0}),
        (Case("qwen3-moe", UNLIMITED, "hit", True, 16, "alone", False), 64, {"use_sliding_window": True}),
    ],
    ids=str,
)
def test_logits_and_tokens_match_transformers(case: Case, window: int, extra: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, case.arch, config_extra={"sliding_window": window, **extra})
    work = workload(case)
    assert work.longest > window
    outcome, stats = serve_case(case, work, checkpoint)
    check_numbers(work, outcome, Reference(checkpoint))
    check_features(case, work, outcome, stats)
