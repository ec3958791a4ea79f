"""Interfaces of attention backends. A step may use two: one for its decode rows, one for its prefill segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from minisgl.attention.batch import AttentionBatch, PagedKV
from minisgl.errors import CodedError


class BackendUnavailable(CodedError, ValueError):
    """The requested backend cannot serve this model on this device."""

    def __init__(self, message: str) -> None:
        super().__init__("attention_backend_unavailable", message)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes that decide which kernels fit. Head counts are per rank."""

    query_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages_per_row: int
    dtype: torch.dtype
    device: torch.device
    kv_dtype: torch.dtype | None = None
    """Data type of the KV pool; None: `dtype`."""
    window: int | None = None
    """Last positions that a token attends to, its own included; None: all, also when no sequence is longer."""
    scale: float | None = None
    """Factor of scores; None: head_dim ** -0.5."""
    softcap: float | None = None
    """c of c · tanh(score / c)."""
    sinks: bool = False
    """Heads have sinks, see `interface.Attention`."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """Data type of keys and values in the pool."""
        return self.kv_dtype or self.dtype

    @property
    def score_scale(self) -> float:
        """Factor of the products of queries and keys."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads


class DecodeBackend(Protocol):
    """Attention of rows with one query token each.

    Per step: `prepare` (host work, never captured), `begin` (device work that all layers share, captured in a
    CUDA graph), then `decode` once per layer.
    """

    name: str

    def for_graph(self, size: int) -> DecodeBackend | None:
        """A backend whose device work for exactly `size` rows can be captured once and replayed after a new
        `prepare`; None when this backend cannot be captured."""
        ...

    def prepare(self, batch: AttentionBatch) -> None: ...

    def begin(self, batch: AttentionBatch) -> None: ...

    def decode(
        self, layer: int, kv: PagedKV, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        """Write the attention of `q` [D, Hq, D] to `out` [D, Hq, D]. `sinks` [Hq]: given if the shape has them."""
        ...

    def backend_for(self, rows: int, *, mixed: bool) -> str:
        """Name of the backend that computes `rows` rows; `mixed`: in a step with prefill segments."""
        ...


class PrefillBackend(Protocol):
    """Causal attention of segments. Keys and values of all tokens of the step are in the pool when it runs."""

    name: str

    @property
    def most_graph_keys(self) -> int:
        """Most keys of all segments of a captured step; 0: this backend cannot be captured."""
        ...

    def for_graph(self, tokens: int, segments: int, *, prefix: bool) -> PrefillBackend | None:
        """A backend whose device work for exactly `tokens` tokens in `segments`, some of them empty, can be captured
        once and replayed for segments of other lengths; `prefix`: also for those that begin behind one. None when
        this backend cannot be captured."""
        ...

    def prepare(self, batch: AttentionBatch) -> None: ...

    def begin(self, batch: AttentionBatch) -> None: ...

    def prefill(
        self,
        layer: int,
        kv: PagedKV,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Write the attention of `q` [T', Hq, D] to `out` [T', Hq, D]; `k` and `v` [T', Hkv, D] are the keys
        and values of the same T' prefill tokens, for kernels that read no prefix from the pool; like the numbers of
        the pool, they still have to be multiplied by the layer's scales."""
        ...

    def backend_for(self, *, prefix: bool) -> str:
        """Name of the backend that computes a segment; `prefix`: one that does not begin at position 0."""
        ...
