"""What every benchmark prints and writes: one table for people, one JSON file for comparisons."""

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

Figure = float | int | str | bool | None

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


def report(bench: str, figures: Mapping[str, Figure], reference: Mapping[str, Figure], json_path: str | None) -> None:
    """Print `figures` as a table, each beside the value of the same name in `reference` where there is one, and
    write everything to `json_path` when given. Units are part of the names: `decode_step_cpu_ms`."""
    print(table(bench, figures, reference))
    if json_path is not None:
        document = {
            "bench": bench,
            "machine": machine(),
            "versions": versions(),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "figures": dict(figures),
            "reference": dict(reference),
        }
        path = Path(json_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        print(f"written to {path}")


def table(bench: str, figures: Mapping[str, Figure], reference: Mapping[str, Figure]) -> str:
    """Rows of name, value and reference; references without a figure of their name follow at the end."""
    rows = [(name, _shown(value), _shown(reference.get(name))) for name, value in figures.items()]
    rows += [(name, "", _shown(value)) for name, value in reference.items() if name not in figures]
    header = (bench, "figure", "reference" if reference else "")
    width = [max(len(row[i]) for row in [header, *rows]) for i in range(3)]
    lines = [f"{a:<{width[0]}}  {b:>{width[1]}}  {c:>{width[2]}}".rstrip() for a, b, c in [header, *rows]]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def _shown(value: Figure) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def machine() -> dict[str, Figure]:
    """Processor, cores that this process may use, memory, and GPUs if the driver's tool is there."""
    facts: dict[str, Figure] = {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    gpus = gpu_names()
    if gpus:
        facts["gpu"] = gpus[0]
        facts["gpus"] = len(gpus)
    return facts


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def gpu_names() -> list[str]:
    """Names of the GPUs, asked of the driver's tool: importing torch for this would take seconds."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    answer = subprocess.run(
        [tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=30, check=False
    )
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []


def versions() -> dict[str, str]:
    found = {"minisgl": __version__, "python": platform.python_version()}
    for package in _REPORTED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
