"""Token embedding and output head, split over the ranks by rows of the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.layers.weights.dense import DenseWeight
from minisgl.layers.weights.parameters import Parameters


class VocabularyShard:
    """This rank's rows [start, start + size) of the vocabulary, equally many on every rank.

    Rows of the last ranks may be padding behind the end of the vocabulary: it is zero and never sampled.
    """

    def __init__(self, vocab_size: int, parallel: TensorParallel) -> None:
        self.vocab_size = vocab_size
        self.size = -(-vocab_size // parallel.size)
        self.start = parallel.rank * self.size
        self.real = max(0, min(self.size, vocab_size - self.start))

    def new_weight(self, parameters: Parameters, name: str, hidden: int) -> torch.Tensor:
        weight = parameters.new(self.size, hidden)
        weight[self.real :].zero_()
        rows = slice(self.start, self.start + self.real)
        parameters.add_source(f"{name}.weight", (self.vocab_size, hidden), weight[: self.real], rows)
        return weight


class VocabParallelEmbedding:
    """[T] token ids to [T, hidden]; the rank that owns a token's row contributes it, other ranks contribute zero."""

    def __init__(
        self, parameters: Parameters, name: str, hidden: int, shard: VocabularyShard, parallel: TensorParallel
    ) -> None:
        self._parallel = parallel
        self._shard = shard
        self.weight = shard.new_weight(parameters, name, hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._parallel.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self._shard.start
        elsewhere = (local < 0) | (local >= self._shard.size)
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self._parallel.all_reduce_sum(rows.masked_fill_(elsewhere.unsqueeze(-1), 0))


class LMHead:
    """[S, hidden] to [S, size of the shard]: the logits of this rank's rows."""

    def __init__(
        self, weight: torch.Tensor, shard: VocabularyShard, divisor: float = 1.0, softcap: float | None = None
    ) -> None:
        """`divisor`: of the logits; `softcap`: c of c · tanh(logit / c)."""
        self.weight = DenseWeight(weight)
        self._shard = shard
        self._divisor, self._softcap = divisor, softcap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.weight.product(hidden)
        if self._divisor != 1.0:
            logits = logits / self._divisor
        if self._softcap is not None:
            logits = (torch.tanh(logits.float() / self._softcap) * self._softcap).to(logits.dtype)
        # Lowest finite value, not −inf: a check for finite logits must not trip over the padding.
        logits[:, self._shard.real :] = torch.finfo(logits.dtype).min
        return logits
