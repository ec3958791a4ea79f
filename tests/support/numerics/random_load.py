"""Random load on a whole engine: bursts of requests with shared prefixes and all sampling parameters, aborts,
deadlines, and a pool so small that requests are preempted. Audits are on.

For longer than a test: `python -m support.numerics.random_load --minutes 8 --model qwen3-0.6b`.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import numpy as np
import torch

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.config import DEFAULT_PAGE_SIZE, Device, EngineConfig
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.cuda_engine import CudaEngine
from minisgl.launcher.devices import choose_device
from minisgl.scheduler.compiling import ConstraintCompiler
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.process import scheduler_config
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.step_output import StepOutput
from minisgl.wire.messages import FINISH_REASONS, REQUEST_ID_BYTES, Submit, Thinking
from minisgl.wire.plan import StepPlan
from support.constrained import ToyGrammar, ToyGrammars
from support.engines import create_engine
from support.messages import submit_of
from support.numerics.run import FreePages, free_pages
from support.scheduler_audit import check
from support.wrapped_engine import WrappedEngine

_CHECK_EVERY: Final = 32
"""Steps between two audits, which cost more than a step."""
_MOST_WAITING: Final = 4
"""Number of waiting requests for each row of the batch."""
_LEAKED_BYTES: Final = 8 << 20
"""Bytes of device memory that may be allocated late: buffers that only some requests need."""
_FACTOR: Final = 3
"""Of the toy grammars."""
_SETTLED: Final = 0.2
"""Share of the time after which all one-time allocations have happened."""


class Report(msgspec.Struct, kw_only=True):
    """Results of a run."""

    seconds: float = 0.0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    expired: int = 0
    steps: int = 0
    mixed_steps: int = 0
    graph_replays: int = 0
    eager_decode_steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    evicted_pages: int = 0
    times_idle: int = 0
    audited_pages: int = 0
    """Number of checks that found a free page full of NaN."""
    device_growth: int = 0
    """Growth of device memory in bytes, from the time when it had settled to the end."""
    host_growth: int = 0
    """The same for the maximum resident size of the process."""


@dataclass
class _Open:
    """A request that has not ended."""

    submit: Submit
    tokens: int = 0
    sum: int = 0
    """Sum of the tokens."""

    def allows(self, token: int, eos: frozenset[int]) -> bool:
        """Return whether the constraint of the request allows the token."""
        ends = eos.union(self.submit.params.stop_token_ids)
        allowed = self.submit.params.allowed_token_ids
        if allowed and token not in (ends.union(allowed) if self.submit.constraint.grammar else allowed):
            return False
        has_reasoning = self.submit.constraint.thinking is not None
        return not self.submit.constraint.grammar or has_reasoning or token in ends or (self.sum + token) % _FACTOR == 0


class _Audited(WrappedEngine[CpuEngine | CudaEngine]):
    """Engine that checks after some steps that free pages are full of NaN."""

    def __init__(self, engine: CpuEngine | CudaEngine, scheduler: Scheduler) -> None:
        super().__init__(engine)
        self.audited_pages = 0
        self._scheduler = scheduler
        self._free: dict[int, FreePages] = {}
        self._dirty = torch.zeros((), dtype=torch.int64, device=engine.runner.kv.groups[0].keys.device)
        engine.runner.logits_hook = self._look

    def launch(self, plan: StepPlan) -> Any:
        if plan.step % _CHECK_EVERY == 0 and len(plan.sampled_slots):
            # The plan has just been made: pages that are free now are poisoned by an earlier step or by this one.
            self._free[plan.step] = free_pages(self._scheduler)
        return self._engine.launch(plan)

    def check(self) -> None:
        assert int(self._dirty) == 0, f"{int(self._dirty)} values of pages that nobody owns are no NaN"

    def _look(self, plan: StepPlan, logits: torch.Tensor) -> None:
        del logits
        free = self._free.pop(plan.step, None)
        if free is None:
            return
        kv = self._engine.runner.kv
        full, window = (torch.from_numpy(part).long().to(self._dirty.device) for part in free)
        for group in kv.groups:
            pages = window if group.in_window else full
            for part in (group.keys, group.values):
                # One element of each position is enough: a position's heads are written together.
                self._dirty += part[:, pages, :, 0, 0].isnan().logical_not_().sum()
        self.audited_pages += free.total


class RandomLoad:
    """Run the load. `seed` determines the requests; their times depend on the machine as well. Raises AssertionError
    when anything is lost, repeated, leaked or wrong."""

    def __init__(self, engine: CpuEngine | CudaEngine, *, max_step_tokens: int, seed: int) -> None:
        limits = engine.limits
        self.report = Report()
        self._scheduler = Scheduler(
            scheduler_config(EngineConfig(model="", max_step_tokens=max_step_tokens, audit=True), limits),
            compiler=cast(ConstraintCompiler, ToyGrammars(limits.vocab_size, at_once=True)),
        )
        self._eos = frozenset(limits.eos_token_ids)
        self._engine = _Audited(engine, self._scheduler)
        self._loop = StepLoop(self._scheduler, self._engine)
        self._draw = random.Random(seed)
        self._prefixes = [self._tokens(1, limits.max_model_len // 2) for _ in range(8)]
        self._open: dict[bytes, _Open] = {}

    def run(self, seconds: float) -> Report:
        report = self.report
        began = time.monotonic()
        settled: tuple[int, int] | None = None
        while (elapsed := time.monotonic() - began) < seconds:
            self._burst()
            if self._draw.random() < 0.3:
                self._finish()
                if settled is None and elapsed > _SETTLED * seconds:
                    settled = _device_bytes(), _host_bytes()
        self._finish()
        report.seconds = time.monotonic() - began
        if settled is not None:
            report.device_growth, report.host_growth = _device_bytes() - settled[0], _host_bytes() - settled[1]
        counters, stats = self._scheduler.counters, self._engine.stats
        report.steps, report.mixed_steps = counters.steps, counters.mixed_steps
        report.graph_replays, report.eager_decode_steps = stats.graph_replays, stats.eager_decode_steps
        report.preemptions, report.cached_tokens = counters.preemptions, counters.cached_tokens
        report.generated_tokens, report.evicted_pages = counters.generated_tokens, counters.evicted_pages
        report.audited_pages = self._engine.audited_pages
        assert report.device_growth <= _LEAKED_BYTES, f"{report.device_growth} bytes of device memory leaked"
        return report

    def _burst(self) -> None:
        """Run some steps, with about this number of arrivals per step."""
        rate = self._draw.choice((0.05, 0.5, 4.0))
        for _ in range(self._draw.randint(10, 200)):
            while self._draw.random() < rate / (1 + rate) and self._has_room():
                self._submit()
            if self._open and self._draw.random() < 0.1 * min(rate, 1.0):
                self._abort()
            self._step()

    def _has_room(self) -> bool:
        return len(self._scheduler.queue) < _MOST_WAITING * self._engine.limits.max_running

    def _finish(self) -> None:
        """Run until all requests have ended; then the state must be as before."""
        scheduler = self._scheduler
        while scheduler.has_work:
            self._step()
        check(scheduler)
        assert not self._open, f"{len(self._open)} requests never ended"
        assert scheduler.pages.available == scheduler.config.num_pages, "pages were not given back"
        assert all(request is None for request in scheduler.table.requests)
        if self._draw.random() < 0.5:
            scheduler.flush_cache()
            assert scheduler.pages.pool.free == scheduler.config.num_pages, "the cache kept pages"
        self._engine.check()
        self.report.times_idle += 1

    def _step(self) -> None:
        scheduler = self._scheduler
        scheduler.now = time.monotonic()
        for failure in scheduler.expire():
            assert self._open.pop(failure.id).submit.remaining_ms
            self.report.expired += 1
        output = self._loop.step()
        if output is not None:
            self._take(output)
        if scheduler.counters.steps % _CHECK_EVERY == 0:
            check(scheduler)

    def _take(self, output: StepOutput) -> None:
        assert not output.failures, output.failures
        vocabulary = self._engine.limits.vocab_size
        for row, (index, token, finish) in enumerate(
            zip(output.index.tolist(), output.tokens.tolist(), output.finish.tolist(), strict=True)
        ):
            request_id = output.ids[row].tobytes()
            answer = self._open[request_id]
            assert index == answer.tokens, "a token was lost or came twice"
            assert 0 <= token < vocabulary
            assert (answer.submit.params.logprobs is not None) == (row in output.logprobs)
            if row in output.logprobs:
                assert np.isfinite(np.frombuffer(output.logprobs[row].chosen, "<f4")).all()
            assert answer.allows(token, self._eos)
            answer.tokens += 1
            answer.sum += token
            reason = FINISH_REASONS[finish]
            if reason is not None:
                submit = answer.submit
                assert (reason == "length") == (answer.tokens == submit.params.max_tokens) or reason == "stop"
                ignores_eos = submit.params.ignore_eos and not submit.constraint.grammar
                assert reason == "length" or not ignores_eos or token in submit.params.stop_token_ids
                del self._open[request_id]
                self.report.finished += 1

    def _abort(self) -> None:
        request_id = self._draw.choice(list(self._open))
        assert self._scheduler.abort(request_id)
        del self._open[request_id]
        self.report.aborted += 1

    def _submit(self) -> None:
        draw, limits = self._draw, self._engine.limits
        prefix = draw.choice(self._prefixes)
        shared = draw.choice((0, len(prefix) // 2, len(prefix)))
        prompt = [*prefix[:shared], *self._tokens(1, limits.max_model_len // 4)]
        room = limits.max_model_len - len(prompt)
        max_tokens = draw.randint(1, room if draw.random() < 0.1 else min(room, 64))
        submit = submit_of(
            id=self.report.requests.to_bytes(REQUEST_ID_BYTES, "big"),
            prompt=np.array(prompt, np.int32).tobytes(),
            max_tokens=max_tokens,
            seed=draw.getrandbits(62),
            ignore_eos=draw.random() < 0.7,
            priority=draw.choice((0, 0, 0, 1)),
            remaining_ms=draw.randint(1, 3000) if draw.random() < 0.05 else 0,
            cache_salt=draw.choice((b"", b"", b"", b"salt")),
            **self._sampling(max_tokens),
        )
        self._scheduler.submit(submit)
        self._open[submit.id] = _Open(submit)
        self.report.requests += 1

    def _sampling(self, max_tokens: int) -> dict[str, Any]:
        """Submit a request: half of them are typical, the others have random combinations of all parameters."""
        draw = self._draw
        given: dict[str, Any] = {"temperature": draw.choice((0.0, 0.6, 1.0))}
        if draw.random() < 0.5:
            return given
        for field, choices in (
            ("top_k", (1, 5, 50)),
            ("top_p", (0.1, 0.9)),
            ("min_p", (0.05, 0.5)),
            ("presence_penalty", (-2.0, 1.0)),
            ("frequency_penalty", (-1.0, 0.5)),
            ("repetition_penalty", (0.8, 1.2)),
            ("logprobs", (0, 3)),
            ("prompt_logprobs", (0, 2)),
            ("min_tokens", (1, max_tokens)),
            ("logit_bias", ({7: 5.0}, {3: -100.0, 11: 2.0})),
            ("stop_token_ids", ((5,), tuple(range(20, 60)))),
            ("grammar", tuple(ToyGrammar(_FACTOR, length, length // 2).text for length in (5, 200))),
            ("allowed_token_ids", (tuple(range(3, 90)),)),
            ("thinking", (Thinking(start=(8,), end=(6, 9), is_open=True, budget=4),)),
        ):
            if draw.random() < 0.2:
                given[field] = draw.choice(choices)
        return given

    def _tokens(self, shortest: int, longest: int) -> list[int]:
        count = self._draw.randint(shortest, longest)
        return self._draw.choices(range(self._scheduler.config.vocab_size), k=count)


def _device_bytes() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def _host_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def config(model: Path, device: Device, *, rows: int, longest: int, **settings: Any) -> EngineConfig:
    """Configuration of an engine whose pool holds only a third of what its rows may fill."""
    page = DEFAULT_PAGE_SIZE[device]
    return EngineConfig(
        model=str(model),
        device=device,
        page_size=page,
        num_pages=max(rows // 3, 1) * -(-longest // page),
        max_running=rows,
        max_model_len=longest,
        audit=True,
        **settings,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--model", default="qwen3-0.6b", help="directory, or a built-in configuration")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--quantization", choices=("fp8",), help="quantize the weights of the model in this format")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--longest", type=int, default=2048, help="prompt plus answer, in tokens")
    parser.add_argument("--max-step-tokens", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(args.model)
        if args.model in BUILTIN_CONFIGS:
            model = Path(folder)
            (model / "config.json").write_text(json.dumps(BUILTIN_CONFIGS[args.model]))
        engine = create_engine(
            config(
                model,
                choose_device(args.device, 1),
                rows=args.rows,
                longest=args.longest,
                max_step_tokens=args.max_step_tokens,
                quantization=args.quantization,
                dummy_weights=args.model in BUILTIN_CONFIGS,
            )
        )
    report = RandomLoad(engine, max_step_tokens=args.max_step_tokens, seed=args.seed).run(60 * args.minutes)
    engine.close()
    print(json.dumps(msgspec.to_builtins(report), indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
