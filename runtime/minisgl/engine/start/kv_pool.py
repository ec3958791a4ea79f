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
from minisgl.errors import EngineError
from minisgl.kernels.attention.stored_kv import KVScales

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
    """Bytes of one page, keys and values of all layers, on one rank."""
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


def num_pages_for_budget(
    parallel: TensorParallel, *, pool_bytes: int, bytes_per_page: int, pages_per_row: int, rows: int
) -> int:
    """Pages that every rank can hold, at most the number that `rows` sequences of `pages_per_row` pages can fill.

    `pool_bytes` is the memory for this rank's pool. Raises EngineError, on all ranks alike, when it is too small for a
    page on some rank.
    """
    available = parallel.gather_int(pool_bytes)
    pages = min(available) // bytes_per_page
    if pages < 1:
        smallest = available.index(min(available))
        raise EngineError(
            "out_of_memory",
            f"weights, graphs and activations leave rank {smallest} {min(available) / 2**20:.0f} MiB for the KV pool, "
            f"of which one page takes {bytes_per_page / 2**20:.2f} MiB; raise the memory fraction, lower the token "
            "budget of a step, or use more ranks or a smaller model",
        )
    return min(pages, rows * pages_per_row)


def allocate(groups: Sequence[KVGroup], *, scales: Sequence[KVScales], num_pages: int, audit: bool) -> KVPool:
    """A pool of `num_pages` pages and the dummy page. `scales`: of each layer of the model. Raises EngineError when the
    memory is not available."""
    device = groups[0].shape.device
    # Uninitialized on a CPU: pages of the operating system are only taken when they are written. On CUDA zeros, for
    # kernels that load whole pages and mask afterwards.
    new = torch.zeros if device.type == "cuda" else torch.empty
    found = []
    try:
        for of, layers in groups:
            size = (len(layers), num_pages + 1, *_page_shape(of))
            keys, values = (new(size, dtype=of.stored_dtype, device=device) for _ in range(2))
            found.append(PagedKV(keys, values, tuple(scales[layer] for layer in layers)))
    except RuntimeError as error:
        raise EngineError(
            "out_of_memory",
            f"a KV pool of {num_pages} pages ({(num_pages + 1) * page_bytes(groups) / 2**30:.1f} GiB) does not "
            f"fit: {error}; use fewer pages or a smaller memory fraction",
        ) from error
    for kv in found:
        kv.keys[:, kv.dummy_page].zero_()
        kv.values[:, kv.dummy_page].zero_()
    pool = KVPool(tuple(found))
    if audit:
        pool.poison(torch.arange(num_pages, device=device))
    return pool


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
