"""Ten thousand texts through HTTP, while the engine is killed: each gets its own embedding."""

from __future__ import annotations

import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from minisgl.offline.llm import LLM
from minisgl.toy.tiny import write_tiny_checkpoint
from support.frontend.served import Served, eventually

TEXTS, PER_REQUEST, CLIENTS = 10_000, 200, 6

pytestmark = pytest.mark.timeout(600)


def test_texts_outlive_the_death_of_processes(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3", hidden=64, intermediate=64, head_dim=16, layers=1)
    generator = np.random.default_rng(0)
    # Most are short, some are a hundred times as long.
    lengths = np.minimum(generator.geometric(0.15, TEXTS), 120)
    texts = [generator.integers(0, 500, length).tolist() for length in lengths]
    batches = [texts[i : i + PER_REQUEST] for i in range(0, TEXTS, PER_REQUEST)]
    with LLM(tmp_path, device="cpu", task="embed", num_pages=512) as llm:
        expected = llm.embed(texts)
    # Not pytest's own directory, whose name leaves no room for a socket's.
    with tempfile.TemporaryDirectory(prefix="pooled-") as folder, ThreadPoolExecutor(CLIENTS) as clients:
        served = Served(tmp_path, Path(folder), "--device", "cpu", "--task", "embed")
        try:
            served.wait_until_ready()
            client = httpx.Client(base_url=served.url, timeout=300)

            def embed(batch: list[list[int]]) -> np.ndarray:
                answer = client.post("/v1/embeddings", json={"input": batch})
                assert answer.status_code == 200, answer.text
                body = answer.json()
                assert body["usage"]["prompt_tokens"] == sum(map(len, batch))
                return np.array([each["embedding"] for each in body["data"]], np.float32)

            answers = [clients.submit(embed, batch) for batch in batches]
            eventually(lambda: sum(answer.done() for answer in answers) >= 5, 240)
            os.kill(served.children()["rank0"], signal.SIGKILL)
            found = np.concatenate([answer.result() for answer in answers])
            assert served.metric("minisgl:requests_retried_total") > 0
        finally:
            served.kill()
    assert np.abs(found - expected).max() < 1e-5
