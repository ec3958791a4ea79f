"""The same load as on a GPU, for a moment."""

from __future__ import annotations

from minisgl.engine.engine import create_engine
from support.random_load import RandomLoad, config
from support.tiny_checkpoint import tiny_checkpoint


def test_random_load_breaks_and_leaks_nothing() -> None:
    engine = create_engine(config(tiny_checkpoint(), "cpu", rows=6, longest=128, max_step_tokens=64))
    report = RandomLoad(engine, max_step_tokens=64, seed=0).run(seconds=4)
    engine.close()
    assert report.finished and report.aborted and report.retractions and report.cached_tokens
    assert report.mixed_steps and report.audited_pages and report.times_idle
