from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from minisgl.toy.tiny import write_tiny_checkpoint
from support.wide_checkpoint import write_layers_of_14b, write_wide_checkpoint


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint with a shape that ahead-of-time kernels support: heads of 128, two query heads per KV head."""
    folder = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(folder, "qwen3", hidden=256, heads=4, kv_heads=2, head_dim=128)
    return folder


@pytest.fixture(scope="session")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of an architecture's checkpoint."""
    return cache(lambda arch: write_wide_checkpoint(tmp_path_factory.mktemp("wide") / arch, arch))


@pytest.fixture(scope="session")
def layers_of_14b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layers_of_14b(tmp_path_factory.mktemp("14b"))


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    """Free the device's memory after each test."""
    yield
    torch.cuda.empty_cache()
