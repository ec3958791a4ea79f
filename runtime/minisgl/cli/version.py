"""`minisgl version`"""

from __future__ import annotations

import argparse

from minisgl.bench.report import gpu_names, versions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(args: argparse.Namespace) -> int:
    del args
    rows = {**versions(), "gpu": ", ".join(gpu_names()) or "none"}
    for name, value in rows.items():
        print(f"{name:<18} {value}")
    return 0
