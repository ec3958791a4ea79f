"""Fill a model's parameters from a checkpoint."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from minisgl.layers.weights.allocate import KINDS
from minisgl.layers.weights.formats import BLOCK, WeightFormat, unsupported_quantization
from minisgl.layers.weights.parameters import Parameters, Source, in_order
from minisgl.layers.weights.weight import NotFiniteError
from minisgl.models.checkpoint import StoredTensor, check_tensor, stored_tensors
from minisgl.models.errors import ModelError
from minisgl.models.kv_scales import is_kv_scale

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Callback with (bytes read, bytes to read) of this rank; called from any thread, one call at a time."""


_CHUNK_WEIGHTS: Final = 1 << 24
"""Quantized weights that are read at a time: the numbers in between take many times the memory of the stored ones."""


class _Read(NamedTuple):
    source: Source
    stored: Mapping[str, StoredTensor]
    """Tensors of the source, by name."""
    num_bytes: int

    @property
    def file(self) -> Path:
        """File of its first tensor; others may be in other files."""
        return next(iter(self.stored.values())).file


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
    stored = {name: check_tensor(name, spec, tensors) for name, spec in source.tensors.items()}
    taken = (len(range(*part.indices(size))) for part, size in zip(source.take, source.shape, strict=True))
    share = math.prod(taken) / math.prod(source.shape)
    return _Read(source, stored, sum(round(each.bytes_of(math.prod(each.shape)) * share) for each in stored.values()))


def _batches(reads: Sequence[_Read], target_bytes: int) -> Iterator[list[_Read]]:
    """Group reads of one file into runs of about `target_bytes`, so that one large file occupies all threads."""
    batch: list[_Read] = []
    size = 0
    for read in sorted(reads, key=lambda r: r.file):
        if batch and (size >= target_bytes or read.file != batch[0].file):
            yield batch
            batch, size = [], 0
        batch.append(read)
        size += read.num_bytes
    if batch:
        yield batch


def _read_batch(batch: Sequence[_Read], advance: Callable[[int], None]) -> None:
    # Inference mode is per thread, and the parameters may have been created in it.
    with torch.inference_mode(), ExitStack() as stack:
        files = _OpenFiles(stack)
        for read in batch:
            if read.source.format is None:
                read.source.into.copy_(files.read(read.stored, read.source.name, read.source.take))
            else:
                _fill(read, read.source.format, files)
            if read.source.order is not None:
                read.source.into.copy_(in_order(read.source.into, read.source.order))
            advance(read.num_bytes)


class _OpenFiles:
    """Weight files that a thread has mapped."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._handles: dict[Path, Any] = {}

    def read(self, stored: Mapping[str, StoredTensor], name: str, take: tuple[slice, ...]) -> torch.Tensor:
        """The part `take` of a tensor; all of it without slices. Raises ModelError."""
        file = stored[name].file
        try:
            if file not in self._handles:
                self._handles[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            handle = self._handles[file]
            tensor: torch.Tensor = handle.get_slice(name)[take] if take else handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                "corrupt_checkpoint", f"{file}: cannot read {name}: {error}; download the file again"
            ) from error
        return tensor


def _fill(read: _Read, stored: WeightFormat, files: _OpenFiles) -> None:
    """Fill a parameter with a quantized weight, some rows at a time. Raises ModelError."""
    source, device = read.source, read.source.into.device
    layer = source.name.removesuffix("weight")

    def tensor(suffix: str, *take: slice) -> torch.Tensor:
        return files.read(read.stored, f"{layer}{suffix}", take).to(device)

    def fill(part: slice, place: slice) -> None:
        if source.kept is not None:
            source.kept.load(stored, tensor, part, columns, place)
            return
        values = KINDS[type(stored)].dequantize(stored, tensor, part, columns)
        if not bool(values.isfinite().all()):
            raise NotFiniteError("weight")
        source.into[place].copy_(values)

    rows, columns = (slice(*part.indices(size)[:2]) for part, size in zip(source.take, source.shape, strict=True))
    # Whole blocks, so that no scale is read twice.
    step = max(_CHUNK_WEIGHTS // source.shape[1] // BLOCK, 1) * BLOCK
    for begin in range(rows.start, rows.stop, step):
        part = slice(begin, min(begin + step, rows.stop))
        try:
            fill(part, slice(begin - rows.start, part.stop - rows.start))
        except NotFiniteError as error:
            raise ModelError(
                "corrupt_checkpoint",
                f"{read.file}: {layer}{error} has values that are not finite; download the file again",
            ) from error
        except ValueError as error:
            raise ModelError(
                "corrupt_checkpoint",
                f"{read.file}: {source.name} cannot be used: {error}; download the file again, or use another "
                "checkpoint",
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
    """Tensors that no parameter uses, except those derived from others (RoPE tables, a tied head) and scales of the KV
    cache. Raises ModelError for one without which the weights mean something else."""
    known = {name for source in parameters.sources for name in source.tensors}
    unknown = sorted(
        name
        for name in tensors.keys() - known
        if not (name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight" or is_kv_scale(name))
    )
    if reordered := next((name for name in unknown if name.endswith(".weight_g_idx")), None):
        raise unsupported_quantization(f"act-order ({reordered} reorders the inputs of that layer)")
    return unknown
