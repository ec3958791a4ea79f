"""Size of the recurrent state of a layer."""

from __future__ import annotations

from typing import NamedTuple


class StateShape(NamedTuple):
    """State of a sequence in one layer, on one rank: the last inputs of a convolution over time, and a matrix for each
    head."""

    kernel_size: int
    """Tokens that the convolution looks at, the present one included."""
    channels: int
    heads: int = 0
    """0: there are no matrices."""
    key_dim: int = 0
    value_dim: int = 0

    def num_bytes(self, number_bytes: int) -> int:
        """Bytes, where an input of the convolution takes `number_bytes`; matrices are in float32."""
        return self._input_numbers * number_bytes + 4 * self._matrix_numbers

    def row_bytes(self, number_bytes: int) -> int:
        """Bytes of its place in that of a row, which can have several checkpoints instead."""
        inputs = self.checkpoints_per_row(number_bytes) * self._input_numbers
        return inputs * number_bytes + 4 * self._matrix_numbers

    def checkpoints_per_row(self, number_bytes: int) -> int:
        """Checkpoints that the place of a row can have: their matrices have numbers of `number_bytes`, as activations
        do."""
        return 4 // number_bytes if self._matrix_numbers else 1

    @property
    def _input_numbers(self) -> int:
        return (self.kernel_size - 1) * self.channels

    @property
    def _matrix_numbers(self) -> int:
        return self.heads * self.key_dim * self.value_dim
