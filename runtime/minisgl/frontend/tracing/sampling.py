"""Which traces are recorded. A process that begins a trace chooses; those after it follow. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from minisgl.frontend.tracing.context import Parent

DEFAULT_SHARE: Final = 0.1
SAMPLER_VARIABLE: Final = "OTEL_TRACES_SAMPLER"
ARGUMENT_VARIABLE: Final = "OTEL_TRACES_SAMPLER_ARG"

_PARENT_BASED: Final = "parentbased_"
_BITS: Final = 64
"""Low bits of a number that decide, as in the libraries of OpenTelemetry."""
_RANGE: Final = 1 << _BITS
_LOW_BITS: Final = _RANGE - 1
_BY_SHARE: Final = "traceidratio"
_SHARES: Final[Mapping[str, float | None]] = {"always_on": 1.0, "always_off": 0.0, _BY_SHARE: None}
"""Shares by the name of a sampler; None: its argument."""


class SamplerError(ValueError):
    """The variables name no sampler."""


class Sampler(NamedTuple):
    """`share` of the traces that begin here is recorded, from 0 to 1. `by_parent`: a request that belongs to a trace
    is recorded if its parent is, whoever says so."""

    share: float
    by_parent: bool

    def records(self, number: int, parent: Parent | None, *, is_trusted: bool = False) -> bool:
        """Return whether a request is recorded. `number`: a random one. `is_trusted`: the parent is a gateway's, and no
        client's."""
        if parent is not None and (self.by_parent or is_trusted):
            return parent.is_sampled
        return number & _LOW_BITS < self.share * _RANGE


def make_sampler(share: float | None, variables: Mapping[str, str]) -> Sampler:
    """Return the sampler of the flag `share`, or of OpenTelemetry's variables without it; whether clients have a say is
    in the variable alone. Raises SamplerError."""
    given = variables.get(SAMPLER_VARIABLE, "").strip()
    if share is not None:
        return Sampler(share, by_parent=given != _BY_SHARE)
    name = given or f"{_PARENT_BASED}{_BY_SHARE}"
    known = name.removeprefix(_PARENT_BASED)
    if known not in _SHARES:
        names = ", ".join((*_SHARES, *(f"{_PARENT_BASED}{each}" for each in _SHARES)))
        raise SamplerError(f"{SAMPLER_VARIABLE}={name} is not known; set one of {names}")
    found = _SHARES[known]
    return Sampler(_argument(variables) if found is None else found, name.startswith(_PARENT_BASED))


def _argument(variables: Mapping[str, str]) -> float:
    text = variables.get(ARGUMENT_VARIABLE, "").strip()
    if not text:
        # Libraries record all traces then, which is too many for a server.
        return DEFAULT_SHARE
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise SamplerError(f"{ARGUMENT_VARIABLE}={text} is not a number from 0 to 1")
    return share
