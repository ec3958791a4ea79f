"""What Prometheus is told: the scheduler's last status, and what the frontend has seen itself.

The text is written here and not by a client library: with twenty histograms prometheus-client takes 2 ms for a scrape,
and gateways scrape twenty times a second, on the loop that serves everybody's tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from minisgl.frontend.metrics.histogram import (
    COUNT_EDGES,
    ITL_EDGES,
    LAG_EDGES,
    LATENCY_EDGES,
    TTFT_EDGES,
    Histogram,
)
from minisgl.wire.messages import QUEUE_TIME_EDGES, STEP_TOKENS_EDGES, Status

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Since the frontend's start. Names say what is counted; `render` gives the help texts."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(TTFT_EDGES)
        self.inter_token_latency = Histogram(ITL_EDGES)
        self.time_per_output_token = Histogram(ITL_EDGES)
        self.request_latency = Histogram(LATENCY_EDGES)
        self.prefill_time = Histogram(LATENCY_EDGES)
        self.decode_time = Histogram(LATENCY_EDGES)
        self.accept_time = Histogram(TTFT_EDGES)
        self.prompt_tokens_total = 0
        self.prompt_tokens = Histogram(COUNT_EDGES)
        self.generation_tokens = Histogram(COUNT_EDGES)
        self.loop_lag = Histogram(LAG_EDGES)
        self.finished: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.disconnects: Counter[str] = Counter()
        self.timeouts: Counter[str] = Counter()
        self.slow_clients = 0
        self.engine_starts = 0
        self.retried = 0


class Snapshot:
    """What `render` needs beside the metrics, as it is at the moment of a scrape."""

    def __init__(
        self,
        model_name: str,
        status: Status | None,
        step_age: float,
        phases: Mapping[str, int],
        rejections: Mapping[str, int],
    ) -> None:
        self.model_name = model_name
        self.status = status
        self.step_age = step_age
        self.phases = phases
        self.rejections = rejections


def render(metrics: Metrics, now: Snapshot) -> bytes:
    """The text format of Prometheus 0.0.4."""
    page = _Page(f'model_name="{_escape(now.model_name)}",engine="0"')
    if now.status is not None:
        _engine(page, now.status)
    page.single(
        "vllm:prompt_tokens_total",
        "counter",
        "Tokens of prompts, cached ones included; once, however many choices a prompt has.",
        metrics.prompt_tokens_total,
    )
    page.labelled(
        "vllm:request_success_total",
        "counter",
        "Answers that are complete, or were given up by their client (abort).",
        "finished_reason",
        {"stop": 0, "length": 0, "abort": 0} | metrics.finished,
    )
    for name, text, histogram in (
        ("time_to_first_token_seconds", "From a request's first byte to its first token.", metrics.time_to_first_token),
        ("inter_token_latency_seconds", "Between tokens of an answer.", metrics.inter_token_latency),
        (
            "request_time_per_output_token_seconds",
            "Mean time between tokens, by answer.",
            metrics.time_per_output_token,
        ),
        ("e2e_request_latency_seconds", "From a request's first byte to its last token.", metrics.request_latency),
        ("request_prefill_time_seconds", "From a place in the batch to the first token.", metrics.prefill_time),
        ("request_decode_time_seconds", "From an answer's first token to its last.", metrics.decode_time),
        ("request_prompt_tokens", "Tokens of a prompt.", metrics.prompt_tokens),
        ("request_generation_tokens", "Tokens of an answer.", metrics.generation_tokens),
    ):
        page.histogram(f"vllm:{name}", text, histogram)
    _frontend(page, metrics, now)
    return page.text()


def _engine(page: _Page, status: Status) -> None:
    for name, text, value in (
        ("num_requests_running", "Requests in the batch.", status.running),
        ("num_requests_waiting", "Requests that wait for a place in the batch.", status.waiting),
        (
            "kv_cache_usage_perc",
            "Share of the KV pages that requests hold, 0 to 1; cached pages that can be evicted do not count.",
            status.used_pages / max(status.num_pages, 1),
        ),
    ):
        page.single(f"vllm:{name}", "gauge", text, value)
    page.single(
        "vllm:cache_config_info",
        "gauge",
        "The KV pool.",
        1,
        f',block_size="{status.page_size}",num_gpu_blocks="{status.num_pages}"',
    )
    if len(status.queue_times) == len(QUEUE_TIME_EDGES) + 1:
        page.histogram(
            "vllm:request_queue_time_seconds",
            "From a request's place in the scheduler's queue to its first place in the batch.",
            Histogram.of_counts(QUEUE_TIME_EDGES, status.queue_times, status.queue_seconds),
        )
    if len(status.step_sizes) == len(STEP_TOKENS_EDGES) + 1:
        page.histogram(
            "vllm:iteration_tokens_total",
            "Tokens of a step.",
            Histogram.of_counts(STEP_TOKENS_EDGES, status.step_sizes, status.step_tokens),
        )
    for name, text, value in (
        ("generation_tokens_total", "Tokens generated.", status.generated_tokens),
        ("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", status.prompt_tokens),
        ("prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", status.cached_tokens),
        (
            "num_preemptions_total",
            "Requests put back into the queue because KV pages ran out.",
            status.preemptions,
        ),
    ):
        page.single(f"vllm:{name}", "counter", text, value)
    for name, text, value in (
        ("engine_steps_total", "Steps launched.", status.steps),
        ("engine_prefill_tokens_total", "Prompt tokens computed, not cached.", status.prefill_tokens),
    ):
        page.single(f"minisgl:{name}", "counter", text, value)
    if status.start_seconds:
        page.labelled(
            "minisgl:engine_start_seconds",
            "gauge",
            "How long each phase of the engine's last start took.",
            "phase",
            status.start_seconds,
        )


def _frontend(page: _Page, metrics: Metrics, now: Snapshot) -> None:
    page.single(
        "minisgl:engine_last_step_age_seconds", "gauge", "Time without a step while there is work.", now.step_age
    )
    page.single("minisgl:engine_starts_total", "counter", "Engine starts that were seen.", metrics.engine_starts)
    page.single(
        "minisgl:requests_retried_total", "counter", "Requests tried again with another engine.", metrics.retried
    )
    page.labelled(
        "minisgl:admission_rejections_total", "counter", "Requests rejected with 429.", "reason", now.rejections
    )
    page.labelled("minisgl:frontend_inflight", "gauge", "HTTP requests under way.", "phase", now.phases)
    page.labelled(
        "minisgl:disconnects_total", "counter", "Clients that left before their answer.", "phase", metrics.disconnects
    )
    page.labelled("minisgl:timeouts_total", "counter", "Requests that took too long.", "kind", metrics.timeouts)
    page.labelled("minisgl:request_errors_total", "counter", "Requests that ended in an error.", "code", metrics.failed)
    page.single(
        "minisgl:slow_clients_total", "counter", "Connections dropped, nobody having read them.", metrics.slow_clients
    )
    page.histogram(
        "minisgl:request_accept_seconds",
        "From a request's first byte to its place in the scheduler's queue.",
        metrics.accept_time,
    )
    page.histogram(
        "minisgl:frontend_event_loop_lag_seconds", "How late the event loop is, ten times a second.", metrics.loop_lag
    )


class _Page:
    def __init__(self, labels: str) -> None:
        self._labels = labels
        self._lines: list[str] = []

    def single(self, name: str, kind: str, text: str, value: float, labels: str = "") -> None:
        self._lines.append(f"# HELP {name} {text}\n# TYPE {name} {kind}\n{name}{{{self._labels}{labels}}} {value}")

    def labelled(self, name: str, kind: str, text: str, label: str, values: Mapping[str, float]) -> None:
        self._lines.append(f"# HELP {name} {text}\n# TYPE {name} {kind}")
        self._lines += [
            f'{name}{{{self._labels},{label}="{_escape(key)}"}} {value}' for key, value in sorted(values.items())
        ]

    def histogram(self, name: str, text: str, histogram: Histogram) -> None:
        counts = tuple(histogram.cumulative())
        self._lines.append(_histogram_text(name, text, self._labels, tuple(histogram.edges), counts, histogram.sum))

    def text(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode()


@lru_cache(maxsize=64)
def _histogram_text(
    name: str, text: str, labels: str, edges: tuple[float, ...], counts: tuple[int, ...], total: float
) -> str:
    """Most of a page's histograms are as they were at the last scrape."""
    return _histogram_lines(name, text, labels, edges) % (*counts, counts[-1], total)


@lru_cache(maxsize=64)
def _histogram_lines(name: str, text: str, labels: str, edges: tuple[float, ...]) -> str:
    """A histogram with `%s` in the place of its values: most of the page, and always the same."""
    begins = [f'{name}_bucket{{{labels},le="{edge}"}}' for edge in (*edges, "+Inf")]
    begins += [f"{name}_count{{{labels}}}", f"{name}_sum{{{labels}}}"]
    head = f"# HELP {name} {text}\n# TYPE {name} histogram"
    return "\n".join([head.replace("%", "%%"), *(begin.replace("%", "%%") + " %s" for begin in begins)])


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
