"""Fill a model's parameters from a checkpoint."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from minisgl.errors import ModelError
from minisgl.layers.weights.allocate import KINDS
from minisgl.layers.weights.formats import BLOCK, WeightFormat, unsupported_quantization
from minisgl.layers.weights.names import is_unused
from minisgl.layers.weights.parameters import Parameters, Source, in_order
from minisgl.layers.weights.weight import NotFiniteError
from minisgl.models.checkpoint import StoredTensor, check_tensor, stored_tensors
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
    model. Only this rank's part of a split tensor is read. All headers are checked before the first byte is read. A
    tensor that nobody expects is an error; one line of the log says what is left out on purpose. Raises ModelError.
    """
    tensors = stored_tensors(Path(directory), parameters.folders)
    reads = [_plan(source, tensors) for source in parameters.sources]
    _check_unread(tensors, parameters)
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
    share = source.num_taken / math.prod(source.shape) / (1 if source.stack is None else source.stack.count)
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
                read.source.into.copy_(_read_part(read, files, read.source.name, read.source.take))
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
            named = stored[name].name
            tensor: torch.Tensor = handle.get_slice(named)[take] if take else handle.get_tensor(named)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                "corrupt_checkpoint", f"{file}: cannot read {name}: {error}; download the file again"
            ) from error
        return tensor


def _read_part(read: _Read, files: _OpenFiles, name: str, take: tuple[slice, ...]) -> torch.Tensor:
    """Read a part of one of the tensors of a source."""
    stack = read.source.stack
    if stack is None:
        return files.read(read.stored, name, take)
    return stack.one(files.read(read.stored, name, stack.take(take)))


def _fill(read: _Read, stored: WeightFormat, files: _OpenFiles) -> None:
    """Fill a parameter with a quantized weight, some rows at a time. Raises ModelError."""
    source, device = read.source, read.source.into.device
    layer = source.name.removesuffix("weight")

    def tensor(suffix: str, *take: slice) -> torch.Tensor:
        return _read_part(read, files, f"{layer}{suffix}", take).to(device)

    def fill(part: slice, place: slice) -> None:
        if source.kept is not None:
            source.kept.load(stored, tensor, part, columns, place)
            return
        values = KINDS[type(stored)].dequantize(stored, tensor, part, columns)
        if not bool(values.isfinite().all()):
            raise NotFiniteError("weight")
        source.into[place].copy_(values)

    columns = slice(*source.take[1].indices(source.shape[1])[:2])
    rows = range(*source.take[0].indices(source.shape[0]))
    # Whole blocks, so that no scale is read twice.
    step = max(_CHUNK_WEIGHTS // source.shape[1] // BLOCK, 1) * BLOCK
    for begin in range(0, len(rows), step):
        part = rows[begin : begin + step]
        try:
            fill(slice(part.start, part[-1] + 1, part.step), slice(begin, begin + len(part)))
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


def _check_unread(tensors: dict[str, StoredTensor], parameters: Parameters) -> None:
    """Raise ModelError for tensors that should be read, and say which ones are left out."""
    unread = unread_tensors(tensors, parameters)
    with ExitStack() as stack:
        files = _OpenFiles(stack)
        unexpected = [*unread.unexpected, *(name for name in unread.zeros if files.read(tensors, name, ()).any())]
    if unexpected:
        raise unexpected_tensors(unexpected, tensors)
    if unread.left_out:
        logger.info("%s", left_out_message(unread.left_out))


class Unread(NamedTuple):
    """Names of stored tensors that no parameter reads, except those that change nothing."""

    unexpected: list[str]
    """Nobody knows what they are for."""
    left_out: list[str]
    """The model is served without them on purpose."""
    zeros: list[str]
    """They are harmless if they are zero."""


def unread_tensors(tensors: dict[str, StoredTensor], parameters: Parameters) -> Unread:
    """Sort the stored tensors that no parameter reads. Raises ModelError for one without which the weights mean
    something else."""
    known = {name for source in parameters.sources for name in source.tensors}
    found = Unread([], [], [])
    for name in sorted(tensors.keys() - known):
        if name.startswith(parameters.left_out):
            found.left_out.append(name)
        elif name.endswith(".weight_g_idx"):
            raise unsupported_quantization(f"act-order ({name} reorders the inputs of that layer)")
        elif name.endswith(".bias") and f"{name.removesuffix('bias')}qweight" in tensors:
            # Tools that quantize write one for every layer.
            found.zeros.append(name)
        elif not is_unused(name) and not is_kv_scale(name):
            found.unexpected.append(name)
    return found


def unexpected_tensors(names: Sequence[str], tensors: Mapping[str, StoredTensor]) -> ModelError:
    """Error about tensors that nobody expects."""
    first = tensors[names[0]]
    others = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    return ModelError(
        "unexpected_tensor",
        f"{first.file.name}: the model has no place for {first.name:.200}{others}, so its answers would be wrong; "
        "check that config.json belongs to these weights",
    )


def left_out_message(names: Sequence[str]) -> str:
    """Message that says what is left out: towers and layers, with the number of their tensors."""

    def part(name: str) -> str:
        count = 3 if name.startswith("model.layers.") else 2 if name.startswith("model.") else 1
        return ".".join(name.split(".")[:count])

    listed = ", ".join(f"{each} ({count})" for each, count in Counter(map(part, names)).most_common(10))
    return f"{len(names)} tensors of the checkpoint are left out on purpose: {listed}"
