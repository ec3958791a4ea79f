"""Selection of attention backends: by name, or the fastest that device and model support.

Decode rows with `auto` on a Hopper GPU, the first line that fits; where a kernel does not support the model, the next
one serves its rows. Each backend knows its own rows, and passes others on:

| rows of the step | kernel | why |
|---|---|---|
| many with the same first pages | cascade (`cascade_backend`) | shared pages are read once for all rows |
| up to 4, with long contexts | XQA; else Stream-K | reads faster: `_balanced` has the times |
| up to 4 | split-KV (`split_backend`) | 32 programs a row and KV head, which also rotate and store |
| up to 8, and any beside prompts without a graph | XQA; else Stream-K | as fast, and cheaper to launch |
| 9 and more | Stream-K (`balanced_backend`) | equal spans of all tokens: all programs read until the end |

Older GPUs go from split-KV to FlashInfer, and a CPU has torch alone. Prompts use FlashAttention-3 (`fa3_backend`), for
which others stand in where a step has more keys than are copied for it or than a window has: FlashInfer, or our own
kernel (`triton_backend`), which also serves heads of 512.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import torch

from minisgl.attention import (
    balanced_backend,
    cascade_backend,
    fa3_backend,
    flashinfer_backend,
    split_backend,
    triton_backend,
    xqa_backend,
)
from minisgl.attention.backend import AttentionShape, BackendUnavailable, DecodeBackend, PrefillBackend
from minisgl.attention.balanced_backend import BalancedDecode
from minisgl.attention.batch import KVPool
from minisgl.attention.cascade_backend import CascadeDecode
from minisgl.attention.layered import LayeredAttention, LayerPlace
from minisgl.attention.overview import overview
from minisgl.attention.paged import PagedAttention
from minisgl.attention.split_backend import LongContexts, SplitDecode
from minisgl.attention.torch_backend import TorchDecode, TorchPrefill
from minisgl.attention.triton_backend import TritonPrefill

logger = logging.getLogger(__name__)

Backend = TypeVar("Backend")
_Choice = tuple[Callable[[AttentionShape], str | None], Callable[[AttentionShape], Backend]]


def _always(shape: AttentionShape) -> None:
    """Return None: the reference runs everywhere."""


def _fa3(shape: AttentionShape) -> PrefillBackend:
    # Our own kernel can be captured beside windows, as FlashInfer's cannot.
    behind = ("flashinfer", "triton") if shape.window is None else ("triton", "flashinfer")
    name, make, reasons = _first_that_serves({each: _PREFILL[each] for each in (*behind, "torch")}, shape)
    prefill = fa3_backend.Fa3Prefill(shape, make(shape))
    if name == "torch" and prefill.backend_for(prefix=True) != prefill.name:
        logger.warning(
            "attention backend for prefill with more than %d tokens is torch: %s",
            prefill.most_graph_keys,
            "; ".join(reasons),
        )
    return prefill


def _xqa(shape: AttentionShape) -> DecodeBackend:
    return _split(shape, xqa_backend.XqaDecode(shape))


def _balanced(shape: AttentionShape) -> DecodeBackend:
    # Without a faster backend for few rows it serves all batches itself.
    few = None if xqa_backend.why_not(shape) else xqa_backend.XqaDecode(shape)
    many = BalancedDecode(shape, few)
    if shape.window is not None:
        # No context is long behind a window.
        return _split(shape, many)
    # Measured on an H200, 1 row of 100,000 tokens with 8 KV heads: 104 µs (xqa), 121 (balanced), 158 (split).
    long = LongContexts(few, 64 << 20) if few else LongContexts(many, 128 << 20)
    return _split(shape, many, long)


def _split(shape: AttentionShape, many: DecodeBackend, long: LongContexts | None = None) -> DecodeBackend:
    # For few rows all other backends spend their time in a long chain of dependent reads.
    return many if split_backend.why_not(shape) else SplitDecode(shape, many, long)


# Fastest first: `auto` takes the first that supports the shape.
_PREFILL: Final[Mapping[str, _Choice[PrefillBackend]]] = {
    "fa3": (fa3_backend.why_not, _fa3),
    "flashinfer": (flashinfer_backend.why_not, flashinfer_backend.FlashInferPrefill),
    "triton": (triton_backend.why_not, TritonPrefill),
    "torch": (_always, TorchPrefill),
}
_DECODE: Final[Mapping[str, _Choice[DecodeBackend]]] = {
    "balanced": (balanced_backend.why_not, _balanced),
    "xqa": (xqa_backend.why_not, _xqa),
    "flashinfer": (flashinfer_backend.why_not, flashinfer_backend.FlashInferDecode),
    "split": (split_backend.why_not_alone, lambda shape: SplitDecode(shape, None)),
    "torch": (_always, TorchDecode),
}


class AttentionKind(NamedTuple):
    """Backends of the layers of one shape."""

    shape: AttentionShape
    prefill: PrefillBackend
    decode: DecodeBackend
    cascade: CascadeDecode | None


class KVGroup(NamedTuple):
    """Layers whose keys and values are stored together: their heads, window and data type are equal."""

    shape: AttentionShape
    """That of one of them."""
    layers: tuple[int, ...]
    """Those that store keys and values, by their numbers in the model."""


class AttentionKinds:
    """Backends of all layers of a model, one set for each distinct shape. They serve one pool after the other."""

    def __init__(
        self, name: str, shapes: Sequence[AttentionShape], max_rows: int, kv_layers: Sequence[int] | None = None
    ) -> None:
        """`shapes`: of each layer; `name`: see `select_backends`, and raises as it. `max_rows`: rows of the largest
        batch. `kv_layers`: for each layer the one whose keys and values it reads; None: its own."""
        sources = range(len(shapes)) if kv_layers is None else kv_layers
        stored = sorted({*sources})
        keys = list(dict.fromkeys(_group_key(shapes[layer]) for layer in stored))
        members = [tuple(layer for layer in stored if _group_key(shapes[layer]) == key) for key in keys]
        self.groups = [KVGroup(shapes[layers[0]], layers) for layers in members]
        """Groups of layers that a pool has."""
        distinct = list(dict.fromkeys(shapes))
        self._group_of_kind = [keys.index(_group_key(shape)) for shape in distinct]
        self._places = []
        for shape, source in zip(shapes, sources, strict=True):
            kind = distinct.index(shape)
            self._places.append(LayerPlace(kind, members[self._group_of_kind[kind]].index(source)))
        self.kinds = [
            AttentionKind(
                shape,
                *select_backends(name, shape),
                None if cascade_backend.why_not(shape) else CascadeDecode(shape, max_rows),
            )
            for shape in distinct
        ]
        self._max_rows = max_rows

    @property
    def shape(self) -> AttentionShape:
        """Shape of the first layer. Sizes of pages and data types are the same in all."""
        return self.kinds[0].shape

    def over(self, kv: KVPool) -> LayeredAttention:
        """Attention over a pool."""
        return LayeredAttention(
            [
                PagedAttention(kv.groups[group], kind.prefill, kind.decode, kind.cascade)
                for group, kind in zip(self._group_of_kind, self.kinds, strict=True)
            ],
            self._places,
        )

    def overview(self) -> dict[str, str]:
        """See `overview.overview`; where only some layers have a window, its entries end in `_in_window`."""
        found: dict[str, str] = {}
        for kind in sorted(self.kinds, key=lambda kind: kind.shape.window or 0):
            suffix = "_in_window" if kind.shape.window is not None and found else ""
            each = overview(kind.prefill, kind.decode, kind.cascade, self._max_rows)
            found |= {f"{name}{suffix}": backend for name, backend in each.items()}
        return found


def _group_key(shape: AttentionShape) -> tuple[object, ...]:
    """What layers of one group have in common."""
    return shape.kv_heads, shape.head_dim, shape.window, shape.stored_dtype


def select_backends(name: str, shape: AttentionShape) -> tuple[PrefillBackend, DecodeBackend]:
    """The prefill and the decode backend for `name`: `auto`, one name, or `PREFILL,DECODE`.

    One name stands for both phases where the backend serves both, and leaves the other phase to `auto` where it does
    not. Raises BackendUnavailable with the reason when a named backend cannot serve `shape`.
    """
    if reason := why_no_fp8(shape):
        raise BackendUnavailable(f"an FP8 KV cache cannot be used here: {reason}; use --kv-cache-dtype auto")
    prefill, separator, decode = (part.strip() for part in name.partition(","))
    if not separator:
        if prefill != "auto" and prefill not in {*_PREFILL, *_DECODE}:
            raise BackendUnavailable(
                f"attention backend {name!r} is unknown; use auto, {_names({**_PREFILL, **_DECODE})}"
            )
        prefill, decode = (prefill if prefill in kind else "auto" for kind in (_PREFILL, _DECODE))
    return _select("prefill", prefill, _PREFILL, shape), _select("decode", decode, _DECODE, shape)


def why_no_fp8(shape: AttentionShape) -> str | None:
    """Reason why a pool in FP8 cannot be used for `shape`, or None."""
    if shape.stored_dtype == shape.dtype or shape.device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(shape.device) < (8, 9):
        return "it needs a GPU that converts FP8 (Ada, Hopper or later)"
    if shape.window is None and shape.softcap is None:
        return None
    # Kernels of packages neither read FP8 behind windows nor bound its scores: ours must serve all steps.
    if reason := triton_backend.why_not(shape):
        return f"no fast kernel reads it for prompts {_feature(shape)}: {reason}"
    name, _, reasons = _first_that_serves(_DECODE, shape)
    if name == "torch":
        return f"no fast kernel reads it for rows {_feature(shape)}: {'; '.join(reasons)}"
    return None


def _feature(shape: AttentionShape) -> str:
    return "with bounded scores" if shape.window is None else f"with a window of {shape.window} tokens"


def _select(phase: str, name: str, choices: Mapping[str, _Choice[Backend]], shape: AttentionShape) -> Backend:
    if name == "auto":
        return _best(phase, choices, shape)
    if name not in choices:
        raise BackendUnavailable(f"attention backend {name!r} has no {phase} kernel; use auto, {_names(choices)}")
    why_not, make = choices[name]
    if reason := why_not(shape):
        raise BackendUnavailable(f"attention backend {name!r} cannot {phase} here: {reason}; or use auto")
    if name == "torch" and shape.device.type == "cuda":
        logger.warning("attention backend for %s is torch, as configured: it is many times slower than auto", phase)
    return make(shape)


def _best(phase: str, choices: Mapping[str, _Choice[Backend]], shape: AttentionShape) -> Backend:
    name, make, reasons = _first_that_serves(choices, shape)
    if shape.device.type == "cuda" and reasons:
        # The reference is many times slower on a GPU: never fall back to it silently.
        level = logging.WARNING if name == "torch" else logging.INFO
        logger.log(level, "attention backend for %s is %s: %s", phase, name, "; ".join(reasons))
    return make(shape)


def _first_that_serves(
    choices: Mapping[str, _Choice[Backend]], shape: AttentionShape
) -> tuple[str, Callable[[AttentionShape], Backend], list[str]]:
    """Return the name of the first choice that serves `shape`, what makes it, and why those before it do not."""
    reasons: list[str] = []
    for name, (why_not, make) in choices.items():
        reason = why_not(shape)
        if reason is None:
            return name, make, reasons
        reasons.append(f"not {name}, because {reason}")
    raise AssertionError("the last choice serves every shape")


def _names(choices: Mapping[str, object]) -> str:
    return ", ".join(choices)
