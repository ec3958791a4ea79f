"""File with the newest results of each workload and model on one kind of machine; benchmarks update it."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from minisgl.bench.report import gpu_names, versions
from minisgl.errors import BenchError


class Record(msgspec.Struct, kw_only=True):
    """Results by name, such as `a_qwen3_0.6b_tok_s`: medians, their share of the roofline F1, and the spread of the
    runs."""

    date: str
    device: str
    """Name of the GPU, or `cpu`; results of another device are refused."""
    versions: dict[str, str]
    commit: str
    figures: dict[str, float] = {}
    f1_ratio: dict[str, float] = {}
    spread: dict[str, tuple[float, float]] = {}
    """Slowest and fastest run."""
    compiled_after_ready: dict[str, int] = {}
    """Kernels that were compiled after the start of an engine, by run. Their sum is a figure, too."""


def read(path: Path) -> Record:
    """Record in the file at `path`, or an empty one if the file does not exist.

    Raises BenchError `other_device` when the file holds results of another device, `bad_record` when it is invalid;
    both are better known before an hour of measuring.
    """
    device = next(iter(gpu_names()), "cpu")
    try:
        known = msgspec.json.decode(path.read_bytes(), type=Record)
    except FileNotFoundError:
        return Record(date="", device=device, versions={}, commit="")
    except msgspec.MsgspecError as error:
        raise BenchError("bad_record", f"{path} is not a results file: {error}") from error
    if known.device != device:
        raise BenchError("other_device", f"{path} holds results of {known.device}, this is {device}; name another file")
    return known


class Result(NamedTuple):
    """One figure to record."""

    value: float
    spread: tuple[float, float] | None = None
    """Lowest and highest run."""
    f1_ratio: float | None = None
    """Share of the roofline F1."""


def model_key(
    model: str, tensor_parallel: int = 1, quantization: str | None = None, kv_cache_dtype: str = "auto"
) -> str:
    """Part of the names of a model's results, such as `qwen3_14b_fp8_kv_tp2`. `quantization`: its name; FP8 in blocks,
    the most common one, is `fp8`; MXFP4, of models that have no other form, is not named. `kv`: the KV cache is in FP8,
    too."""
    kinds = {None: "", "mxfp4": "", "fp8-block": "_fp8", "fp8": "_fp8_channel"}
    kind = kinds.get(quantization, f"_{quantization}") + ("_kv" if kv_cache_dtype == "fp8" else "")
    ranks = f"_tp{tensor_parallel}" if tensor_parallel > 1 else ""
    return Path(model).name.lower().replace("-", "_") + kind + ranks


def update(path: Path, known: Record, results: Mapping[str, Result], compiled: tuple[str, int] | None = None) -> None:
    """Add results by name to `known` and write it to `path`. `compiled`: a run, and the number of kernels that were
    compiled during it."""
    for name, result in results.items():
        known.figures[name] = _rounded(result.value)
        if result.spread is not None:
            known.spread[name] = (_rounded(result.spread[0]), _rounded(result.spread[1]))
        if result.f1_ratio is not None:
            known.f1_ratio[name] = _rounded(result.f1_ratio)
    if compiled is not None:
        run, kernels = compiled
        known.compiled_after_ready[run] = kernels
        known.figures["compiled_after_ready"] = sum(known.compiled_after_ready.values())
    known.date = datetime.datetime.now(datetime.UTC).date().isoformat()
    known.versions = versions()
    known.commit = _commit()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(msgspec.to_builtins(known), indent=2) + "\n")
    os.replace(partial, path)
    print(f"recorded in {path}")


def _commit() -> str:
    """Commit of the running source tree, from MINISGL_COMMIT if set; empty outside a Git repository."""
    if given := os.environ.get("MINISGL_COMMIT"):
        return given
    answer = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip()


def _rounded(value: float) -> float:
    return float(f"{value:.4g}") if abs(value) < 1000 else round(float(value), 1)
