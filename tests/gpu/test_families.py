"""Families of models on a CUDA device, whose numbers are those of a CPU: windows, bounds of scores and other norms use
kernels that no other model does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from minisgl.models.config import ModelConfig
from support.numerics.cases import UNLIMITED, Case
from support.numerics.compare import check_features, rounding
from support.numerics.family_checkpoints import FAMILIES, write_family_checkpoint
from support.numerics.ranks import load
from support.numerics.run import serve_case
from support.numerics.workload import VOCAB, workload

_WIDE: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 768,
    "head_dim": 128,
    # Larger matrices amplify the rounding of bfloat16, on any device.
    "initializer_range": 0.0075,
}
_WIDE_EXPERTS: Final = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 256}
_LONG_FACTORS: Final = {"short_factor": [1.0 + i / 48 for i in range(48)], "long_factor": [2.0 + i for i in range(48)]}


# It takes its factors sequence by sequence in transformers.
_LEFT_OUT: Final = {"phi-4-mini, long"}


def _checkpoint(folder: Path, name: str) -> Path:
    settings = FAMILIES[name][1]
    changes = {**_WIDE, **{field: size for field, size in _WIDE_EXPERTS.items() if field in settings}}
    rope = settings.get("rope_parameters", {})
    if rope.get("rope_type") == "longrope":
        changes["rope_parameters"] = {**rope, **_LONG_FACTORS}
    return write_family_checkpoint(folder, name, separate_experts=True, **changes)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in _LEFT_OUT])
def test_logits_are_as_close_to_float32_as_those_of_a_cpu(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Norms behind blocks amplify the rounding of bfloat16: how much it is depends on the family."""
    checkpoint = _checkpoint(tmp_path, name)
    exact = load(checkpoint)
    for case in (
        Case(name, 64, "hit", True, 16, "others", False),
        Case(name, UNLIMITED, "cold", True, 16, "alone", False),
    ):
        work = workload(case)
        on_cpu, _ = serve_case(case, work, checkpoint, dtype="bfloat16")
        on_gpu, stats = serve_case(case, work, checkpoint, "cuda", "bfloat16")
        check_features(case, work, on_gpu, stats)
        distances = rounding(work, on_gpu, exact), rounding(work, on_cpu, exact)
        record_property("distances", distances)
        # Kernels of recurrent states take operands in 16 bits, where a CPU computes in float32.
        most = 2.0 if ModelConfig.read(checkpoint).recurrences else 1.5
        assert distances[0] < most * distances[1] < 0.5
