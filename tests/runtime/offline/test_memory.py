"""Memory of calls with many prompts, with an engine that needs no time."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from minisgl import LLM, SamplingParams
from minisgl.config import EngineConfig
from minisgl.engine.interface import EngineLimits, EngineStats
from minisgl.offline import llm as llm_module
from minisgl.wire.plan import StepPlan, StepResult

EOS = 7
CONTEXT = 131_072


class EosEngine:
    """Samples the EOS token in every row."""

    limits = EngineLimits(
        num_pages=CONTEXT, page_size=1, max_running=256, max_model_len=CONTEXT, vocab_size=100, eos_token_ids=(EOS,)
    )
    stats = EngineStats()

    def launch(self, plan: StepPlan) -> StepPlan:
        return plan

    def use_idle_time(self) -> bool:
        return False

    def collect(self, handle: StepPlan) -> StepResult:
        return StepResult(handle.step, np.full(len(handle.sampled_slots), EOS, np.int32))

    def close(self) -> None:
        pass


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    def start(config: EngineConfig, plans: tuple[str, ...]) -> EosEngine:
        return EosEngine()

    monkeypatch.setattr(llm_module, "start_rank0", start)
    (tmp_path / "config.json").write_text("{}")
    return LLM(str(tmp_path), device="cpu", detokenize=False, dummy_weights=True)


@pytest.mark.parametrize("prompts", [1, 8_000])
def test_memory_follows_the_answers_and_not_the_longest_ones_possible(llm: LLM, prompts: int) -> None:
    tracemalloc.start()
    outputs = llm.generate([[number % 7] for number in range(prompts)], SamplingParams(ignore_eos=False))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(outputs) == prompts
    assert all(output.token_ids == [EOS] for output in outputs)
    assert peak < 8_000_000 + 6_000 * prompts
