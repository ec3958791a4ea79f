"""Sequences of about the same length, which one call of torch's attention serves with little padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from minisgl.attention.packed_shape import PackedShape
from minisgl.attention.reference import attend
from minisgl.wire.plan import IntArray

_LEAST_SHARE: Final = 0.8
"""Least share of the longest sequence's length that another one of its group has."""
_ALONE_ON_CPU: Final = 64
"""Length from which a CPU takes longer to copy a sequence next to others than to call a kernel for it alone."""


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Sequences of one call, padded to the longest one."""

    count: int
    longest: int
    tokens: torch.Tensor | slice
    """Token of the step in each place [count * longest], in padding one of the same sequence."""
    real: torch.Tensor | None
    """Places that are no padding; None: all."""
    mask: torch.Tensor | None
    """[count, 1, 1, longest]: keys that are no padding; None: all."""

    def attend(
        self,
        shape: PackedShape,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of q [T, Hq, D] over k and v [T, Hkv, D] to `out` [T, Hq, D], for these sequences."""
        queries, keys, values = (
            part[self.tokens].unflatten(0, (self.count, self.longest)).transpose(1, 2) for part in (q, k, v)
        )
        attended = attend(
            queries,
            keys,
            values,
            # Padding comes behind each sequence, where a causal token does not look.
            mask=None if shape.causal else self.mask,
            causal=shape.causal,
            scale=shape.scale,
            softcap=shape.softcap,
            sinks=None if sinks is None else sinks[:, None],
        )
        attended = attended.transpose(1, 2).flatten(0, 1)
        if self.real is None:
            out[self.tokens] = attended
        else:
            assert isinstance(self.tokens, torch.Tensor)
            out[self.tokens[self.real]] = attended[self.real]


def group_by_length(lengths: IntArray, device: torch.device) -> list[LengthGroup]:
    """Groups of sequences of `lengths` [S] that lie one after the other."""
    alone = _ALONE_ON_CPU if device.type == "cpu" else np.inf
    order = np.argsort(-lengths, kind="stable")
    ordered = lengths[order].astype(np.int64)
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths)[order]
    groups, first = [], 0
    while first < len(ordered):
        longest = int(ordered[first])
        end = first + 1
        if longest < alone:
            end = int(np.searchsorted(-ordered, -_LEAST_SHARE * longest, side="right"))
        groups.append(_group(starts[first:end], ordered[first:end], longest, device))
        first = end
    return groups


def _group(starts: NDArray[np.int64], lengths: NDArray[np.int64], longest: int, device: torch.device) -> LengthGroup:
    count, equal = len(starts), int(lengths[-1]) == longest
    if equal and int(starts[-1] - starts[0]) == (count - 1) * longest and bool((np.diff(starts) > 0).all()):
        begin = int(starts[0])
        return LengthGroup(count, longest, slice(begin, begin + count * longest), None, None)
    places = np.arange(longest)
    tokens = _moved((starts[:, None] + np.minimum(places, lengths[:, None] - 1)).ravel(), device)
    if equal:
        return LengthGroup(count, longest, tokens, None, None)
    is_real = places < lengths[:, None]
    real, mask = (_moved(part, device) for part in (np.flatnonzero(is_real), is_real))
    return LengthGroup(count, longest, tokens, real, mask[:, None, None])


def _moved(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    # A copy from memory that is not pinned waits for the device.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
