"""Fill a model's parameters from a checkpoint."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from minisgl.layers.parameters import Parameters, Source
from minisgl.models.checkpoint import StoredTensor, check_tensor, stored_tensors
from minisgl.models.errors import ModelError

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Callback with (bytes read, bytes to read) of this rank; called from any thread, one call at a time."""


class _Read(NamedTuple):
    source: Source
    stored: StoredTensor
    num_bytes: int


def load_weights(
    parameters: Parameters, directory: str | Path, *, threads: int = 4, progress: Progress | None = None
) -> int:
    """Fill every parameter; returns the bytes read.

    Files are mapped into memory and each tensor is copied to its final place, so host memory does not grow with the
    model. Only this rank's part of a split tensor is read. All headers are checked before the first byte is read. One
    warning lists tensors that the model does not use. Raises ModelError.
    """
    tensors = stored_tensors(Path(directory))
    reads = [_plan(source, tensors) for source in parameters.sources]
    _warn_of_unknown(tensors, parameters)
    total = sum(read.num_bytes for read in reads)
    done = 0
    lock = threading.Lock()

    def advance(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            if progress is not None:
                progress(done, total)

    with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
        batches = list(_batches(reads, total // (4 * threads) + 1))
        for future in [pool.submit(_read_batch, batch, advance) for batch in batches]:
            try:
                future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    return total


def _plan(source: Source, tensors: dict[str, StoredTensor]) -> _Read:
    stored = check_tensor(source.name, source.shape, tensors)
    return _Read(source, stored, stored.bytes_of(source.into.numel()))


def _batches(reads: Sequence[_Read], target_bytes: int) -> Iterator[list[_Read]]:
    """Group reads of one file into runs of about `target_bytes`, so that one large file occupies all threads."""
    batch: list[_Read] = []
    size = 0
    for read in sorted(reads, key=lambda r: r.stored.file):
        if batch and (size >= target_bytes or read.stored.file != batch[0].stored.file):
            yield batch
            batch, size = [], 0
        batch.append(read)
        size += read.num_bytes
    if batch:
        yield batch


def _read_batch(batch: Sequence[_Read], advance: Callable[[int], None]) -> None:
    file = batch[0].stored.file
    name = ""
    try:
        # Inference mode is per thread, and the parameters may have been created in it.
        with torch.inference_mode(), safe_open(file, framework="pt") as handle:
            for source, _, num_bytes in batch:
                name = source.name
                source.into.copy_(handle.get_slice(name)[source.take])
                advance(num_bytes)
    except (SafetensorError, OSError) as error:
        raise ModelError(
            "corrupt_checkpoint", f"{file}: cannot read {name or 'it'}: {error}; download the file again"
        ) from error


def _warn_of_unknown(tensors: dict[str, StoredTensor], parameters: Parameters) -> None:
    unknown = unknown_tensors(tensors, parameters)
    if unknown:
        logger.warning(
            "the checkpoint has %d tensors that the model does not use: %s%s",
            len(unknown),
            ", ".join(unknown[:5]),
            ", …" if len(unknown) > 5 else "",
        )


def unknown_tensors(tensors: dict[str, StoredTensor], parameters: Parameters) -> list[str]:
    """Tensors that no parameter uses, except those derived from others: RoPE tables, a tied head."""
    known = {source.name for source in parameters.sources}
    return sorted(
        name for name in tensors.keys() - known if not name.endswith("rotary_emb.inv_freq") and name != "lm_head.weight"
    )
