"""One request with a long prompt: time to its first token, and time per token behind it."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from minisgl.bench.roofline import Forward, Roofline
from minisgl.bench.sampling import Variant
from minisgl.bench.workloads import Sizes, Workload, long_context
from minisgl.errors import BenchError
from minisgl.wire.messages import SamplingParams

if TYPE_CHECKING:
    from minisgl.offline import LLM

_WARM_UP_SHARE = 10
"""The prompt of the warm-up is shorter by this factor."""


def measure(llm: LLM, sizes: Sizes, seeds: Sequence[int], variant: Variant) -> dict[str, float]:
    """Run workload L once per seed after a warm-up; returns medians over the seeds.

    The time per token is the difference of two runs behind the cached prompt, with one token and with all of them.
    """
    vocabulary = llm.limits.vocab_size
    shorter = msgspec.structs.replace(sizes, context_length=max(1, sizes.context_length // _WARM_UP_SHARE))
    warm_up = long_context(shorter, vocabulary, seeds[-1] + 1)
    [params] = warm_up.params(variant)
    _run(llm, warm_up, params, 2)
    firsts, tpots = [], []
    for seed in seeds:
        workload = long_context(sizes, vocabulary, seed).uncached(variant.number, vocabulary)
        tokens = workload.output_lengths[0]
        firsts.append(_run(llm, workload, params, 1))
        again = _run(llm, workload, params, 1)
        tpots.append((_run(llm, workload, params, tokens) - again) / (tokens - 1) * 1000)
        print(f"L, seed {seed}: {firsts[-1]:.2f} s to the first token, then {tpots[-1]:.2f} ms", file=sys.stderr)
    return {
        "first_token_seconds": statistics.median(firsts),
        "first_token_seconds_min": min(firsts),
        "first_token_seconds_max": max(firsts),
        "first_token_again_seconds": again,
        "tpot_ms": statistics.median(tpots),
        "tpot_ms_min": min(tpots),
        "tpot_ms_max": max(tpots),
        "runs": len(seeds),
        "first_seed": seeds[0],
    }


def roofline_times(sizes: Sizes, roofline: Roofline) -> dict[str, float]:
    """The same times at the roofline F1."""
    return {
        "first_token_seconds": roofline.forward(Forward.of_prompts([sizes.context_length])),
        "tpot_ms": roofline.decode(1, sizes.context_length) * 1000,
    }


def _run(llm: LLM, workload: Workload, params: SamplingParams, tokens: int) -> float:
    """Seconds of the request with an answer of `tokens` tokens. Raises BenchError `bad_answer`."""
    began = time.perf_counter()
    [output] = llm.generate(workload.prompts, msgspec.structs.replace(params, max_tokens=tokens), progress=False)
    seconds = time.perf_counter() - began
    if output.finish_reason != "length":
        raise BenchError("bad_answer", f"the answer failed: {output.error}")
    return seconds
