"""Model revision of a checkpoint directory: the same for each copy of the weights, another one for other weights."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from minisgl.hub.neighbours import read_record
from minisgl.models.checkpoint import StoredTensor, stored_tensors

logger = logging.getLogger(__name__)

_SAMPLE_BYTES: Final = 4096
"""Bytes that are read from the middle of a tensor."""
_MAX_ALIKE: Final = 128
"""Tensors that are sampled of those whose names differ in numbers only. No dense model has more layers; a model with
experts has several of each layer among them."""
_THREADS: Final = 8
"""Files that are read at the same time."""
_DIGITS: Final = 16
"""Hexadecimal digits of a digest."""
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def model_revision(directory: str | Path, *, dummy_weights: bool = False) -> str:
    """Commit of the checkpoint, where it is known, and a digest of config.json and of samples of the weights. Empty if
    a file cannot be read: loading it reports the error.

    The commit alone is not enough, because files of a fetched directory may have been replaced. The digest alone may
    miss a difference, as it covers a part of each tensor. It depends neither on times nor on the split into files.
    Engines of two versions are compared by it: a change of what it covers would end answers during an upgrade.
    """
    folder = Path(directory)
    try:
        config = (folder / "config.json").read_bytes()
        if dummy_weights:
            # Random numbers with a fixed seed: names and shapes determine them.
            return f"dummy-{_digest([config])}"
        tensors = stored_tensors(folder)
        listed = msgspec.json.encode([(name, tensors[name].dtype, tensors[name].shape) for name in sorted(tensors)])
        digest = _digest([hashlib.sha256(config).digest(), hashlib.sha256(listed).digest(), *_samples(tensors)])
    except Exception as error:
        # Of a damaged file any number may be wrong; loading it checks those that matter.
        message = "the model revision of %s is unknown, so its answers go on at no other start of an engine: %s"
        logger.warning(message, folder, error)
        return ""
    commit = _commit(folder)
    return f"{commit}-{digest}" if commit else digest


def _commit(folder: Path) -> str:
    """Commit that a fetch has recorded, or after which the Hub's client has named a directory of its cache."""
    record = read_record(folder)
    if record is not None:
        return record.commit
    return folder.name if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name) else ""


def _digest(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:_DIGITS]


def _samples(tensors: Mapping[str, StoredTensor]) -> list[bytes]:
    """Bytes from the middle of tensors, in the order of their names. A model that was trained further may have changed
    in some kinds of tensors only, or in some layers."""
    alike: dict[str, list[str]] = {}
    for name in sorted(tensors):
        alike.setdefault(re.sub(r"\d+", "0", name), []).append(name)
    by_file: dict[Path, list[str]] = {}
    for names in alike.values():
        for name in _evenly_spaced(names):
            by_file.setdefault(tensors[name].file, []).append(name)

    def read(file: Path) -> dict[str, bytes]:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return {name: _middle(descriptor, *tensors[name].place) for name in by_file[file]}
        finally:
            os.close(descriptor)

    samples: dict[str, bytes] = {}
    # A read from a network disk takes milliseconds.
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="revision") as pool:
        for found in pool.map(read, by_file):
            samples |= found
    return [samples[name] for name in sorted(samples)]


def _evenly_spaced(names: list[str]) -> list[str]:
    """At most `_MAX_ALIKE` of the names, the first and the last one among them."""
    if len(names) <= _MAX_ALIKE:
        return names
    return [names[number * (len(names) - 1) // (_MAX_ALIKE - 1)] for number in range(_MAX_ALIKE)]


def _middle(descriptor: int, first: int, end: int) -> bytes:
    size = min(end - first, _SAMPLE_BYTES)
    return os.pread(descriptor, size, first + (end - first - size) // 2)
