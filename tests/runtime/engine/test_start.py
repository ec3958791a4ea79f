from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.engine import create_engine
from minisgl.errors import EngineError
from minisgl.models.config import ModelConfig
from minisgl.toy.tiny import write_tiny_checkpoint
from minisgl.wire.status import DataTypes


def test_limits_follow_from_configuration_model_and_pool(start: Callable[..., CpuEngine], checkpoint: Path) -> None:
    model = ModelConfig.read(checkpoint)
    limits = start(num_pages=10, page_size=16).limits
    assert (limits.num_pages, limits.page_size, limits.max_running, limits.max_model_len) == (10, 16, 8, 160)
    assert (limits.vocab_size, limits.eos_token_ids) == (model.vocab_size, model.eos_token_ids)
    assert start(num_pages=10, page_size=16, max_model_len=100).limits.max_model_len == 100
    assert start(num_pages=None, audit=False).limits.max_model_len == model.max_model_len


def test_the_pool_is_at_most_as_large_as_all_rows_can_fill(start: Callable[..., CpuEngine]) -> None:
    limits = start(num_pages=None, max_running=3, max_model_len=50, page_size=16, audit=False).limits
    assert limits.num_pages == 3 * 4


def test_progress_names_the_phases(checkpoint: Path) -> None:
    seen: list[tuple[str, float]] = []
    config = EngineConfig(model=str(checkpoint), num_pages=4)
    create_engine(config, lambda phase, share: seen.append((phase, share))).close()
    assert seen[-1] == ("pool", 1.0)
    shares = [share for phase, share in seen if phase == "load"]
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_dummy_weights_need_only_the_configuration(
    start: Callable[..., CpuEngine], checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    engine = start(model=str(tmp_path), dummy_weights=True)
    assert engine.stats.parameter_bytes > 0


@pytest.mark.parametrize(("option", "kv_cache"), [("auto", "float32"), ("fp8", "fp8_e4m3")])
def test_the_data_types_in_which_it_runs_are_reported(
    option: str, kv_cache: str, start: Callable[..., CpuEngine], tmp_path: Path
) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3-moe", quantization="fp8-block")
    # A CPU has no kernels for FP8 weights.
    engine = start(model=str(tmp_path), kv_cache_dtype=option)
    assert engine.stats.data_types == DataTypes(weights="float32", kv_cache=kv_cache)


@pytest.mark.parametrize(("quantization", "warns"), [(None, False), ("fp8", True)])
def test_weights_that_are_rounded_without_becoming_smaller_are_told(
    quantization: Any, warns: bool, start: Callable[..., CpuEngine], caplog: pytest.LogCaptureFixture
) -> None:
    start(quantization=quantization)
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("100 % of the weights" in each and "Hopper" in each for each in messages) == warns


def test_a_window_of_some_layers_may_be_shorter_than_the_context(tmp_path: Path) -> None:
    window = {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}
    write_tiny_checkpoint(tmp_path, "qwen2", config_extra=window)
    engine = create_engine(EngineConfig(model=str(tmp_path), num_pages=64))
    assert engine.limits.max_model_len > 32
    engine.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_cuda_without_a_device_is_reported_with_a_remedy(checkpoint: Path) -> None:
    with pytest.raises(EngineError, match="--device cpu"):
        create_engine(EngineConfig(model=str(checkpoint), device="cuda"))


def test_no_cuda_library_is_imported_on_a_cpu(checkpoint: Path) -> None:
    script = (
        "import sys; from minisgl.config import EngineConfig; from minisgl.engine.engine import create_engine\n"
        f"create_engine(EngineConfig(model={str(checkpoint)!r}, num_pages=4)).close()\n"
        "assert not {'triton', 'flashinfer', 'transformers'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240, env={"PYTHONPATH": ":".join(sys.path)})
