"""Random batches over a paged pool, and what attention must give for them, computed densely in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from minisgl.attention.backend import AttentionShape, DecodeBackend, PrefillBackend
from minisgl.attention.batch import AttentionBatch, PagedKV
from minisgl.attention.cascade import CascadeLayout
from minisgl.attention.cascade_backend import CascadeDecode
from minisgl.attention.paged import PagedAttention
from minisgl.kernels.attention.rotation import Rotation
from minisgl.kernels.attention.stored_kv import FP8, KVScales, as_stored, put
from minisgl.wire.shared_prefixes import SharedPrefix


@dataclass(frozen=True)
class Sequences:
    """D decode rows by their lengths, then P segments by (start, length). A segment with `shares` reads its prefix
    from the pages of the segment of that number, which is stored in the same step. The decode rows of a group of
    `prefixes` have their first pages in common."""

    decode: Sequence[int] = ()
    segments: Sequence[tuple[int, int]] = ()
    shares: Sequence[int | None] = ()
    prefixes: Sequence[SharedPrefix] = ()


def attention_shape(
    *,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    longest: int,
    dtype: torch.dtype,
    device: str,
    window: int | None = None,
    kv_dtype: torch.dtype | None = None,
    sinks: bool = False,
) -> AttentionShape:
    return AttentionShape(
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pages_per_row=-(-longest // page_size),
        dtype=dtype,
        device=torch.device(device),
        window=window,
        kv_dtype=kv_dtype,
        sinks=sinks,
    )


def small_shape(
    page_size: int = 16, window: int | None = None, kv_dtype: torch.dtype | None = None, sinks: bool = False
) -> AttentionShape:
    """A shape for backends on a CPU, with sequences of up to 256 tokens."""
    return attention_shape(
        query_heads=4,
        kv_heads=2,
        head_dim=16,
        page_size=page_size,
        longest=256,
        dtype=torch.float32,
        device="cpu",
        window=window,
        kv_dtype=kv_dtype,
        sinks=sinks,
    )


class DenseCase:
    """A pool whose unowned pages and unwritten positions are NaN, a batch over it, and the right answer. Behind windows
    page tables refer to unowned pages."""

    def __init__(self, shape: AttentionShape, sequences: Sequences, seed: int = 0, *, nan_tails: bool = True) -> None:
        """`nan_tails`: positions of a sequence's last page that are not written yet hold NaN as well; False: zero."""
        self.shape = shape
        self._prefixes = sequences.prefixes
        random = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        device, dtype, page = shape.device, shape.dtype, shape.page_size
        lengths = [*sequences.decode, *(start + length for start, length in sequences.segments)]
        counts = [-(-length // page) for length in lengths]
        num_pages = sum(counts) + 7
        free = random.permutation(num_pages).tolist()
        rows = len(lengths)
        self.slots = random.permutation(rows + 3)[:rows].astype(np.int32)
        table = np.full((rows + 4, shape.pages_per_row), num_pages, np.int32)
        owned = [[free.pop() for _ in range(count)] for count in counts]
        shares = list(sequences.shares) or [None] * len(sequences.segments)
        for index, other in enumerate(shares):
            if other is not None:
                start = sequences.segments[index][0]
                assert start % page == 0 and shares[other] is None and start <= sum(sequences.segments[other])
                d = len(sequences.decode)
                owned[d + index][: start // page] = owned[d + other][: start // page]
        for prefix in sequences.prefixes:
            for row in prefix.rows:
                assert prefix.pages * page < lengths[row], "a row's own token is never shared"
                owned[row][: prefix.pages] = owned[prefix.rows[0]][: prefix.pages]
        for slot, pages in zip(self.slots, owned, strict=True):
            table[slot, : len(pages)] = pages
        if shape.window is not None:
            # Pages behind the window of a sequence's first token are not its own any more.
            first = [*(length - 1 for length in sequences.decode), *(start for start, _ in sequences.segments)]
            for slot, query in zip(self.slots, first, strict=True):
                table[slot, : max(query - shape.window + 1, 0) // page] = free[0]

        size = (1, num_pages + 1, page, shape.kv_heads, shape.head_dim)
        keys, values = torch.full(size, torch.nan), torch.full(size, torch.nan)
        if not nan_tails:
            used = sorted({p for pages in owned for p in pages})
            keys[:, used] = values[:, used] = 0.0
        new_tokens = [(length - 1, 1) for length in sequences.decode] + list(sequences.segments)
        sources = [None] * len(sequences.decode) + [
            None if other is None else len(sequences.decode) + other for other in shares
        ]
        self._history = [
            tuple(torch.randn(length, shape.kv_heads, shape.head_dim, generator=generator).to(dtype) for _ in "kv")
            for length in lengths
        ]
        for prefix in sequences.prefixes:
            for row in prefix.rows[1:]:
                for mine, theirs in zip(self._history[row], self._history[prefix.rows[0]], strict=True):
                    mine[: prefix.pages * page] = theirs[: prefix.pages * page]
        queries, locations = [], []
        for index, ((start, length), pages) in enumerate(zip(new_tokens, owned, strict=True)):
            total = start + length
            at = np.array(pages, np.int64)[np.arange(total) // page] * page + np.arange(total) % page
            source = sources[index]
            for pool, mine, theirs in zip(
                (keys, values), self._history[index], self._history[source or 0], strict=True
            ):
                if source is None:
                    pool[0].flatten(0, 1)[at[:start]] = mine[:start].float()
                else:
                    mine[:start] = theirs[:start]
            queries.append(torch.randn(length, shape.query_heads, shape.head_dim, generator=generator).to(dtype))
            locations.append(at[start:])
        new_keys, new_values = (
            [history[kind][start:] for (start, _), history in zip(new_tokens, self._history, strict=True)]
            for kind in (0, 1)
        )
        self._starts = [start for start, _ in new_tokens]
        self.q, self.k, self.v = (torch.cat(part).to(device) for part in (queries, new_keys, new_values))
        self.sinks = torch.linspace(-2.0, 6.0, shape.query_heads, dtype=dtype, device=device) if shape.sinks else None
        self.locations = torch.from_numpy(np.concatenate(locations)).to(device)
        self.scales = KVScales(0.03, 0.07) if shape.stored_dtype == FP8 else KVScales()
        self.kv = PagedKV(
            self._stored(keys.to(dtype), self.scales.key).to(device),
            self._stored(values.to(dtype), self.scales.value).to(device),
            (self.scales,),
        )

        d = len(sequences.decode)
        prefill_lengths = np.array([length for _, length in sequences.segments], np.int32)
        offsets = np.concatenate(([0], np.cumsum(prefill_lengths))).astype(np.int32)

        def tensor(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values.astype(np.int32)).to(device)

        self.batch = AttentionBatch(
            page_table=tensor(table),
            decode_slots=tensor(self.slots[:d]),
            decode_lengths=tensor(np.array(sequences.decode)),
            prefill_slots=tensor(self.slots[d:]),
            query_offsets=tensor(offsets),
            prefill_kv_lengths=tensor(np.array(lengths[d:])),
            host_decode_lengths=np.array(sequences.decode, np.int32),
            host_prefill_starts=np.array([start for start, _ in sequences.segments], np.int32),
            host_prefill_lengths=prefill_lengths,
        )
        self.queries = queries

    def store(self) -> None:
        """Put the new tokens' keys and values into the pool, as `run` does."""
        for pool, new in ((self.kv.keys, self.k), (self.kv.values, self.v)):
            scale = self.scales.key if pool is self.kv.keys else self.scales.value
            put(pool[0].flatten(0, 1), self.locations, self._stored(new, scale))

    def _stored(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return as_stored(x, self.shape.stored_dtype, scale)

    def use_prefixes(self, layout: CascadeLayout) -> None:
        """Give the batch its cascade tables."""
        packed = torch.from_numpy(layout.pack(self._prefixes, self.batch.num_decode))
        tables = layout.view(packed.to(self.shape.device), self.batch.num_decode)
        self.batch = replace(self.batch, cascade=tables)

    def run(self, prefill: PrefillBackend, decode: DecodeBackend, cascade: CascadeDecode | None = None) -> torch.Tensor:
        """[T, Hq * D] as the backends give it."""
        attention = PagedAttention(self.kv, prefill, decode, cascade)
        attention.prepare(self.batch)
        attention.begin(self.batch, self.locations)
        no_turn = torch.zeros(len(self.q), self.shape.head_dim, device=self.shape.device)
        no_turn[:, : self.shape.head_dim // 2] = 1.0
        return attention.attend(0, self.q, self.k, self.v, Rotation(no_turn), self.sinks)

    def expected(self) -> torch.Tensor:
        """[T, Hq * D] float64 on the CPU."""
        results = []
        for start, q, (k, v) in zip(self._starts, self.queries, self._history, strict=True):
            group = self.shape.group
            wide_k = (self._stored(k, self.scales.key).double() * self.scales.key).repeat_interleave(group, 1)
            wide_v = (self._stored(v, self.scales.value).double() * self.scales.value).repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q.double(), wide_k) * self.shape.head_dim**-0.5
            distance = torch.arange(start, len(k))[:, None] - torch.arange(len(k))[None]
            hidden = (distance < 0) | (distance >= (self.shape.window or len(k)))
            scores = scores.masked_fill(hidden, -torch.inf)
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks.double().cpu()[:, None, None].expand(-1, len(q), 1)), dim=-1)
            weights = scores.softmax(-1)[..., : len(k)]
            results.append(torch.einsum("hqk,khd->qhd", weights, wide_v).flatten(1))
        return torch.cat(results)
