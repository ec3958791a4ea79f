"""Embeddings on a CUDA device, whose numbers are those of a CPU in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from minisgl.offline.llm import LLM
from support.numerics.encoder_checkpoints import EMBEDDERS, TEXTS, write_embedder

_HEADS_OF_64: Final[Mapping[str, Mapping[str, Any]]] = {
    # FlashAttention-3 has kernels for them.
    "xlm-roberta": {"num_attention_heads": 1},
    "modernbert": {"num_attention_heads": 1},
    "qwen3": {"head_dim": 64},
    "qwen3, mean": {"head_dim": 64},
}
LONG: Final = [TEXTS[0] * 3, *TEXTS]


def embeddings(checkpoint: Path, device: str, **options: Any) -> tuple[np.ndarray, int]:
    """Embeddings of LONG, and the number of kernels that were compiled for them."""
    with LLM(checkpoint, device=device, detokenize=False, max_running=16, **options) as llm:  # type: ignore[arg-type]
        return llm.embed(LONG), llm.stats.compiled_after_ready


@pytest.mark.parametrize("changes", [{}, _HEADS_OF_64], ids=["small heads", "heads of 64"])
@pytest.mark.parametrize("name", EMBEDDERS)
def test_embeddings_are_those_of_a_cpu(name: str, changes: Mapping[str, Mapping[str, Any]], tmp_path: Path) -> None:
    if changes and name not in changes:
        pytest.skip("the sizes of the other ones are in the first case")
    write_embedder(tmp_path, name, **changes.get(name, {}))
    exact, _ = embeddings(tmp_path, "cpu", dtype="float32")
    single, compiled = embeddings(tmp_path, "cuda", dtype="float32")
    assert compiled == 0
    assert np.abs(single - exact).max() < 1e-3
    rounded, compiled = embeddings(tmp_path, "cuda", dtype="bfloat16")
    assert compiled == 0
    assert (rounded * exact).sum(1).min() > 0.995


def test_chunks_and_cached_beginnings_change_nothing(tmp_path: Path) -> None:
    write_embedder(tmp_path, "qwen3", **_HEADS_OF_64["qwen3"])
    whole, _ = embeddings(tmp_path, "cuda")
    cut, _ = embeddings(tmp_path, "cuda", max_step_tokens=24, page_size=16)
    assert (whole * cut).sum(1).min() > 0.995
