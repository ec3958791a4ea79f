"""Size and memory of the paged KV pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from minisgl.attention.backend import AttentionShape
from minisgl.attention.batch import KVPool, PagedKV
from minisgl.attention.select import KVGroup
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.engine.tables import Tables
from minisgl.errors import EngineError
from minisgl.kernels.attention.stored_kv import KVScales
from minisgl.kv_layout import KVLayout, PoolPages

_CPU_SHARE: Final = 0.25
"""Share of the available memory of a machine without GPU, for all its ranks together."""

_LARGEST_IMBALANCE: Final = 0.1

_CGROUP: Final = Path("/sys/fs/cgroup")
_CGROUP_FILES: Final = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Files with limit and usage of the container's memory, in version 2 and version 1 of cgroups."""


def page_bytes(groups: Sequence[KVGroup]) -> int:
    """Bytes of one page, keys and values of all layers of these groups, on one rank."""
    return sum(2 * len(layers) * math.prod(_page_shape(of)) * of.stored_dtype.itemsize for of, layers in groups)


def _page_shape(shape: AttentionShape) -> tuple[int, int, int]:
    """Shape of the keys of a page in one layer."""
    return shape.page_size, shape.kv_heads, shape.head_dim


def check_memory_balance(free: list[int]) -> None:
    """Compare the `free` bytes of all ranks' devices before loading. Raises EngineError, on all ranks alike, when they
    differ too much."""
    if min(free) < (1 - _LARGEST_IMBALANCE) * max(free):
        listed = ", ".join(f"rank {rank}: {bytes_ / 2**30:.1f} GiB" for rank, bytes_ in enumerate(free))
        raise EngineError(
            "memory_imbalance",
            f"free memory differs by more than {_LARGEST_IMBALANCE:.0%} between the ranks ({listed}), and every rank "
            "gets the pool of the smallest; stop other processes that use these devices",
        )


def pages_for_budget(parallel: TensorParallel, layout: KVLayout, pool_bytes: int) -> PoolPages:
    """Pages that every rank can hold.

    `pool_bytes` is the memory for this rank's pool. Raises EngineError, on all ranks alike, when it is too small for a
    page on some rank.
    """
    available = parallel.gather_int(pool_bytes)
    pages = layout.pages_for(min(available))
    if pages.full < 1:
        smallest = available.index(min(available))
        page = layout.full_bytes + layout.window_bytes
        states = layout.pool_bytes(PoolPages(0, 0))
        taken = f" and recurrent states take {states / 2**20:.0f} MiB (lower --max-running)" if states else ""
        raise EngineError(
            "out_of_memory",
            f"weights, graphs and activations leave rank {smallest} {min(available) / 2**20:.0f} MiB for the KV pool, "
            f"of which one page takes {page / 2**20:.2f} MiB{taken}; raise the memory fraction, lower the token "
            "budget of a step, or use more ranks or a smaller model",
        )
    return pages


def allocate(groups: Sequence[KVGroup], *, scales: Sequence[KVScales], pages: PoolPages, audit: bool) -> KVPool:
    """A pool of `pages`, with a dummy page of each kind. `scales`: of each layer of the model. Raises EngineError when
    the memory is not available."""
    device = groups[0].shape.device
    # Uninitialized on a CPU: pages of the operating system are only taken when they are written. On CUDA zeros, for
    # kernels that load whole pages and mask afterwards.
    new = torch.zeros if device.type == "cuda" else torch.empty
    found = []
    try:
        for of, layers in groups:
            in_window = of.window is not None
            size = (len(layers), (pages.window if in_window else pages.full) + 1, *_page_shape(of))
            keys, values = (new(size, dtype=of.stored_dtype, device=device) for _ in range(2))
            found.append(PagedKV(keys, values, tuple(scales[layer] for layer in layers), in_window))
    except RuntimeError as error:
        raise EngineError(
            "out_of_memory",
            f"a KV pool of {pages.full} pages ({pool_bytes(groups, pages) / 2**30:.1f} GiB) does not "
            f"fit: {error}; use fewer pages or a smaller memory fraction",
        ) from error
    for kv in found:
        kv.keys[:, kv.dummy_page].zero_()
        kv.values[:, kv.dummy_page].zero_()
        if audit:
            kv.poison(torch.arange(kv.dummy_page, device=device))
    return KVPool(tuple(found))


def new_tables(
    kv: KVPool,
    max_running: int,
    pages_per_row: int,
    vocab_size: int,
    *,
    has_states: bool = False,
    decode_rows: int = 0,
    text_length: int = 0,
) -> Tables:
    """Tables whose rows all have the dummy pages of the pool. `has_states`: layers have recurrent states. The others:
    see Tables."""
    device, dummy = kv.groups[0].keys.device, kv.dummy_page(in_window=False)
    dummy_window = kv.dummy_page(in_window=True) if kv.has_windows else None
    has_chunks = has_states and device.type == "cuda"
    return Tables(
        *(max_running, pages_per_row, dummy, vocab_size, device, dummy_window),
        has_chunks=has_chunks,
        decode_rows=decode_rows,
        text_length=text_length,
    )


def pool_bytes(groups: Sequence[KVGroup], pages: PoolPages) -> int:
    """Bytes of a pool on one rank, with its dummy pages."""
    return sum(
        page_bytes([group]) * (1 + (pages.full if group.shape.window is None else pages.window)) for group in groups
    )


def free_memory(device: torch.device) -> int:
    """Free bytes of the device, or the memory available to this process on a machine without GPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _available_ram()


def cpu_pool_bytes(available: int, ranks: int) -> int:
    """Bytes for the pool of each of `ranks` processes on a machine without GPU."""
    return int(available * _CPU_SHARE) // ranks


def _available_ram() -> int:
    available = 1 << 62
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
    for names in _CGROUP_FILES:
        try:
            limit, used = ((_CGROUP / name).read_text(encoding="ascii").strip() for name in names)
        except OSError:
            continue
        return available if limit == "max" else min(available, max(int(limit) - int(used), 0))
    return available
