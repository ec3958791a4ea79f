"""Engines of models that generate."""

from __future__ import annotations

from minisgl.config import EngineConfig
from minisgl.engine import engine
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.cuda_engine import CudaEngine
from minisgl.engine.pooling_engine import PoolingEngine


def create_engine(config: EngineConfig, progress: engine.Progress | None = None) -> CpuEngine | CudaEngine:
    """As `engine.create_engine`, with a type that has a runner."""
    created = engine.create_engine(config, progress)
    assert not isinstance(created, PoolingEngine)
    return created
