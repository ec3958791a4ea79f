"""No decision of the scheduler changes the numbers of a request on a CUDA device, which are those of a CPU: in pieces
or whole, behind a cached prefix or not, alone or among others, in a graph or not, preempted or not.

All tests run in audit mode: pages are allocated in shuffled order, and free pages are full of NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from minisgl.config import DType, EngineConfig
from minisgl.models.decoder import Decoder
from minisgl.toy.tiny import TINY_ARCHS, write_tiny_checkpoint
from support.engines import create_engine
from support.numerics.cases import TWO_RANK_CASES, UNLIMITED, Case, covering_array
from support.numerics.compare import ROUNDED, check_features, check_numbers, check_rounded_numbers, distance
from support.numerics.ranks import all_logits, load
from support.numerics.reference import Reference
from support.numerics.run import Outcome, serve_case
from support.numerics.workload import VOCAB, Ask, Workload, workload
from support.wide_checkpoint import write_wide_checkpoint

PROMPTS = (1, 63, 64, 65, 700, 2000)


@pytest.fixture(scope="module")
def exact(wide_checkpoint: Callable[[str], Path]) -> Callable[[str], Decoder]:
    """An architecture's model in float32 on the CPU, whose logits are those of transformers."""
    return cache(lambda arch: load(wide_checkpoint(arch)))


def _served(case: Case, work: Workload, checkpoint: Path, dtype: DType) -> Outcome:
    outcome, stats = serve_case(case, work, checkpoint, "cuda", dtype)
    check_features(case, work, outcome, stats)
    assert stats.graph_replays or stats.decode_backend == "torch"
    return outcome


@pytest.mark.parametrize("case", covering_array(), ids=str)
def test_logits_and_tokens_match_a_cpu(
    case: Case,
    wide_checkpoint: Callable[[str], Path],
    exact: Callable[[str], Decoder],
    record_property: Callable[[str, object], None],
) -> None:
    work = workload(case)
    outcome = _served(case, work, wide_checkpoint(case.arch), "bfloat16")
    record_property("distance", check_rounded_numbers(work, outcome, exact(case.arch)))


@pytest.mark.parametrize("case", TWO_RANK_CASES, ids=str)
def test_float32_matches_transformers(case: Case, tmp_path: Path) -> None:
    """Without rounding, all tokens are equal."""
    checkpoint = write_tiny_checkpoint(tmp_path, case.arch)
    work = workload(case)
    check_numbers(work, _served(case, work, checkpoint, "float32"), Reference(checkpoint))


def test_layers_of_14b_match_a_cpu(layers_of_14b: Path) -> None:
    """The layers alone, with several numbers of single tokens, and with a prompt."""
    prompt = random.Random(0).choices(range(VOCAB), k=900)
    sequences = [[token] for token in range(400)]
    batches = [*([sequence] for sequence in sequences[:32]), sequences[32:40], sequences[40:104], sequences[104:]]
    expected = all_logits(load(layers_of_14b), [*sequences, prompt])
    model = load(layers_of_14b, dtype=torch.bfloat16, device="cuda")
    logits = torch.cat([all_logits(model, batch) for batch in [*batches, [prompt]]])
    for rows in (slice(0, 32), slice(32, 40), slice(40, 104), slice(104, 400), slice(400, None)):
        assert distance(logits[rows], expected[rows]) <= ROUNDED


@pytest.mark.parametrize("budget", [16, 64, 1000, UNLIMITED])
@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_chunked_long_prompts_match_unchunked_ones(
    budget: int,
    arch: str,
    wide_checkpoint: Callable[[str], Path],
    exact: Callable[[str], Decoder],
    record_property: Callable[[str, object], None],
) -> None:
    asks = tuple(Ask(tuple(random.Random(length).choices(range(VOCAB), k=length)), 8) for length in PROMPTS)
    case = Case(arch, budget, "cold", True, 64, "others", False)
    work = Workload(0, asks)
    outcome, _ = serve_case(case, work, wide_checkpoint(arch), "cuda", "bfloat16")
    record_property("distance", check_rounded_numbers(work, outcome, exact(arch)))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("window", "budget"), [(33, UNLIMITED), (100, 64), (512, 1000)])
def test_a_sliding_window_matches_a_cpu(window: int, budget: int, head_dim: int, tmp_path: Path) -> None:
    """Prompts longer than the window, in chunks or whole, decode behind it, and a prefix from the cache."""
    checkpoint = write_wide_checkpoint(tmp_path, "mistral", head_dim=head_dim, config_extra={"sliding_window": window})
    prompts = [tuple(random.Random(length).choices(range(VOCAB), k=length)) for length in PROMPTS]
    asks = tuple(Ask(prompt, 40) for prompt in prompts)
    case = Case("mistral", budget, "hit", True, 64, "others", False)
    work = Workload(0, asks, earlier=(Ask(prompts[-1][:1500], 4),))
    outcome, stats = serve_case(case, work, checkpoint, "cuda", "bfloat16")
    check_rounded_numbers(work, outcome, load(checkpoint))
    assert outcome.cached[len(asks) - 1] == 1500 // 64 * 64
    assert stats.graph_replays or stats.decode_backend == "torch"


def test_a_float32_checkpoint_runs_in_bfloat16(tmp_path: Path) -> None:
    checkpoint = write_wide_checkpoint(tmp_path, "qwen3", dtype="float32")
    engine = create_engine(EngineConfig(model=str(checkpoint), device="cuda", num_pages=4, max_running=2))
    try:
        assert engine.runner.kv.groups[0].keys.dtype == torch.bfloat16
    finally:
        engine.close()
