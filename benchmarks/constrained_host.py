"""CPU time of the step loop's thread in constrained decode steps: `python benchmarks/constrained_host.py`.

Grammars, scheduler and plans are real, and each plan is packed for the device as an engine does it. The stub of the
engine samples at random from the masks when it gets them. The times are those of the loop's own thread, in µs per step;
`fill` runs on other threads, for which the loop waits here: otherwise they would disturb it on few cores. `free` are
the same rows without constraints.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, Final

import numpy as np
import torch

from constrained import twenty_fields, write_checkpoint
from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.config import EngineConfig
from minisgl.engine.batch import PackedStep
from minisgl.engine.interface import EngineLimits
from minisgl.engine.tables import Tables
from minisgl.grammar.build import build
from minisgl.grammar.grammars import Grammars
from minisgl.scheduler.compiling import ConstraintCompiler
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.mask_thread import MaskThread, Task
from minisgl.scheduler.process import scheduler_config
from minisgl.scheduler.scheduler import Scheduler
from minisgl.wire.messages import AnswerConstraint, SamplingParams, Submit
from minisgl.wire.plan import IntArray, StepPlan, StepResult
from minisgl.wire.text import StructuredOutput
from stub_engine import StubEngine

_PROMPT_TOKENS: Final = 64
_TOKENS: Final = 240
_FIRST_STEPS: Final = 20
"""Steps before those that count."""


class _SamplingEngine(StubEngine):
    """Packs each plan. Samples allowed tokens at random, on the thread that gives the masks."""

    def __init__(self, limits: EngineLimits, seed: int) -> None:
        super().__init__(limits)
        pages = -(-limits.max_model_len // limits.page_size)
        self._tables = Tables(limits.max_running, pages, 0, limits.vocab_size, torch.device("cpu"))
        self._buffer = np.empty(1 << 20, np.int32)
        self._masks = np.empty((limits.max_running, -(-limits.vocab_size // 32)), np.int32)
        self._draw = np.random.default_rng(seed)
        self._sampled: dict[int, IntArray] = {}

    def launch(self, plan: StepPlan) -> StepPlan:
        packed = PackedStep(plan, self._tables)
        packed.write(self._buffer[: packed.size])
        return super().launch(plan)

    def mask_memory(self, rows: int) -> IntArray:
        return self._masks[:rows]

    def sample(self, handle: StepPlan, masks: IntArray) -> None:
        tokens = np.empty(len(masks), np.int32)
        for row, mask in enumerate(masks):
            words = np.flatnonzero(mask)
            word = int(self._draw.choice(words))
            bits = np.flatnonzero(np.unpackbits(mask[word : word + 1].view(np.uint8), bitorder="little"))
            tokens[row] = 32 * word + int(self._draw.choice(bits))
        self._sampled[handle.step] = tokens

    def collect(self, handle: StepPlan) -> StepResult:
        tokens = self._sampled.pop(handle.step, None)
        return super().collect(handle) if tokens is None else StepResult(handle.step, tokens)


class _Parts:
    """CPU time of the calling thread in parts of steps, in µs."""

    def __init__(self, loop: StepLoop) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)
        scheduler, engine = loop.scheduler, loop.engine
        parts: list[tuple[Any, str, str]] = [
            (scheduler, "plan", "plan"),
            (engine, "launch", "pack"),
            (scheduler, "advance", "advance"),
            (loop, "_fill_others", "begin to fill"),
            (scheduler, "output", "output"),
            (scheduler.constrained, "consume", "consume"),
            (scheduler.constrained, "fill_masks", "fill"),
            (loop, "_finish_filling", "finish filling"),
            (loop, "step", "step"),
        ]
        for owner, name, part in parts:
            if hasattr(owner, name):
                setattr(owner, name, self._timed(getattr(owner, name), part))
        for thread in (loop._thread, loop._open_thread):
            setattr(thread, "start", _started_and_done(thread))  # noqa: B010

    def _timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        times = self.times[part]

        def timed(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                times.append(1e6 * (time.thread_time() - began))

        return timed


def _started_and_done(thread: MaskThread) -> Callable[[Task], None]:
    start = thread.start

    def started(task: Task) -> None:
        start(task)
        assert thread._shared is not None
        with thread._shared.done:
            pass

    return started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    config = dict(BUILTIN_CONFIGS["qwen3-0.6b"])
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), config)
        vocab, eos = config["vocab_size"], config["vocab_size"] - 300
        compiler = ConstraintCompiler(lambda: Grammars(folder, vocab, (eos,)))
        limits = EngineLimits(
            num_pages=64 * args.rows,
            page_size=16,
            max_running=args.rows,
            max_model_len=1024,
            vocab_size=vocab,
            eos_token_ids=(eos,),
        )
        text = build(StructuredOutput("json", json.dumps(twenty_fields())))
        for kind, grammar in (("constrained", text), ("free", "")):
            totals: dict[str, list[float]] = defaultdict(list)
            for run in range(args.repeat + 1):
                times = _run(limits, compiler, grammar, run)
                # The first run warms up.
                for part, values in times.items() if run else ():
                    totals[part] += values
            print(f"{kind}: number, 10th percentile, median, mean; µs of CPU time per step")
            for part, values in totals.items():
                figures = (quantiles(values, n=10)[0], median(values), fmean(values))
                print(f"  {part:>16}  {len(values):5}  " + "  ".join(f"{figure:7.1f}" for figure in figures))
        compiler.close()


def _run(limits: EngineLimits, compiler: ConstraintCompiler, grammar: str, seed: int) -> dict[str, list[float]]:
    scheduler = Scheduler(scheduler_config(EngineConfig(model=""), limits), compiler=compiler)
    loop = StepLoop(scheduler, _SamplingEngine(limits, seed))
    draw = np.random.default_rng(seed)
    for row in range(limits.max_running):
        prompt = draw.integers(1000, 100_000, _PROMPT_TOKENS, dtype=np.int32).tobytes()
        scheduler.submit(
            Submit(
                id=row.to_bytes(16, "big"),
                prompt=prompt,
                params=SamplingParams(max_tokens=_TOKENS, seed=row, ignore_eos=not grammar),
                constraint=AnswerConstraint(grammar=grammar),
            )
        )
    while scheduler.has_work and scheduler.table.num_in_use < limits.max_running:
        scheduler.now = time.monotonic()
        loop.step()
    for _ in range(_FIRST_STEPS):
        loop.step()
    parts = _Parts(loop)
    while scheduler.has_work and scheduler.table.num_in_use == limits.max_running:
        scheduler.now = time.monotonic()
        loop.step()
    times = {part: values for part, values in parts.times.items() if values}
    while scheduler.has_work:
        loop.step()
    return times


if __name__ == "__main__":
    main()
