"""Pages of layers with a window: held while a row reads them, released behind the window, found again in the cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from minisgl import bench
from minisgl.config import EngineConfig, SchedulerConfig
from minisgl.engine.interface import EngineLimits
from minisgl.kv_layout import row_pages
from minisgl.models.config import ModelConfig
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.pages import Owner
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.window_pages import WindowPages
from support.messages import submit_of
from support.scheduling import VOCAB, Harness
from support.timed_engine import TimedEngine

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "benchmarks"))
from stub_engine import StubEngine  # noqa: E402

WINDOW, PAGE = 8, 4


def harness(**changes: Any) -> Harness:
    options = {"pages": 100, "page_size": PAGE, "max_model_len": 200, "window": WINDOW, "window_pages": 100}
    return Harness(**(options | changes))


def windows(of: Harness) -> WindowPages:
    found = of.scheduler.pages.windows
    assert found is not None
    return found


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(12, VOCAB, length).tolist()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_long_answer_holds_the_pages_of_its_window(overlap: bool) -> None:
    served = harness(window_pages=10, overlap=overlap)
    answer = served.submit([50], 180, ignore_eos=True)
    most = 0
    while served.scheduler.has_work:
        served.step()
        most = max(most, 10 - windows(served).available)
    # One more while a step is launched behind one whose pages are not released yet.
    assert row_pages(WINDOW, PAGE) <= most <= row_pages(WINDOW, PAGE) + 1
    assert answer.tokens == answer.expected()
    served.check_idle()


def test_a_prompt_longer_than_the_pages_is_computed_in_parts() -> None:
    served = harness(window_pages=7, budget=1000)
    answer = served.submit(prompt(190), 5)
    served.run()
    assert answer.tokens == answer.expected()


def test_pages_of_a_launched_step_are_released_when_it_has_ended() -> None:
    served = harness(budget=40)
    served.submit(prompt(120), 4)
    served.step()
    held = windows(served)
    assert (int(held.first[0]), int(held.end[0])) == (0, 10)
    # The second step is launched, and the first one, which read all of its pages, has ended.
    served.step()
    first = (40 - WINDOW + 1) // PAGE - 1
    assert (int(held.first[0]), int(held.end[0])) == (first, 20)


def test_a_request_continues_a_long_answer() -> None:
    served = harness()
    first = served.submit(prompt(50), 60, ignore_eos=True)
    served.run()
    again = served.submit([*first.prompt, *first.tokens, 1, 2, 3], 5)
    served.run()
    # Its last token was sampled, and never computed.
    assert again.cached == (50 + 60 - 1) // PAGE * PAGE
    assert again.tokens == again.expected()


def test_a_prompt_that_parts_from_a_cached_one_continues_it_while_its_window_is_there() -> None:
    served = harness()
    long = prompt(100)
    served.submit(long, 1)
    served.run()
    other = served.submit([*long[:30], *prompt(20, 1)], 3)
    served.run()
    assert other.cached == 28 and other.tokens == other.expected()


def test_evicted_windows_shorten_the_prefix_until_a_request_has_computed_them_again() -> None:
    served = harness()
    long = prompt(100)
    served.submit(long, 1)
    served.run()
    held = windows(served)
    held._evict(len(held._queues[0]))
    parts = [*long[:30], *prompt(20, 1)]
    other = served.submit(parts, 3)
    served.run()
    # The window of a checkpoint, every four pages, was not evicted.
    assert other.cached == 16 and other.tokens == other.expected()
    again = served.submit([*parts[:29], 1, 2], 3)
    served.run()
    assert again.cached == 28 and again.tokens == again.expected()
    # The rest of the first prompt is still there.
    last = served.submit([*long, 5], 3)
    served.run()
    assert last.cached == 100 and last.tokens == last.expected()


def test_inner_pages_are_evicted_before_those_at_the_ends_of_requests() -> None:
    served = harness(window_pages=40)
    first = served.submit(prompt(60), 4)
    served.run()
    # Two prompts that take all pages but those kept.
    for seed in (1, 2):
        served.submit(prompt(120, seed), 1)
        served.run()
    again = served.submit([*first.prompt, *first.tokens, 1], 2)
    served.run()
    assert again.cached == 60 and again.tokens == again.expected()


def after_a_long_prompt() -> tuple[Harness, list[int], WindowPages]:
    """A harness that has served a prompt of four windows, and the prompt."""
    served = harness(window=40, window_pages=60)
    long = prompt(160)
    served.submit(long, 1)
    served.run()
    return served, long, windows(served)


def test_requests_part_behind_any_page_of_the_first_window() -> None:
    """The window is so wide that no other place of the prompt is kept."""
    served, long, held = after_a_long_prompt()
    held._evict(len(held._queues[0]))
    within = served.submit([*long[:22], *prompt(5, 1)], 3)
    served.run()
    assert within.cached == 20 and within.tokens == within.expected()
    behind = served.submit([*long[:100], *prompt(5, 2)], 3)
    served.run()
    assert behind.cached == 40 and behind.tokens == behind.expected()


def test_the_end_of_a_prompt_outlasts_its_first_window() -> None:
    served, long, held = after_a_long_prompt()
    held._evict(sum(map(len, held._queues[:2])))
    part = served.submit([*long[:22], 1], 3)
    served.run()
    assert part.cached == 0 and part.tokens == part.expected()
    last = served.submit([*long, 5], 3)
    served.run()
    assert last.cached == 160 and last.tokens == last.expected()


def test_prompts_that_need_all_pages_are_computed_in_turn() -> None:
    served = harness(window_pages=7, rows=4, budget=12)
    answers = [served.submit(prompt(60, seed), 2, ignore_eos=True) for seed in range(4)]
    served.run()
    assert all(answer.tokens == answer.expected() for answer in answers)
    served.check_idle()


def test_pages_of_an_answer_are_not_those_of_a_prompt_that_reads_the_same() -> None:
    """The prompt is cached, but its windows are not, when the answer's pages go to the cache."""
    served = harness()
    answer = served.submit(prompt(40), 21, ignore_eos=True).expected()
    served = harness()
    served.submit([*answer[:20], 1], 1)
    served.run()
    held = windows(served)
    held._evict(held.evictable)
    served.submit(prompt(40), 21, ignore_eos=True)
    served.run()
    same = served.submit([*answer[:20], 5], 3)
    served.run()
    assert same.tokens == same.expected()


