"""`minisgl models check DIR`"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help="directory of a Hugging Face checkpoint")


def run(args: argparse.Namespace) -> int:
    """Print everything that was found; 1 when the checkpoint cannot be served."""
    from minisgl.models.check import check_checkpoint

    report = check_checkpoint(args.directory)
    if report.architecture is not None:
        print(f"architecture     {report.architecture}")
        print(f"parameters       {report.num_parameters:,} ({report.weight_bytes / 2**30:.2f} GiB as {report.dtype})")
        print(f"longest sequence {report.max_model_len:,} tokens")
        print(f"--tp             {', '.join(map(str, report.tensor_parallel_sizes))}")
    for kind, findings in (("problem", report.problems), ("note", report.notes)):
        for finding in findings:
            print(f"{kind}: {finding.message} ({finding.code})")
    print("can be served" if report.servable else "cannot be served")
    return 0 if report.servable else 1
