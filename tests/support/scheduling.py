"""Drive a scheduler with the hash model and collect the answer of each request."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from minisgl.config import SchedulerConfig
from minisgl.engine.interface import EngineLimits
from minisgl.scheduler.compiling import ConstraintCompiler
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.request import Phase
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.step_output import Failure, StepOutput
from minisgl.wire.messages import FINISH_REASONS, Submit, TokenLogprobs
from minisgl.wire.plan import StepPlan
from support.constrained import ToyGrammars, allowed_tokens, eos_ends
from support.messages import submit_of
from support.numerics.kv_engine import KvEngine, prompt_scores, reference
from support.scheduler_audit import check
from support.timed_engine import TimedEngine

VOCAB = 97
EOS = (7, 11)


@dataclass
class Answer:
    submit: Submit
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    cached: int = 0
    failure: Failure | None = None
    is_compiled: bool = False
    scores: list[float] = field(default_factory=list)
    prompt_scores: list[float] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        return list(map(int, np.frombuffer(self.submit.prompt, np.int32)))

    def expected(self) -> list[int]:
        eos = set() if self.submit.params.ignore_eos else set(EOS)
        eos |= set(self.submit.params.stop_token_ids)
        tokens = reference(
            self.prompt,
            self.submit.params.seed or 0,
            self.submit.params.max_tokens or 0,
            VOCAB,
            eos,
            lambda output: allowed_tokens(self.submit, output, VOCAB, EOS),
        )
        return self._until_grammar_ends(tokens) if self.submit.params.ignore_eos else tokens

    def _until_grammar_ends(self, tokens: list[int]) -> list[int]:
        """`tokens` up to an EOS that ends them although the request ignores EOS: the only token that was allowed."""
        for index, token in enumerate(tokens):
            if token in EOS and eos_ends(self.submit, tokens[:index]):
                return tokens[: index + 1]
        return tokens

    def check_scores(self) -> None:
        """Check the log-probabilities so far: none is missing between the first and the last."""
        if self.submit.params.logprobs is not None:
            assert self.scores == self.tokens
        else:
            assert not self.scores
        expected = prompt_scores(self.prompt) if self.submit.params.prompt_logprobs is not None else []
        assert self.prompt_scores == (expected if self.tokens else expected[: len(self.prompt_scores)])


class Harness:
    """A scheduler with the hash model behind a real step loop, and the answers that clients would receive."""

    def __init__(
        self,
        *,
        pages: int = 64,
        page_size: int = 4,
        rows: int = 8,
        max_model_len: int = 64,
        budget: int = 16,
        overlap: bool = True,
        cache: str = "radix",
        audit: bool = True,
        checks: bool = True,
        max_waiting: int = 1000,
        target_itl_ms: float = 0.0,
        step_graphs: tuple[tuple[int, int], ...] = (),
        step_seconds: Callable[[StepPlan], float] = lambda plan: 1e-3,
        window: int | None = None,
        window_pages: int = 0,
        checkpoints: int | None = None,
        checkpoints_per_row: int = 1,
        drafts: int = 0,
        draft_seed: int | None = None,
    ) -> None:
        """`step_seconds`: time that a step takes on a clock of the engine's own. `window`: that of some layers, with so
        many pages. `checkpoints`: those of recurrent states; None: no layer has one; the place of each row that is
        not in use has `checkpoints_per_row`. `drafts`: most drafts of a row;
        with `draft_seed` each row has a random number of them."""
        self.config = SchedulerConfig(
            num_pages=pages,
            page_size=page_size,
            window=window,
            num_window_pages=window_pages,
            state_checkpoints=checkpoints,
            checkpoints_per_row=checkpoints_per_row,
            max_running=rows,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            max_step_tokens=budget,
            overlap=overlap,
            cache=cache,  # type: ignore[arg-type]
            eos_token_ids=EOS,
            audit=audit,
            max_waiting=max_waiting,
            target_itl_ms=target_itl_ms,
            step_graphs=step_graphs,
            most_drafts=drafts,
            max_decode_rows=rows * (drafts + 1),
        )
        limits = EngineLimits(
            num_pages=pages,
            page_size=page_size,
            window=window,
            num_window_pages=window_pages,
            state_checkpoints=checkpoints,
            checkpoints_per_row=checkpoints_per_row,
            max_running=rows,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            eos_token_ids=EOS,
            most_drafts=drafts,
        )
        self.engine = KvEngine(limits)
        self.grammars = ToyGrammars(VOCAB)
        self.scheduler = Scheduler(self.config, compiler=cast(ConstraintCompiler, self.grammars))
        if draft_seed is not None:
            random = np.random.default_rng(draft_seed)
            numbers = lambda slots, most: random.integers(0, np.maximum(most, 0) + 1, dtype=np.int32)  # noqa: E731
            self.scheduler.drafts._numbers = numbers  # type: ignore[method-assign]
        self.timed = TimedEngine(self.engine, step_seconds)
        self.loop = StepLoop(self.scheduler, self.timed, self.timed.clock)
        self.answers: dict[bytes, Answer] = {}
        self.checks = checks
        self._ids = itertools.count(1)

    def submit(self, prompt: list[int], max_tokens: int = 8, **options: object) -> Answer:
        request_id = next(self._ids).to_bytes(16, "big")
        options.setdefault("seed", 0)
        message = submit_of(
            id=request_id,
            prompt=np.array(prompt, np.int32).tobytes(),
            max_tokens=max_tokens,
            **options,
        )
        self.scheduler.submit(message)
        self.answers[request_id] = Answer(message)
        return self.answers[request_id]

    def abort(self, answer: Answer) -> bool:
        return self.scheduler.abort(answer.submit.id)

    def step(self) -> StepOutput | None:
        output = self.loop.step()
        if self.checks:
            check(self.scheduler)
            self.check_in_flight()
        if output is not None:
            self._take(output)
        return output

    def run(self, steps: int = 10_000) -> None:
        """Run until all requests have ended."""
        for step in range(1, steps + 1):
            if not self.scheduler.has_work:
                return
            self.step()
            if step % 100 == 0:
                # Grammars are also compiled while steps run, which may go on as long as a request waits for its one.
                self.grammars.compile(1)
        raise AssertionError(f"not done after {steps} steps: {self.scheduler.counters}")

    def check_in_flight(self) -> None:
        """Check that the pages which launched steps may still write belong to their rows."""
        table, pool = self.scheduler.table, self.scheduler.pages.pool
        for plan in self.engine._queue:
            page = self.config.page_size
            slots = np.concatenate((plan.decode_slots, plan.prefill_slots)).tolist()
            starts = np.concatenate((plan.decode_positions, plan.prefill_starts)).tolist()
            lengths = [1] * len(plan.decode_slots) + plan.prefill_lengths.tolist()
            for slot, start, length in zip(slots, starts, lengths, strict=True):
                assert table.phase[slot] != Phase.EMPTY, f"row {slot} was released under step {plan.step}"
                written = table.page_table[slot, start // page : (start + length - 1) // page + 1]
                assert (pool.owner[written] != 0).all(), f"step {plan.step} writes a free page"
                if (windows := self.scheduler.pages.windows) is not None:
                    first = max(start - windows._window + 1, 0) // page
                    assert windows.first[slot] <= first, f"step {plan.step} reads a page that was released"
                    read = windows.table[slot, first : (start + length - 1) // page + 1]
                    assert (windows.pool.owner[read] != 0).all(), f"step {plan.step} reads a free page"

    def check_idle(self) -> None:
        """Check that no pages, locks, rows or table entries remain."""
        scheduler = self.scheduler
        check(scheduler)
        assert not scheduler.has_work
        assert not scheduler._unfinished
        assert scheduler.pages.available == self.config.num_pages
        assert scheduler.pages.used == 0
        assert not scheduler.table.unsettled
        assert all(request is None for request in scheduler.table.requests)

    def _take(self, output: StepOutput) -> None:
        for _, message in output.prompt_logprobs:
            answer = self.answers[message.id]
            assert not answer.tokens, "the prompt's scores come before the answer"
            assert message.start == len(answer.prompt_scores) + 1, "a score was lost or came twice"
            answer.prompt_scores += _scores(message.logprobs, answer.submit.params.prompt_logprobs or 0)
        for row in range(len(output.tokens)):
            answer = self.answers[output.ids[row].tobytes()]
            assert answer.finish is None and answer.failure is None, "a token after the end"
            assert int(output.index[row]) == len(answer.tokens), "a token was lost or came twice"
            answer.tokens.append(int(output.tokens[row]))
            answer.finish = FINISH_REASONS[int(output.finish[row])]
            answer.cached = int(output.cached[row])
            if row in output.logprobs:
                answer.scores += _scores(output.logprobs[row], answer.submit.params.logprobs or 0)
            answer.check_scores()
        for _, request_id in output.accepted:
            assert self.answers[request_id].submit.constraint.grammar
            self.answers[request_id].is_compiled = True
        for failure in output.failures:
            self.answers[failure.id].failure = failure


def _scores(message: TokenLogprobs, tops: int) -> list[float]:
    chosen: list[float] = np.frombuffer(message.chosen, "<f4").tolist()
    assert np.frombuffer(message.top_ids, "<i4").tolist() == list(range(tops)) * len(chosen)
    assert np.frombuffer(message.top, "<f4").tolist() == list(range(tops)) * len(chosen)
    return chosen
