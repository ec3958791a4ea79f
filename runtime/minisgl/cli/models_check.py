"""`minisgl models check MODEL`"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from minisgl.config import EngineConfig
from minisgl.flags.arguments import add_options

if TYPE_CHECKING:
    from minisgl.hub.check import CheckpointReport

_MOST_LABELS: Final = 8
"""Classes that are listed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="directory of a Hugging Face checkpoint, or a Hub id owner/name or s3://BUCKET/PREFIX, of which only "
        "small files and the headers of the weights are downloaded",
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit on the Hub (default: main)")
    add_options(parser, EngineConfig(model=""), only=("task", "hf_overrides", "draft_model"))


def run(args: argparse.Namespace) -> int:
    """Print all findings; returns 1 when the checkpoint cannot be served."""
    from minisgl.hub.check import check_checkpoint
    from minisgl.hub.headers import fetch_headers
    from minisgl.hub.places import is_hub_id, is_in_bucket, origin
    from minisgl.hub.repository import offline
    from minisgl.hub.resolve import resolve

    directory = Path(args.model).expanduser()
    with tempfile.TemporaryDirectory(prefix="minisgl-check-") as temporary:
        on_hub = not directory.exists() and is_hub_id(args.model)
        remote = is_in_bucket(args.model) or (on_hub and not offline())
        if remote:
            directory = Path(temporary, "model")
            fetch_headers(origin(args.model, args.revision), directory)
        elif on_hub:
            directory = resolve(args.model, args.revision or "main")
        report = check_checkpoint(
            directory, args.hf_overrides, task=args.task, headers_only=remote, draft_model=args.draft_model
        )
        _check_tokenizer(directory, report)
    return _print(report, str(directory), args.model if remote else str(directory))


def _print(report: CheckpointReport, directory: str, name: str) -> int:
    """Print the report with `name` in the place of the directory, which may be a temporary one."""
    if report.architecture is not None:
        print(f"architecture     {report.architecture}")
        if report.task is not None:
            print(f"task             {_task(report)}")
        stored = report.quantization or report.dtype
        print(f"parameters       {report.num_parameters:,} ({report.weight_bytes / 2**30:.2f} GiB as {stored})")
        print(f"memory           {_gpu_memory(report)}")
        print(f"memory on a CPU  {_cpu_memory(report)}")
        longest = f"; {report.longest_bytes / 2**30:.2f} GiB of KV cache on a GPU" if report.window else ""
        print(f"longest sequence {report.max_model_len:,} tokens{longest}")
        print(f"--tp             {', '.join(map(str, report.tensor_parallel_sizes))}")
        if report.draft_model is not None:
            print(f"draft model      {report.draft_model}; {report.draft_parameters:,} parameters")
    for kind, findings in (("problem", report.problems), ("note", report.notes)):
        for finding in findings:
            print(f"{kind}: {finding.message.replace(directory, name)} ({finding.code})")
    print("can be served" if report.servable else "cannot be served")
    return 0 if report.servable else 1


def _task(report: CheckpointReport) -> str:
    match report.task:
        case "embed":
            return f"embed: embeddings of {report.output_size} numbers"
        case "rerank":
            return "rerank: a score for a pair of texts"
        case "classify":
            first = ", ".join(label[:40] for label in report.labels[:_MOST_LABELS])
            more = f" and {len(report.labels) - _MOST_LABELS} more" if len(report.labels) > _MOST_LABELS else ""
            return f"classify: {report.output_size} classes, {first}{more}"
    return "generate"


def _gpu_memory(report: CheckpointReport) -> str:
    places = "a GPU" if report.quantization is None else f"Hopper GPUs, {report.other_bytes / 2**30:.2f} GiB on others"
    weights = f"{report.hopper_bytes / 2**30:.2f} GiB of weights on {places}"
    return f"{weights}{_kv_cache(report, 1)}"


def _cpu_memory(report: CheckpointReport) -> str:
    # Everything is float32 there, whatever the checkpoint's type.
    return f"{report.cpu_bytes / 2**30:.2f} GiB of weights{_kv_cache(report, 2)}"


def _kv_cache(report: CheckpointReport, factor: int) -> str:
    """KV cache of a token; `factor`: size of its numbers, relative to 16 bits."""
    # Models that compute whole texts at once have none.
    if not report.kv_bytes_per_token:
        return ""
    each, behind = (
        f"{factor * size / 2**10:,.1f} KiB" for size in (report.kv_bytes_per_token, report.kv_bytes_behind_window)
    )
    windows = "" if report.window is None else f", {behind} for those behind a window of {report.window:,}"
    return f"; {each} of KV cache for each token{windows}"


def _check_tokenizer(directory: Path, report: CheckpointReport) -> None:
    """Add findings about the tokenizer files, which are tried as at a server's start, unless they are known to be
    missing or malformed."""
    from minisgl.errors import TokenizerError
    from minisgl.hub.check import Finding
    from minisgl.tokenizer.trial import try_files

    if {problem.code for problem in report.problems} & {"model_not_found", "no_tokenizer", "malformed_json"}:
        return
    try:
        template_error = try_files(directory)
    except TokenizerError as error:
        report.problems.append(Finding(error.code, str(error)))
        return
    if template_error is not None:
        message = f"the chat template fails, so /v1/chat/completions does not work: {template_error}"
        report.notes.append(Finding(template_error.code, message))
