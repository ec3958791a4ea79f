"""The newest figures of each workload and model on one kind of machine, kept in one file that benchmarks update."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from minisgl.bench.errors import BenchError
from minisgl.bench.report import Figure, gpu_names, versions


class Record(msgspec.Struct, kw_only=True):
    """Figures by name, such as `a_qwen3_0.6b_tok_s`: medians, their share of the F1 floor, and how far the runs lie
    apart."""

    date: str
    device: str
    """Name of the GPU or processor; figures of another device are not mixed in."""
    versions: dict[str, str]
    commit: str
    figures: dict[str, float] = {}
    f1_ratio: dict[str, float] = {}
    spread: dict[str, tuple[float, float]] = {}
    """Slowest and fastest run."""


def read(path: Path) -> Record:
    """The record at `path`, an empty one if there is none. Worth a look before an hour of measuring.

    Raises BenchError `other_device` when the file holds figures of another device, `bad_record` when it is none.
    """
    device = next(iter(gpu_names()), "cpu")
    try:
        known = msgspec.json.decode(path.read_bytes(), type=Record)
    except FileNotFoundError:
        return Record(date="", device=device, versions={}, commit="")
    except msgspec.MsgspecError as error:
        raise BenchError("bad_record", f"{path} is no record of figures: {error}") from error
    if known.device != device:
        raise BenchError("other_device", f"{path} holds figures of {known.device}, this is {device}: name another")
    return known


def update(
    path: Path, known: Record, model: str, workload: str, tensor_parallel: int, figures: Mapping[str, Figure]
) -> None:
    """Write `known` with the figures of one run of `bench offline` to `path`."""
    name = Path(model).name.lower().replace("-", "_") + (f"_tp{tensor_parallel}" if tensor_parallel > 1 else "")
    rate = f"{workload.lower()}_{name}_tok_s"
    known.figures[rate] = _rounded(figures["tokens_per_second"])
    known.figures[f"engine_up_{name}_s"] = _rounded(figures["engine_up_seconds"])
    known.spread[rate] = (_rounded(figures["tokens_per_second_min"]), _rounded(figures["tokens_per_second_max"]))
    if "f1_ratio" in figures:
        known.f1_ratio[rate] = _rounded(figures["f1_ratio"])
    known.date = datetime.datetime.now(datetime.UTC).date().isoformat()
    known.versions = versions()
    known.commit = _commit()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(msgspec.to_builtins(known), indent=2) + "\n")
    os.replace(partial, path)
    print(f"recorded in {path}")


def _commit() -> str:
    """Of the source tree that runs. MINISGL_COMMIT says it on a machine that got the files alone; else empty there."""
    if given := os.environ.get("MINISGL_COMMIT"):
        return given
    answer = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip()


def _rounded(figure: Figure) -> float:
    assert isinstance(figure, float | int)
    return float(f"{figure:.4g}") if abs(figure) < 1000 else round(float(figure), 1)
