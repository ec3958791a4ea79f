"""Report of a benchmark: a table on stdout, and a JSON file for comparisons."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from minisgl.version import __version__

Metric = float | int | str | bool | None

_REPORTED_PACKAGES = (
    "torch",
    "numpy",
    "msgspec",
    "pyzmq",
    "transformers",
    "tokenizers",
    "safetensors",
    "flashinfer-python",
    "fa3-fwd",
)


def report(bench: str, metrics: Mapping[str, Metric], reference: Mapping[str, Metric], json_path: str | None) -> None:
    """Print `metrics` as a table, each beside the value of the same name in `reference` if any, and write them with
    machine and versions to `json_path` if given. Units are part of the names: `decode_step_cpu_ms`."""
    print(table(bench, metrics, reference))
    if json_path is not None:
        write_report(bench, metrics, reference, Path(json_path))


def write_report(bench: str, metrics: Mapping[str, Metric], reference: Mapping[str, Metric], path: Path) -> None:
    """Write the JSON file of a report."""
    document = {
        "bench": bench,
        "machine": machine(),
        "versions": versions(),
        "command": shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "minisgl"), *sys.argv[1:]]),
        "figures": dict(metrics),
        "reference": dict(reference),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    print(f"written to {path}")


def table(bench: str, metrics: Mapping[str, Metric], reference: Mapping[str, Metric]) -> str:
    """Table of name, value and reference; references without a metric of the same name follow at the end."""
    rows = [(name, _format(value), _format(reference.get(name))) for name, value in metrics.items()]
    rows += [(name, "", _format(value)) for name, value in reference.items() if name not in metrics]
    header = (bench, "metric", "reference" if reference else "")
    width = [max(len(row[i]) for row in [header, *rows]) for i in range(3)]
    lines = [f"{a:<{width[0]}}  {b:>{width[1]}}  {c:>{width[2]}}".rstrip() for a, b, c in [header, *rows]]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def _format(value: Metric) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def machine() -> dict[str, Metric]:
    """Processor, cores available to this process, memory, and GPUs if `nvidia-smi` is installed."""
    info: dict[str, Metric] = {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    gpus = gpu_names()
    if gpus:
        info["gpu"] = gpus[0]
        info["gpus"] = len(gpus)
    return info


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def gpu_names() -> list[str]:
    """Names of the GPUs from `nvidia-smi`: importing torch would take seconds."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    answer = subprocess.run(
        [tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=30, check=False
    )
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []


def versions() -> dict[str, str]:
    """Versions of minisgl, Python and the packages that are installed."""
    found = {"minisgl": __version__, "python": platform.python_version()}
    for package in _REPORTED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
