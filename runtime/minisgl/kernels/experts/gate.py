"""Activations between the two products of an expert, as its kernels take them. Does not import triton."""

from __future__ import annotations

from typing import Final, NamedTuple


class Gate(NamedTuple):
    """gate · sigmoid(alpha · gate) · up; with a `limit`, gate is at most that, up between it and its negative, and
    1 is added to up."""

    alpha: float = 1.0
    limit: float = 0.0
    """0: nothing is limited or added."""
    gelu: bool = False
    """GELU, by tanh, of the gate in place of gate · sigmoid(alpha · gate)."""
    gated: bool = True
    """False: the first product has no gate; its values become relu(up)²."""


SILU: Final = Gate()
GELU_TANH: Final = Gate(gelu=True)
RELU_SQUARED: Final = Gate(gated=False)
