"""Embeddings of decoders: equal to those of transformers, whatever is beside a text and however it is cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from minisgl.offline.llm import LLM
from minisgl.offline.outputs import OfflineError
from minisgl.toy.tiny import write_tiny_checkpoint

LENGTHS = (1, 2, 7, 16, 17, 40, 63, 5)


def texts_of(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 500, length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("embedder")
    write_tiny_checkpoint(directory, "qwen3", hidden=64, intermediate=96, head_dim=16)
    return directory


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).model.eval()


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    # Texts are cut into chunks, and freed pages are filled with NaN.
    with LLM(checkpoint, device="cpu", task="embed", max_step_tokens=24, max_running=4, page_size=4, audit=True) as llm:
        yield llm


def last_states(reference: Any, texts: list[list[int]]) -> np.ndarray:
    with torch.inference_mode():
        states = [reference(torch.tensor([text])).last_hidden_state[0, -1] for text in texts]
    return torch.nn.functional.normalize(torch.stack(states), dim=-1).numpy()


def test_embeddings_are_those_of_transformers(llm: LLM, reference: Any) -> None:
    texts = texts_of()
    found = llm.embed(texts)
    assert found.dtype == np.float32 and found.shape == (len(texts), 64)
    assert np.abs(found - last_states(reference, texts)).max() < 1e-5
    assert llm.counters.generated_tokens == 0


def test_an_embedding_does_not_depend_on_its_neighbours_or_on_the_cache(llm: LLM) -> None:
    texts = texts_of(seed=1)
    together = llm.embed(texts)
    before = llm.counters.cached_tokens
    again = np.concatenate([llm.embed([text]) for text in texts])
    assert llm.counters.cached_tokens > before
    assert np.abs(together - again).max() < 1e-5


def test_dimensions_are_cut_and_normalized(llm: LLM) -> None:
    whole, cut = llm.embed(texts_of()), llm.embed(texts_of(), dimensions=8)
    expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    assert cut.shape == (len(LENGTHS), 8) and np.abs(cut - expected).max() < 1e-5
    with pytest.raises(OfflineError, match=r"dimensions: expected 1\.\.64"):
        llm.embed(texts_of(), dimensions=65)


def test_other_tasks_are_refused(llm: LLM) -> None:
    for call in (lambda: llm.score("a", ["b"]), lambda: llm.classify("a"), lambda: llm.generate("a")):
        with pytest.raises(OfflineError) as error:
            call()
        assert error.value.code == "wrong_task"