def test_a_flush_frees_all_pages() -> None:
    served = harness()
    served.submit(prompt(100), 3)
    served.run()
    assert windows(served).pool.free < 100
    served.scheduler.flush_cache()
    assert windows(served).pool.free == 100
    served.check_idle()


def test_pages_of_a_damaged_row_are_not_found_again() -> None:
    """The row computes a prefix again, whose windows were evicted, and gives its own to the cache."""
    served = harness()
    long = prompt(60)
    served.submit(long, 1)
    served.run()
    held = windows(served)
    held._evict(held.evictable)
    damaged = served.submit([*long[:50], 1, 2, 3], 20, ignore_eos=True)
    while not damaged.tokens:
        served.step()
    served.engine.fail_logits_of = {0}
    served.run()
    assert damaged.failure is not None
    assert not (held.pool.owner == Owner.CACHE).any()
    served.check_idle()


def test_a_pool_that_cannot_hold_a_request_is_refused() -> None:
    with pytest.raises(ValueError, match="give the pool more memory"):
        harness(window_pages=5)


def _hit_rate(config: SchedulerConfig, trace: list[dict[str, Any]]) -> float:
    """Share of prompt tokens that are found in the cache when the requests of a trace come at their times."""
    scheduler = Scheduler(config)
    limits = EngineLimits(
        num_pages=config.num_pages,
        page_size=config.page_size,
        max_running=config.max_running,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=(),
    )
    engine = TimedEngine(StubEngine(limits), lambda plan: 0.05 + len(plan.prefill_tokens) * 60e-6)
    loop = StepLoop(scheduler, engine, engine.clock)
    waiting = [(request["timestamp"] / 1000, number, request) for number, request in enumerate(trace)]
    skipped = 0.0
    while waiting or scheduler.has_work:
        if not scheduler.has_work:
            skipped = max(skipped, waiting[0][0] - engine.clock())
        while waiting and waiting[0][0] <= engine.clock() + skipped:
            _, number, request = waiting.pop(0)
            blocks = np.array(request["hash_ids"])[:, None] * 7919 + np.arange(16) * 104_729
            tokens = (blocks.ravel()[: request["input_length"]] % config.vocab_size).astype(np.int32)
            message = submit_of(
                id=number.to_bytes(16, "big"),
                prompt=tokens.tobytes(),
                max_tokens=request["output_length"],
                seed=0,
                ignore_eos=True,
            )
            scheduler.submit(message)
        loop.step()
    assert scheduler.counters.finished == len(trace)
    return scheduler.counters.cached_tokens / scheduler.counters.prompt_tokens


@pytest.mark.parametrize(("model", "gib"), [("gpt-oss-20b", 4), ("gemma-4-31b", 65), ("gemma-4-31b", 150)])
def test_chats_are_found_in_the_cache_as_often_as_in_one_pool(model: str, gib: int, tmp_path: Path) -> None:
    """Replays a trace with pools that are too small for all of its prompts."""
    command = [sys.executable, str(ROOT / "benchmarks/chat_trace.py"), str(tmp_path / "trace"), "--requests", "300"]
    subprocess.run(command, check=True)
    trace = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    # Answers are short, since their steps take most of the test's time.
    trace = [request | {"output_length": -(-request["output_length"] // 4)} for request in trace]
    model_config = json.loads((Path(bench.__file__).parent / "configs" / f"{model}.json").read_text())
    layout = ModelConfig.parse(model_config).kv_layout(EngineConfig(model="", device="cuda"), 16_384)
    available = gib << 30
    pages = layout.pages_for(available)
    config = SchedulerConfig(
        num_pages=available // (layout.full_bytes + layout.window_bytes),
        page_size=layout.page_size,
        max_running=256,
        max_model_len=16_384,
        vocab_size=100_003,
        max_step_tokens=8448,
        overlap=True,
        cache="radix",
    )
    parts = replace(config, num_pages=pages.full, window=layout.window, num_window_pages=pages.window)
    one_pool = _hit_rate(config, trace)
    assert one_pool > 0.02
    found = _hit_rate(parts, trace)
    assert found >= one_pool, (found, one_pool)
