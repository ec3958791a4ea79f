"""Logits processors of rows in device memory: token counts, lists of biases and masks, and bitmasks."""

from __future__ import annotations

from typing import Final

import torch

_CAPACITY: Final = 64
"""Biases and masked tokens of a row that fit at first."""


class ProcessorTables:
    """Tables by slot, at addresses that a CUDA graph can keep. Only steps change them."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros((rows, vocab_size), dtype=torch.int16, device=device)
        """[rows, vocab] twice the number of times a row has generated a token, plus one if its prompt contains it; at
        most 32,767."""
        self.bitmask = torch.full((rows, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)
        """[rows, ⌈vocab / 32⌉] allowed tokens of rows with the stage BITMASKED, the lowest bit first."""
        self.lists = torch.zeros((rows, 2, _CAPACITY), dtype=torch.int32, device=device)
        """[rows, 2, capacity] ids and values: the biased tokens in ascending order with the float bits of their biases,
        then the masked tokens in ascending order."""
        self.lists_address = torch.zeros(2, dtype=torch.int64, device=device)
        """Address and capacity of `lists`, which kernels read because the lists may grow."""
        self._set_address()

    @staticmethod
    def num_bytes(rows: int, vocab_size: int) -> int:
        """Device memory of the tables without longer lists."""
        return rows * (2 * vocab_size + 4 * -(-vocab_size // 32) + 8 * _CAPACITY)

    def reserve(self, entries: int) -> None:
        """Make room for lists of this length."""
        rows, _, capacity = self.lists.shape
        if entries > capacity:
            lists = self.lists.new_zeros((rows, 2, 1 << (entries - 1).bit_length()))
            lists[:, :, :capacity] = self.lists
            # Steps in flight still read the old memory; it is not reused before they end, since all run on one stream.
            self.lists = lists
            self._set_address()

    def set_lists(
        self, slots: torch.Tensor, index: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, longest: int
    ) -> None:
        """Store entries [N] at `index` of the lists of `slots`; `longest`: the length of the longest list."""
        self.reserve(longest)
        place = slots.long(), index.long()
        self.lists[:, 0].index_put_(place, ids)
        self.lists[:, 1].index_put_(place, values)

    def set_counts(
        self, cleared: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Forget the counts of the slots `cleared`, then store `counts` [N] of `tokens` of `slots`, each pair once."""
        self.counts.index_fill_(0, cleared.long(), 0)
        self.counts.index_put_((slots.long(), tokens.long()), counts.short())

    def set_bitmasks(self, slots: torch.Tensor, masks: torch.Tensor) -> None:
        """Store `masks` [N, ⌈vocab / 32⌉] of `slots`."""
        self.bitmask.index_copy_(0, slots.long(), masks)

    def _set_address(self) -> None:
        self.lists_address[0].fill_(self.lists.data_ptr())
        self.lists_address[1].fill_(self.lists.shape[2])
