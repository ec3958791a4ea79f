"""Families of models on a CUDA device, whose numbers are those of a CPU: windows, bounds of scores and other norms use
kernels that no other model does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from support.numerics.cases import UNLIMITED, Case
from support.numerics.compare import check_features, check_rounded_numbers
from support.numerics.family_checkpoints import FAMILIES, write_family_checkpoint
from support.numerics.ranks import load
from support.numerics.run import serve_case
from support.numerics.workload import VOCAB, workload

_WIDE: Final[Mapping[str, Any]] = {"vocab_size": VOCAB, "hidden_size": 512, "intermediate_size": 768, "head_dim": 128}
_LONG_FACTORS: Final = {"short_factor": [1.0 + i / 48 for i in range(48)], "long_factor": [2.0 + i for i in range(48)]}


def _checkpoint(folder: Path, name: str) -> Path:
    changes = dict(_WIDE)
    rope = FAMILIES[name][1].get("rope_parameters", {})
    if rope.get("rope_type") == "longrope":
        changes["rope_parameters"] = {**rope, **_LONG_FACTORS}
    return write_family_checkpoint(folder, name, **changes)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "phi-4-mini, long"])
def test_logits_and_tokens_match_a_cpu(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    checkpoint = _checkpoint(tmp_path, name)
    for case in (
        Case(name, 64, "hit", True, 16, "others", False),
        Case(name, UNLIMITED, "cold", True, 16, "alone", False),
    ):
        work = workload(case)
        outcome, stats = serve_case(case, work, checkpoint, "cuda", "bfloat16")
        check_features(case, work, outcome, stats)
        record_property("distance", check_rounded_numbers(work, outcome, load(checkpoint)))
