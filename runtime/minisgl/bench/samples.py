"""Measurements of streamed answers, and their summary."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from minisgl.bench.http_client import HttpError, events_of
from minisgl.bench.report import Metric

_PERCENTILES: Final = (50, 90, 99)


class Answer(msgspec.Struct, frozen=True):
    """Streamed answer as it arrived."""

    sent_at: float
    """time.perf_counter() when the request was written."""
    chunks: list[tuple[float, bytes]]
    """Parts of the body with their arrival times."""
    error: str = ""
    """Reason why the answer is not complete."""


class Sample(msgspec.Struct):
    """Measurements of one request, in seconds since it was sent."""

    ttft: float = 0.0
    gaps: list[float] = []
    """Seconds between successive chunks with output, each of one token or several."""
    e2e: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None for answers of one token."""
        return sum(self.gaps) / (self.output_tokens - 1) if self.output_tokens > 1 else None


_OUTPUT: Final = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Fields of a delta with generated tokens, which `completion_tokens` counts."""


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] = {}

    @property
    def has_output(self) -> bool:
        return bool(self.text or any(self.delta.get(field) for field in _OUTPUT))


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Chunk(msgspec.Struct):
    """Event of an OpenAI stream, as far as it is measured."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


def sample(answer: Answer) -> Sample:
    """Measurements of an answer. Errors are part of them."""
    result = Sample(gaps=[], error=answer.error)
    last = answer.sent_at
    try:
        for event in events_of(answer.chunks) if not answer.error else ():
            chunk = _decode(event.data)
            if chunk.error is not None:
                result.error = str(chunk.error)
                break
            if chunk.usage is not None:
                result.prompt_tokens = chunk.usage.prompt_tokens
                result.output_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                if not choice.has_output:
                    continue
                if result.ttft:
                    result.gaps.append(event.at - last)
                else:
                    result.ttft = event.at - answer.sent_at
                last = event.at
            result.e2e = event.at - answer.sent_at
    except HttpError as error:
        result.error = str(error)
    except msgspec.MsgspecError as error:
        result.error = f"not a chunk of an OpenAI stream: {error}"
    # An answer may have no output at all; its first event is then its end.
    result.ttft = result.ttft or result.e2e
    return result


def summarize(samples: Sequence[Sample], seconds: float, limits_ms: Mapping[str, float]) -> dict[str, Metric]:
    """Metrics of the report. Latencies cover the requests that completed; goodput counts those within all limits."""
    good = [sample for sample in samples if not sample.error]
    output_tokens = sum(sample.output_tokens for sample in good)
    chunks = sum(1 + len(sample.gaps) for sample in good)
    metrics: dict[str, Metric] = {
        "completed": len(good),
        "failed": len(samples) - len(good),
        "duration_s": seconds,
        "requests_per_second": len(good) / seconds,
        "prompt_tokens": sum(sample.prompt_tokens for sample in good),
        "output_tokens": output_tokens,
        "output_tokens_per_second": output_tokens / seconds,
        "tokens_per_chunk": output_tokens / max(1, chunks),
    }
    for name, values in _latencies(good).items():
        if values:
            metrics[f"{name}_ms_mean"] = float(np.mean(values)) * 1000
            for percent in _PERCENTILES:
                metrics[f"{name}_ms_p{percent}"] = float(np.percentile(values, percent)) * 1000
            metrics[f"{name}_ms_max"] = max(values) * 1000
    if limits_ms:
        within = sum(all((getattr(s, name) or 0) * 1000 <= limit for name, limit in limits_ms.items()) for s in good)
        metrics["goodput_requests_per_second"] = within / seconds
        metrics["goodput_share"] = within / len(samples)
    return metrics


def median_metrics(runs: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Median of each metric over the runs that have it."""
    medians: dict[str, Metric] = {}
    for name in dict.fromkeys(name for run in runs for name in run):
        values = [value for run in runs if isinstance(value := run.get(name), int | float)]
        medians[name] = values[0] if len(values) == 1 else float(np.median(values))
    return medians


def _latencies(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Seconds of each latency, over all samples that have it."""
    return {
        "ttft": [sample.ttft for sample in samples],
        "tpot": [tpot for sample in samples if (tpot := sample.tpot) is not None],
        "itl": [gap for sample in samples for gap in sample.gaps],
        "e2e": [sample.e2e for sample in samples],
    }


def write_plot(samples: Sequence[Sample], path: Path) -> None:
    """Write the cumulative distributions of the latencies to `path` as PNG. Prints why on stderr if it cannot."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("minisgl: no plot: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return
    canvas = Figure(figsize=(10, 6), layout="constrained")
    for index, (name, values) in enumerate(_latencies([s for s in samples if not s.error]).items()):
        axes = canvas.add_subplot(2, 2, index + 1)
        if values:
            axes.ecdf(np.array(values) * 1000)
        axes.set(title=name.upper(), xlabel="ms", ylabel="share of samples")
        axes.grid(alpha=0.3)
    try:
        canvas.savefig(path, dpi=120, format="png")
    except OSError as error:
        print(f"minisgl: no plot: {path} cannot be written: {error.strerror}", file=sys.stderr)
        return
    print(f"plot written to {path}")
