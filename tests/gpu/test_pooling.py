"""Embeddings on a CUDA device, whose numbers are those of a CPU in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from minisgl.engine.interface import EngineStats
from minisgl.offline.llm import LLM
from support.numerics.encoder_checkpoints import EMBEDDERS, TEXTS, write_embedder
from support.numerics.family_checkpoints import write_family_checkpoint

_HEADS_OF_64: Final[Mapping[str, Mapping[str, Any]]] = {
    # FlashAttention-3 has kernels for them.
    "xlm-roberta": {"num_attention_heads": 1},
    "modernbert": {"num_attention_heads": 1},
    "qwen3": {"head_dim": 64},
    "qwen3, mean": {"head_dim": 64},
}
LONG: Final = [TEXTS[0] * 3, *TEXTS]


def embeddings(
    checkpoint: Path, device: str, texts: Sequence[Sequence[int]] = LONG, *, in_turn: bool = False, **options: Any
) -> tuple[np.ndarray, EngineStats]:
    """`in_turn`: each text when the one before it has ended."""
    with LLM(checkpoint, device=device, detokenize=False, max_running=16, **options) as llm:  # type: ignore[arg-type]
        found = np.concatenate([llm.embed([text]) for text in texts]) if in_turn else llm.embed(texts)
        return found, llm.stats


@pytest.mark.parametrize("changes", [{}, _HEADS_OF_64], ids=["small heads", "heads of 64"])
@pytest.mark.parametrize("name", EMBEDDERS)
def test_embeddings_are_those_of_a_cpu(name: str, changes: Mapping[str, Mapping[str, Any]], tmp_path: Path) -> None:
    if changes and name not in changes:
        pytest.skip("the sizes of the other ones are in the first case")
    write_embedder(tmp_path, name, **changes.get(name, {}))
    exact, _ = embeddings(tmp_path, "cpu", dtype="float32")
    single, stats = embeddings(tmp_path, "cuda", dtype="float32")
    assert stats.compiled_after_ready == 0
    assert np.abs(single - exact).max() < 1e-3
    rounded, stats = embeddings(tmp_path, "cuda", dtype="bfloat16")
    assert stats.compiled_after_ready == 0
    assert (rounded * exact).sum(1).min() > 0.995


def test_chunks_and_cached_beginnings_change_nothing(tmp_path: Path) -> None:
    write_embedder(tmp_path, "qwen3", **_HEADS_OF_64["qwen3"])
    whole, _ = embeddings(tmp_path, "cuda")
    cut, _ = embeddings(tmp_path, "cuda", max_step_tokens=24, page_size=16)
    assert (whole * cut).sum(1).min() > 0.995


@pytest.mark.parametrize("name", ["xlm-roberta", "qwen3", "qwen3, mean"])
def test_captured_steps_change_nothing(name: str, tmp_path: Path) -> None:
    """Their padding is a text, and the outputs of others follow from lengths on the device alone."""
    write_embedder(tmp_path, name, **_HEADS_OF_64[name])
    draw = np.random.default_rng(0)
    texts = [draw.integers(4, 300, length).tolist() for length in (100, *draw.integers(1, 60, 60))]
    # One of them begins with a cached prefix, where there is one.
    texts.append(texts[0][:90])
    limits: dict[str, Any] = {"max_step_tokens": 128, "page_size": 16, "dtype": "bfloat16"}
    eager, stats = embeddings(tmp_path, "cuda", texts, cuda_graph_max_tokens=0, **limits)
    assert stats.graph_replays == stats.captures == 0
    captured, stats = embeddings(tmp_path, "cuda", texts, **limits)
    assert stats.graph_replays == stats.steps and stats.captures > 0 and stats.compiled_after_ready == 0
    assert (eager * captured).sum(1).min() > 0.999


@pytest.mark.parametrize("captured", [False, True])
def test_a_text_that_extends_another_begins_at_its_recurrent_state(captured: bool, tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, "qwen3.5", head_dim=64)
    draw = np.random.default_rng(0)
    first = draw.integers(4, 300, 64).tolist()
    texts = [first, first + draw.integers(4, 300, 30).tolist()]
    exact, _ = embeddings(tmp_path, "cpu", texts, task="embed", dtype="float32", cache="naive")
    limits: dict[str, Any] = {"max_step_tokens": 128, "dtype": "bfloat16"}
    if not captured:
        limits["cuda_graph_max_tokens"] = 0
    ours, stats = embeddings(tmp_path, "cuda", texts, in_turn=True, task="embed", **limits)
    assert stats.prefill_tokens == len(texts[1]), "the second text did not begin behind the first one"
    assert stats.graph_replays == (stats.steps if captured else 0) and (stats.captures > 0) is captured
    assert stats.compiled_after_ready == 0
    assert (ours * exact).sum(1).min() > 0.995
