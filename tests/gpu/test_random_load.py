"""A whole engine under random load, with every audit on."""

from __future__ import annotations

from pathlib import Path

from support.engines import create_engine
from support.numerics.random_load import RandomLoad, config


def test_random_load_causes_no_errors_or_leaks(checkpoint: Path) -> None:
    engine = create_engine(config(checkpoint, "cuda", rows=24, longest=512, max_step_tokens=1024))
    report = RandomLoad(engine, max_step_tokens=1024, seed=0).run(seconds=20)
    engine.close()
    assert report.preemptions and report.aborted and report.cached_tokens and report.evicted_pages
    assert report.mixed_steps and report.audited_pages
    assert report.graph_replays or engine.stats.decode_backend == "torch"
