"""Conditions for the outcome of a case."""

from __future__ import annotations

from typing import Final

import torch

from minisgl.engine.interface import EngineStats
from minisgl.models.decoder import Decoder
from support.numerics.cases import Case
from support.numerics.ranks import all_logits
from support.numerics.reference import TOLERANCE, Reference
from support.numerics.run import Outcome, is_disturbed
from support.numerics.workload import ANSWER, Workload, cached_tokens

ROUNDED: Final = 1.5e-2
"""Largest distance of bfloat16's logits to float32's that counts as rounding, relative to their size (L2)."""
_ROUNDED_ROW: Final = 3e-2
"""The same for a single token."""
_DIVERGENCE: Final = 1e-3
"""Largest mean Kullback-Leibler divergence of a token's distribution that counts as rounding."""


def check_numbers(work: Workload, outcome: Outcome, reference: Reference) -> float:
    """Check that tokens and logits of all requests are those of the reference. Returns the largest difference of a
    logit."""
    asks = (*work.asks, *work.earlier)
    worst = 0.0
    for number, answer in enumerate(reference.answers(asks)):
        ask, decided = asks[number], answer.decided
        assert ask.sampling.temperature == 0
        if number == work.probe:
            assert decided == len(answer.tokens) == ANSWER, "rounding decides a token: the probe needs another prompt"
        if not ask.sampling.stop_token_ids:
            assert len(outcome.tokens[number]) == ask.max_tokens
        elif decided == len(answer.tokens):
            assert len(outcome.tokens[number]) == decided, f"request {number} did not end with its stop token"
        # Where rounding decides, answers may differ from here on. The logits of this token are still the same.
        compared = min(decided + 1, len(answer.tokens))
        logits = outcome.stacked((number, index) for index in range(compared))
        difference = (logits - answer.logits[:compared]).abs().amax(1)
        wrong = (~(difference <= TOLERANCE)).nonzero()[:, 0].tolist()
        assert not wrong, f"request {number}: logits of tokens {wrong} are off by {difference[wrong].tolist()}"
        assert outcome.tokens[number][:decided] == answer.tokens[:decided], f"request {number} got other tokens"
        worst = max(worst, float(difference.max()))
    return worst


@torch.inference_mode()
def check_rounded_numbers(work: Workload, outcome: Outcome, exact: Decoder) -> float:
    """Check that logits of all requests are those of `exact`, in float32, behind the same tokens, but for rounding to
    bfloat16; tokens are its greedy ones wherever that is more than rounding could change. Returns the relative
    distance."""
    keys, expected, logits = _both_logits(work, outcome, exact)
    error = logits - expected
    rows = error.norm(dim=1) / expected.norm(dim=1)
    assert float(rows.max()) <= _ROUNDED_ROW, f"request and token {keys[int(rows.argmax())]}: {float(rows.max()):.3g}"
    off = distance(logits, expected)
    assert off <= ROUNDED
    log_p, log_q = expected.log_softmax(1), logits.log_softmax(1)
    assert float((log_p.exp() * (log_p - log_q)).sum(1).mean()) <= _DIVERGENCE
    best = expected.topk(2)
    clear = best.values[:, 0] - best.values[:, 1] > 2 * error.abs().amax(1)
    tokens = torch.tensor([token for answer in outcome.tokens for token in answer])
    assert torch.equal(tokens[clear], best.indices[clear, 0])
    assert int(clear.sum()) > len(clear) // 2, "rounding decides most tokens: nothing was compared"
    return off


@torch.inference_mode()
def rounding(work: Workload, outcome: Outcome, exact: Decoder) -> float:
    """Distance of all logits to those of `exact`, in float32, behind the same tokens."""
    _, expected, logits = _both_logits(work, outcome, exact)
    return distance(logits, expected)


def _both_logits(
    work: Workload, outcome: Outcome, exact: Decoder
) -> tuple[list[tuple[int, int]], torch.Tensor, torch.Tensor]:
    """Request and number of each generated token, the logits of `exact`, and those that were served."""
    asks = (*work.asks, *work.earlier)
    answers = outcome.tokens
    assert [len(answer) for answer in answers] == [ask.max_tokens for ask in asks]
    sequences = [[*ask.prompt, *answer[:-1]] for ask, answer in zip(asks, answers, strict=True)]
    whole = all_logits(exact, sequences).split([len(sequence) for sequence in sequences])
    expected = torch.cat([logits[-len(answer) :] for logits, answer in zip(whole, answers, strict=True)])
    keys = [(number, index) for number, answer in enumerate(answers) for index in range(len(answer))]
    return keys, expected, outcome.stacked(keys)


def distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Distance of logits, on any device and of any type, to float32's on the CPU, relative to their size (L2)."""
    return float((logits.cpu().float() - expected).norm() / expected.norm())


def check_features(case: Case, work: Workload, outcome: Outcome, stats: EngineStats) -> None:
    """Check that the features of the case were on, so that it did not pass without them."""
    counters = outcome.counters
    assert outcome.cached[work.probe] == cached_tokens(case)
    assert stats.prefill_tokens == counters.prefill_tokens
    if case.preemption:
        assert counters.preemptions > 0
        assert is_disturbed(outcome), outcome.preempted_at
        # Preempted requests compute their tokens again, unless these are still in the cache.
        assert counters.prefill_tokens > counters.prompt_tokens - counters.cached_tokens
    else:
        assert counters.preemptions == 0
        assert counters.prefill_tokens == counters.prompt_tokens - counters.cached_tokens
    if case.overlap:
        # All but the last ones of each part of the workload, before which there was nothing left to launch.
        assert outcome.steps_ahead() >= 0.9 * counters.steps
    else:
        assert outcome.steps_ahead() == 0
    if case.company == "others":
        assert outcome.was_joined, "no step decoded the probe beside another's prompt"
        assert stats.mixed_steps == counters.mixed_steps > 0
        others = set(range(len(work.asks))) - {work.probe}
        assert len(others) == 32
        assert len(outcome.peers & others) >= 8 if case.preemption else outcome.peers == others
    assert outcome.audited_pages > 0, "there was no page that nobody owned"
    first_use = list(dict.fromkeys(outcome.pages))
    # A few pages may be in order by chance.
    assert len(first_use) < 6 or first_use != sorted(first_use), "pages were handed out in order"
