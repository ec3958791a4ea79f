"""Sampling parameters of benchmarks: those of each measured variant, request by request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from minisgl.errors import BenchError
from minisgl.options import Fraction, Index, option
from minisgl.wire.messages import SamplingParams

VariantName = Literal["plain", "topk", "penalty", "logprobs", "mixed"]

_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters that differ from those of the workload. The fields have the names of `SamplingParams`."""

    temperature: Annotated[
        float | None, Meta(ge=0, le=2), option("temperature of all requests", default="that of the workload")
    ] = None
    top_k: Annotated[Index, option("keep the N most likely tokens", default="{}, all")] = 0
    top_p: Annotated[Fraction, option("keep the most likely tokens up to this sum of probabilities")] = 1.0
    min_p: Annotated[
        float, Meta(ge=0, le=1), option("keep tokens of at least this share of the largest probability", default="{:g}")
    ] = 0.0
    presence_penalty: Annotated[_Penalty, option("penalty of tokens that were generated before", default="{:g}")] = 0.0
    frequency_penalty: Annotated[
        _Penalty, option("penalty for each time that a token was generated before", default="{:g}")
    ] = 0.0
    repetition_penalty: Annotated[
        float, Meta(gt=0, le=2), option("divisor of the logits of tokens in prompt and answer", default="{:g}, none")
    ] = 1.0
    logprobs: Annotated[
        int | None,
        Meta(ge=0, le=20),
        option("report the log-probabilities of the N most likely tokens", default="no log-probabilities"),
    ] = None

    def given(self) -> dict[str, Any]:
        """Parameters that differ from the defaults, by name."""
        return {
            field.name: value
            for field in msgspec.structs.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    def applied_to(self, params: SamplingParams) -> SamplingParams:
        return msgspec.structs.replace(params, **self.given())


class Variant(NamedTuple):
    """One way to sample a workload."""

    name: str
    """Part of the names of the results, such as `topk` in `a_qwen3_0.6b_topk_tok_s`; `plain` is left out there."""
    sampling: tuple[Sampling, ...]
    """Request i takes entry i modulo their number."""

    @property
    def number(self) -> int:
        """Number among the variants that one engine can measure one after the other; 0 for the plain one."""
        return list(VARIANTS.values()).index(self) if self in VARIANTS.values() else 0

    def of_request(self, number: int) -> Sampling:
        return self.sampling[number % len(self.sampling)]


_PLAIN: Final = Sampling()
_TOP_K: Final = Sampling(top_k=20, top_p=0.95)
_PENALTY: Final = Sampling(presence_penalty=1.0, frequency_penalty=0.2)
_LOGPROBS: Final = Sampling(logprobs=5)

VARIANTS: Final[Mapping[VariantName, Variant]] = {
    "plain": Variant("plain", (_PLAIN,)),
    "topk": Variant("topk", (_TOP_K,)),
    "penalty": Variant("penalty", (_PENALTY,)),
    "logprobs": Variant("logprobs", (_LOGPROBS,)),
    "mixed": Variant("mixed", (_PLAIN, _TOP_K, _PENALTY, _LOGPROBS)),
}

PLAIN: Final = VARIANTS["plain"]


def variants(names: Sequence[VariantName], sampling: Sampling) -> tuple[Variant, ...]:
    """Variants to measure: those of `names`, or the one of the parameters `sampling`; without either the plain one.

    Parameters that no variant has get a name that lists them, so that their results are kept apart. Raises BenchError
    `bad_variants` when both are given.
    """
    given = sampling.given()
    if names and given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise BenchError("bad_variants", f"--variants has its own sampling parameters; leave out either it or {flags}")
    if names:
        return tuple(VARIANTS[name] for name in dict.fromkeys(names))
    for variant in VARIANTS.values():
        if variant.sampling == (sampling,):
            return (variant,)
    return (Variant("_".join(f"{name}{value:g}" for name, value in given.items()), (sampling,)),)
