"""Workloads of `minisgl bench offline`, with the same tokens that other systems were measured with."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Annotated, Final, Literal

import msgspec

from minisgl.bench.roofline import Roofline
from minisgl.bench.sampling import PLAIN, Variant
from minisgl.errors import BenchError
from minisgl.options import Count, option
from minisgl.wire.messages import SamplingParams

WorkloadName = Literal["A", "C", "C64", "D", "L"]

_TOKEN_RANGE: Final = 10_000
"""Largest token id of prompts, unless the vocabulary is smaller."""

_SHARED_PREFIX: Final = 2048
_SHARED_OWN: Final = 128
_SHARED_OUTPUT: Final = 128
_STREAM_PROMPT: Final = 4
_STREAM_OUTPUT: Final = 1024
_SINGLE_CONTEXT: Final = 1024
_STREAMS: Final = 64
LONG_OUTPUT: Final = 257
"""Tokens behind the prompt of L: the first one, and 256 whose time is measured."""


class Workload(msgspec.Struct, frozen=True):
    """Requests in the order in which they are submitted, all at the same time."""

    prompts: list[list[int]]
    output_lengths: list[int]
    temperature: float

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.output_lengths)

    def uncached(self, run: int, vocabulary: int) -> Workload:
        """The same requests with another first token of each prompt, so that the prefix cache of an engine that has
        run them with another number `run` has none of them. Prompts with a common beginning keep one."""
        tokens = min(_TOKEN_RANGE, vocabulary - 1) + 1
        prompts = [[(first + run) % tokens, *rest] for first, *rest in self.prompts]
        return msgspec.structs.replace(self, prompts=prompts)

    def params(self, variant: Variant = PLAIN, longest_output: int | None = None) -> list[SamplingParams]:
        """Sampling parameters of each request; answers have at most `longest_output` tokens."""
        return [
            variant.of_request(number).applied_to(
                SamplingParams(
                    max_tokens=length if longest_output is None else min(length, longest_output),
                    temperature=self.temperature,
                    ignore_eos=True,
                    seed=number,
                )
            )
            for number, length in enumerate(self.output_lengths)
        ]


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a workload: A uses the first three, D the number of requests, L the last one, C and C64 none."""

    requests: Annotated[Count, option("number of requests of A and D", default="{} requests")] = msgspec.field(
        default=256, name="num_requests"
    )
    input_length: Annotated[
        tuple[Count, Count],
        option(
            "range of the lengths of prompts of A, or one length", default="{0[0]} to {0[1]} tokens", metavar="MIN MAX"
        ),
    ] = msgspec.field(default=(100, 1024), name="input_len")
    output_length: Annotated[
        tuple[Count, Count],
        option(
            "range of the lengths of answers of A, or one length", default="{0[0]} to {0[1]} tokens", metavar="MIN MAX"
        ),
    ] = msgspec.field(default=(100, 1024), name="output_len")

    context_length: Annotated[Count, option("length of the prompt of L", default="{} tokens")] = msgspec.field(
        default=100_000, name="context_len"
    )

    def check(self) -> None:
        """Raise BenchError `bad_range` if a minimum exceeds its maximum."""
        for flag, (low, high) in (("--input-len", self.input_length), ("--output-len", self.output_length)):
            if low > high:
                raise BenchError("bad_range", f"{flag} {low} {high}: the minimum exceeds the maximum")


def independent(sizes: Sizes, vocabulary: int, seed: int) -> Workload:
    """A: prompts and answers of random lengths, without shared prefixes."""
    rng = random.Random(seed)
    prompts = [_tokens(rng, rng.randint(*sizes.input_length), vocabulary) for _ in range(sizes.requests)]
    return Workload(prompts, [rng.randint(*sizes.output_length) for _ in range(sizes.requests)], 0.6)


def single_stream(sizes: Sizes, vocabulary: int, seed: int) -> Workload:
    """C: a single request."""
    del sizes
    return _streams(1, vocabulary, seed)


def many_streams(sizes: Sizes, vocabulary: int, seed: int) -> Workload:
    """C64: 64 requests like that of C at the same time, so that nearly all steps decode 64 rows."""
    del sizes
    return _streams(_STREAMS, vocabulary, seed)


def _streams(count: int, vocabulary: int, seed: int) -> Workload:
    rng = random.Random(seed)
    prompts = [_tokens(rng, _STREAM_PROMPT, vocabulary) for _ in range(count)]
    return Workload(prompts, [_STREAM_OUTPUT] * count, 0.1)


def shared_prefix(sizes: Sizes, vocabulary: int, seed: int) -> Workload:
    """D: all prompts begin with the same 2,048 tokens, which differ from those of other seeds."""
    rng = random.Random(seed)
    prefix = _tokens(rng, _SHARED_PREFIX, vocabulary)
    prompts = [prefix + _tokens(rng, _SHARED_OWN, vocabulary) for _ in range(sizes.requests)]
    return Workload(prompts, [_SHARED_OUTPUT] * sizes.requests, 0.6)


def long_context(sizes: Sizes, vocabulary: int, seed: int) -> Workload:
    """L: a single request with a long prompt."""
    prompt = _tokens(random.Random(seed), sizes.context_length, vocabulary)
    return Workload([prompt], [LONG_OUTPUT], 0.6)


WORKLOADS: Final[Mapping[WorkloadName, Callable[[Sizes, int, int], Workload]]] = {
    "A": independent,
    "C": single_stream,
    "C64": many_streams,
    "D": shared_prefix,
    "L": long_context,
}


def roofline_tokens_per_second(name: WorkloadName, workload: Workload, roofline: Roofline) -> float:
    """Output tokens per second at the roofline F1."""
    match name:
        case "A" | "C64" | "L":
            lengths = [len(prompt) for prompt in workload.prompts]
            return workload.output_tokens / roofline.offline(lengths, workload.output_lengths)
        case "C":
            # As published: one step in the middle of a long answer.
            return 1 / roofline.decode(1, _SINGLE_CONTEXT)
        case "D":
            return workload.output_tokens / roofline.shared_prefix(
                requests=len(workload.prompts), prefix=_SHARED_PREFIX, own=_SHARED_OWN, output=_SHARED_OUTPUT
            )


def _tokens(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    highest = min(_TOKEN_RANGE, vocabulary - 1)
    return [rng.randint(0, highest) for _ in range(count)]
