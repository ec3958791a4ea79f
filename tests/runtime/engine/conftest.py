from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.engine import create_engine
from minisgl.toy.tiny import write_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(folder, "qwen3")
    return folder


@pytest.fixture
def start(checkpoint: Path) -> Iterator[Callable[..., CpuEngine]]:
    """Starts engines on the checkpoint; they are closed after the test."""
    torch.set_num_threads(1)
    engines: list[CpuEngine] = []

    def start(**settings: object) -> CpuEngine:
        defaults = {"model": str(checkpoint), "page_size": 4, "num_pages": 96, "max_running": 8, "audit": True}
        engine = create_engine(EngineConfig(**(defaults | settings)))  # type: ignore[arg-type]
        assert isinstance(engine, CpuEngine)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()
