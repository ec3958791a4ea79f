"""Tensors of a checkpoint directory, read from the headers of its safetensors files. Does not import torch."""

from __future__ import annotations

import fnmatch
import heapq
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from minisgl.errors import ModelError
from minisgl.json_file import check_size
from minisgl.layers.weights.formats import TensorSpec, unsupported_quantization
from minisgl.layers.weights.names import own_names, scale_name

_AGAIN: Final = "download the file again"
_MAX_INDEX_BYTES: Final = 128 << 20
_MAX_INDEX_ENTRIES: Final = 1_000_000
"""Largest index of the files of a checkpoint. Models with many quantized experts have 200,000 tensors, with entries of
120 bytes. The second limit bounds the memory: a short entry takes twenty times its size."""
MAX_HEADER_BYTES: Final = 32 << 20
"""Longest header of a file in bytes, of a quarter of a million tensors. The format allows three times as much."""
SERVED_WEIGHTS: Final = "model*.safetensors"
"""Names that Hugging Face's libraries give to weight files."""
_ITEM_BYTES: Final[Mapping[str, int]] = {
    **{"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1},
    **{"I8": 1, "U8": 1, "I32": 4, "I64": 8},
}
"""Element types that can be loaded, for weights or as parts of quantized ones."""


_Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _Entry(msgspec.Struct, frozen=True, gc=False):
    """Entry of a header for one tensor."""

    dtype: str
    shape: Annotated[tuple[_Offset, ...], Meta(max_length=8)]
    data_offsets: tuple[_Offset, _Offset]
    """Of its first byte and behind its last one, from the end of the header."""


class _Index(msgspec.Struct, frozen=True, gc=False):
    """Contents of an index. Its other fields are skipped, whatever they are."""

    weight_map: dict[str, str]
    """File of each tensor."""


_index_decoder: Final = msgspec.json.Decoder(_Index)
_header_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry_decoder: Final = msgspec.json.Decoder(_Entry)


class StoredTensor(NamedTuple):
    file: Path
    dtype: str
    """safetensors' name of the type: F32, BF16, F16, …"""
    shape: tuple[int, ...]
    place: tuple[int, int]
    """Offsets in the file of its first byte and behind its last one."""
    name: str
    """Its name in the file."""

    def bytes_of(self, elements: int) -> int:
        """Bytes of so many elements."""
        return elements * _ITEM_BYTES[self.dtype]


def stored_tensors(directory: Path, folders: Iterable[str] = ()) -> dict[str, StoredTensor]:
    """Stored tensors by `names.own_names` and `names.scale_name`; those of modules in these `folders` by
    `{folder}/{name}`. Raises ModelError when there are no weights, or a file is truncated or damaged."""
    tensors: dict[str, StoredTensor] = {}
    for file in _weight_files(directory):
        tensors.update(_read_header(file))
    own = own_names(tensors)
    tensors = {scale_name(own[name], stored.shape): stored for name, stored in tensors.items()}
    for folder in folders:
        for file in _weight_files(directory / folder):
            tensors |= {f"{folder}/{name}": stored for name, stored in _read_header(file).items()}
    return tensors


def _missing(name: str, tensors: Mapping[str, StoredTensor]) -> ModelError:
    """Error for a tensor that is not stored, which names what the checkpoint has in its place."""
    layer = name.removesuffix(".weight")
    if f"{layer}.weight_packed" in tensors or f"{layer}.qweight" in tensors:
        return ModelError(
            "quantized_checkpoint",
            f"{layer} is quantized, but config.json's quantization_config does not say so, or the layer is one that "
            "must not be: embeddings, the router of experts and the LM head; use another checkpoint of the model",
        )
    block, _, of_experts = name.partition(".experts.")
    other = f"{block}.experts.{'gate_up_proj' if of_experts[:1].isdigit() else '0.gate_proj.weight'}"
    if of_experts and other in tensors:
        return ModelError(
            "quantized_checkpoint",
            f"the checkpoint has {other}, where config.json's quantization_config asks for {name}; supported are all "
            "experts of a layer in one tensor without quantization, and quantized experts in a tensor each; use such a "
            "checkpoint of the model",
        )
    if (scales := tensors.get(f"{name}_inv")) is not None:
        return unsupported_quantization(
            f"fp8 without weight_block_size in config.json, whose {name}_inv has shape {list(scales.shape)}"
        )
    return ModelError(
        "missing_tensor",
        f"the checkpoint has no tensor {name}; a file may be missing: compare the directory with the model's page "
        "and check that config.json belongs to these weights",
    )


def check_tensor(name: str, spec: TensorSpec, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
    """The stored tensor `name`. Raises ModelError when it is missing, or has another shape or type than `spec`."""
    stored = tensors.get(name)
    if stored is None:
        raise _missing(name, tensors)
    # A scale of the whole tensor may have no dimension or one.
    if stored.shape != spec.shape and not (spec.shape == (1,) and stored.shape == ()):
        raise ModelError(
            "wrong_shape",
            f"{stored.file.name}: {name} has shape {list(stored.shape)}, config.json asks for {list(spec.shape)}; "
            "check that config.json belongs to these weights",
        )
    if stored.dtype not in spec.dtypes:
        raise ModelError(
            "wrong_dtype",
            f"{stored.file.name}: {name} is stored as {stored.dtype}, config.json asks for {' or '.join(spec.dtypes)}; "
            "check that config.json, with its quantization_config if there is one, belongs to these weights; "
            "embeddings, the router of experts and the LM head must not be quantized",
        )
    return stored


def served_weights(names: Iterable[str]) -> list[str]:
    """Select the weight files to read: those that match SERVED_WEIGHTS if any does, else all. Some repositories contain
    the same weights a second time, as Mistral's do in consolidated.safetensors."""
    every = list(names)
    return fnmatch.filter(every, SERVED_WEIGHTS) or every


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        named = _files_of_index(index)
        # Not looked up one by one: an index may have a million names, also of lengths that no file can have.
        missing = named - {file.name for file in directory.iterdir() if file.is_file()}
        if outside := min((name for name in missing if "/" in name), default=""):
            raise ModelError(
                "malformed_json", f"{index} names {outside[:200]!r}, which is not in its directory; {_AGAIN}"
            )
        if missing:
            first = ", ".join(name[:100] for name in heapq.nsmallest(10, missing))
            raise ModelError("missing_file", f"{index.name} names {first:.500}, not in {directory}; download it")
        return [directory / name for name in sorted(named)]
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    names = served_weights(file.name for file in directory.glob("*.safetensors") if file.is_file())
    files = [directory / name for name in sorted(names)]
    if not files:
        if any(directory.glob("*.gguf")):
            raise unsupported_quantization("GGUF")
        others = any(directory.glob("*.bin")) or any(directory.glob("*.pth"))
        remedy = "convert them to safetensors" if others else "download the *.safetensors files of the model"
        found = "only weights in PyTorch's pickle format" if others else "no weights"
        raise ModelError("no_weights", f"{directory} holds {found}; {remedy}")
    return files


def _files_of_index(index: Path) -> set[str]:
    """Names of the files in an index. Raises ModelError."""
    try:
        check_size(index, _MAX_INDEX_BYTES)
        content = index.read_bytes()
        if (entries := content.count(b":")) > _MAX_INDEX_ENTRIES:
            raise ValueError(f"its {entries} entries are more than {_MAX_INDEX_ENTRIES}")
        names = set(_index_decoder.decode(content).weight_map.values())
    except (msgspec.MsgspecError, RecursionError, ValueError, OSError) as error:
        raise ModelError("malformed_json", f"{index} cannot be read: {error}; {_AGAIN}") from error
    if not names:
        raise ModelError("malformed_json", f"{index} has an empty weight_map; {_AGAIN}")
    return names


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ModelError("corrupt_checkpoint", f"{file} is cut off or not a safetensors file; {_AGAIN}")
            header = _header_decoder.decode(stream.read(length))
        header.pop("__metadata__", None)
        tensors = {}
        for name, raw in header.items():
            entry = _entry_decoder.decode(raw)
            first, last = entry.data_offsets
            stored = StoredTensor(file, entry.dtype, entry.shape, (8 + length + first, 8 + length + last), name)
            if stored.dtype in _ITEM_BYTES and last - first != stored.bytes_of(math.prod(entry.shape)):
                raise ModelError("corrupt_checkpoint", f"{file}: size and shape of {name:.200} disagree; {_AGAIN}")
            if 8 + length + last > size:
                raise ModelError("corrupt_checkpoint", f"{file} is cut off within tensor {name:.200}; {_AGAIN}")
            tensors[name] = stored
        end = 8 + length
        # In the order of the file each tensor begins where the one before it ends, as the format says.
        for name, stored in sorted(tensors.items(), key=lambda item: item[1].place):
            first, last = stored.place
            if first != end or last < first:
                raise ModelError(
                    "corrupt_checkpoint", f"{file}: tensor {name:.200} overlaps another or leaves a gap; {_AGAIN}"
                )
            end = last
        if end != size:
            raise ModelError("corrupt_checkpoint", f"{file} is longer than its header says; {_AGAIN}")
        return tensors
    except (msgspec.MsgspecError, RecursionError, ValueError, OSError) as error:
        raise ModelError("corrupt_checkpoint", f"{file}: its header cannot be read ({error}); {_AGAIN}") from error
