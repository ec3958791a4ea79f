"""A short run of the load that GPUs run for longer."""

from __future__ import annotations

from minisgl.engine.engine import create_engine
from support.numerics.random_load import RandomLoad, Report, config
from support.tiny_checkpoint import tiny_checkpoint


def test_random_load_causes_no_errors_or_leaks() -> None:
    engine = create_engine(config(tiny_checkpoint(), "cpu", rows=6, longest=128, max_step_tokens=64))
    load = RandomLoad(engine, max_step_tokens=64, seed=0)
    report = load.run(seconds=4)
    while not _has_seen_all(report) and report.steps < 5000:
        # The number of requests in some seconds depends on the machine.
        report = load.run(seconds=2)
    engine.close()
    assert _has_seen_all(report), report


def _has_seen_all(report: Report) -> bool:
    counts = (report.finished, report.aborted, report.preemptions, report.cached_tokens, report.mixed_steps)
    return all((*counts, report.audited_pages, report.times_idle))
