"""Random arrivals, chunks, EOS, lengths, aborts, preemptions, shared prefixes, deadlines and late engine effects.

After every step: no page or row has two owners, is lost, or is written after its release. At the end: no remains,
and every answer equal to that of the undisturbed run.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from minisgl.kv_layout import row_pages
from minisgl.scheduler import constrained, row_states, shared_prefixes, token_budget
from minisgl.wire.messages import Thinking
from minisgl.wire.plan import StepPlan
from support.constrained import ToyGrammar, allowed_tokens
from support.scheduling import EOS, VOCAB, Answer, Harness

# Limits that small tests reach; the hash model checks every group of a plan.
SMALL_GROUPS = {"MIN_GROUP_ROWS": 2, "MIN_SAVED_TOKENS": 1, "MIN_SAVED_SHARE": 0.0}
SMALL_CHUNKS = {"LEAST_TOKENS": 2, "LEAST_CHUNK": 1}
WRONG = ToyGrammar(factor=1, length=1, least=0, valid=False)
CONSTRAINTS: list[dict[str, Any]] = [
    {"grammar": ToyGrammar(factor=2, length=20, least=8).text},
    {"grammar": ToyGrammar(factor=7, length=3, least=3).text, "min_tokens": 1},
    {"grammar": ToyGrammar(factor=5, length=9, least=2).text, "allowed_token_ids": tuple(range(0, 90, 2))},
    {
        "grammar": ToyGrammar(factor=3, length=4, least=2).text,
        "thinking": Thinking(start=(50,), end=(60, 61), is_open=True, budget=3),
    },
    {"grammar": WRONG.text},
    {"thinking": Thinking(start=(50,), end=(60,), is_open=True, budget=2)},
    {"allowed_token_ids": (1, 2, 7), "bad_words": ((1, 2), (2, 1), (1, 1))},
    # May end in a contradiction.
    {"allowed_token_ids": (1, 2), "bad_words": ((1, 2), (2, 1), (2, 2), (7,), (11,))},
]


def step_seconds(plan: StepPlan) -> float:
    """10 ms, and 1 ms for each prompt token."""
    return 0.01 + 0.001 * len(plan.prefill_tokens)


class SchedulerMachine(RuleBasedStateMachine):
    harness: Harness

    def __init__(self) -> None:
        super().__init__()
        self.patches = [
            mock.patch.multiple(shared_prefixes, **SMALL_GROUPS),
            mock.patch.multiple(token_budget, **SMALL_CHUNKS),
            # Shorter prompts wait for their grammars.
            mock.patch.object(constrained, "AHEAD_TOKENS", 4),
            mock.patch.object(row_states, "CHUNK_TOKENS", 2),
        ]
        for patch in self.patches:
            patch.start()

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        slack=st.integers(0, 40),
        rows=st.integers(1, 6),
        budget=st.sampled_from([1, 3, 7, 16, 10_000]),
        target_itl_ms=st.sampled_from([0, 0, 1, 15, 18]),
        overlap=st.booleans(),
        cache=st.sampled_from(["radix", "radix", "naive"]),
        prefixes=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=14), min_size=1, max_size=3),
        window=st.sampled_from([None, None, 1, 2, 5, 8, 31]),
        window_slack=st.integers(0, 40),
        checkpoints=st.sampled_from([None, None, 0, 1, 3, 8, 30]),
        checkpoints_per_row=st.integers(1, 2),
        drafts=st.sampled_from([0, 0, 1, 3, 7]),
        draft_seed=st.sampled_from([None, 0, 1, 2]),
    )
    def start(
        self,
        page_size: int,
        slack: int,
        rows: int,
        budget: int,
        target_itl_ms: float,
        overlap: bool,
        cache: str,
        prefixes: list[list[int]],
        window: int | None,
        window_slack: int,
        checkpoints: int | None,
        checkpoints_per_row: int,
        drafts: int,
        draft_seed: int | None,
    ) -> None:
        max_model_len = 32
        if drafts:
            # Engines of such models do not speculate.
            window = checkpoints = None
        if checkpoints is not None:
            # No model has both.
            window = None
        least = 0 if window is None else min(max_model_len // page_size, row_pages(window, page_size) + 2)
        self.harness = Harness(
            pages=(max_model_len + slack) // page_size,
            page_size=page_size,
            rows=rows,
            max_model_len=max_model_len,
            budget=budget,
            target_itl_ms=target_itl_ms,
            step_graphs=((0, 4), (2, 6), (0, 8), (6, 8)),
            step_seconds=step_seconds,
            overlap=overlap,
            cache=cache,
            window=window,
            window_pages=least + window_slack // page_size if window is not None else 0,
            checkpoints=checkpoints,
            checkpoints_per_row=checkpoints_per_row,
            drafts=drafts,
            draft_seed=draft_seed,
        )
        self.prefixes = prefixes
        self.ended: set[bytes] = set()

    @rule(
        prefix=st.integers(0, 2),
        own=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        max_tokens=st.integers(1, 12),
        seed=st.integers(-2, 2),
        ignore_eos=st.booleans(),
        priority=st.integers(0, 1),
        deadline=st.sampled_from([0, 0, 0, 30]),
        stop=st.lists(st.integers(0, 96), max_size=8),
        logprobs=st.sampled_from([None, None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, None, 0, 1]),
        salt=st.sampled_from([b"", b"", b"a", b"b"]),
        tenant=st.sampled_from([b"", b"", b"a", b"b"]),
        stream=st.booleans(),
        constraint=st.sampled_from([{}, {}, *CONSTRAINTS]),
        is_known=st.booleans(),
    )
    def arrive(
        self,
        prefix: int,
        own: list[int],
        max_tokens: int,
        seed: int,
        ignore_eos: bool,
        priority: int,
        deadline: int,
        stop: list[int],
        logprobs: int | None,
        prompt_logprobs: int | None,
        salt: bytes,
        tenant: bytes,
        stream: bool,
        constraint: dict[str, Any],
        is_known: bool,
    ) -> None:
        self.harness.grammars.known = {constraint.get("grammar", "")} if is_known else set()
        self.harness.submit(
            [*self.prefixes[prefix % len(self.prefixes)], *own],
            max_tokens,
            seed=seed,
            ignore_eos=ignore_eos,
            priority=priority,
            remaining_ms=1000 * deadline,
            stop_token_ids=tuple(stop),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            cache_salt=salt,
            tenant=tenant,
            stream=stream,
            **constraint,
        )

    @rule(count=st.integers(1, 3))
    def compile(self, count: int) -> None:
        self.harness.grammars.compile(count)

    @rule(data=st.data())
    @precondition(lambda self: self.harness.answers)
    def abort(self, data: st.DataObject) -> None:
        answer = data.draw(st.sampled_from(list(self.harness.answers.values())))
        open_before = self._open(answer)
        assert self.harness.abort(answer) is open_before
        self.ended.add(answer.submit.id)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.harness.step()
            self._pass_time()

    def _pass_time(self) -> None:
        self.harness.scheduler.now += 1
        for failure in self.harness.scheduler.expire():
            answer = self.harness.answers[failure.id]
            assert self._open(answer)
            self.ended.add(failure.id)

    def _open(self, answer: Answer) -> bool:
        if answer.finish is not None or answer.failure is not None or answer.submit.id in self.ended:
            return False
        # It may have failed already: its client is told with the next step.
        return all(failure.id != answer.submit.id for failure in self.harness.scheduler._notices.failures)

    def teardown(self) -> None:
        try:
            self._finish()
        finally:
            for patch in self.patches:
                patch.stop()

    def _finish(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        self.harness.check_idle()
        for answer in self.harness.answers.values():
            expected = answer.expected()
            if answer.failure is not None and answer.submit.id not in self.ended:
                self._check_failure(answer, expected)
            elif answer.submit.id in self.ended and answer.finish is None:
                assert answer.tokens == expected[: len(answer.tokens)]
            else:
                assert answer.tokens == expected
                assert answer.finish == ("length" if len(expected) == answer.submit.params.max_tokens else "stop") or (
                    answer.finish == "stop" and len(expected) == answer.submit.params.max_tokens
                )

    def _check_failure(self, answer: Answer, expected: list[int]) -> None:
        """The only failures are those of constraints that cannot be satisfied."""
        assert answer.failure is not None
        if answer.failure.code == "invalid_grammar":
            assert answer.submit.constraint.grammar == WRONG.text and not answer.tokens
        else:
            assert answer.failure.code == "no_allowed_token" and answer.tokens == expected
            assert not allowed_tokens(answer.submit, expected, VOCAB, EOS)


SchedulerMachine.TestCase.settings = settings(
    max_examples=400, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# Other tests cover the lines; tracing would double the time.
TestSchedulerMachine = pytest.mark.timeout(900)(SchedulerMachine.TestCase)
