"""The text of GET /metrics: the scheduler's last status, and the frontend's own metrics.

The text is written here and not by a client library: with twenty histograms prometheus-client takes 2 ms for a scrape,
and gateways scrape twenty times a second, on the event loop that also passes on all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import msgspec

from minisgl.frontend.metrics.counters import FrontendMetrics
from minisgl.frontend.metrics.histogram import Histogram
from minisgl.wire.messages import QUEUE_TIME_EDGES, STEP_TOKENS_EDGES, Status

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Snapshot(msgspec.Struct, frozen=True):
    """State at the moment of a scrape, which no counter holds."""

    model_name: str
    status: Status | None
    step_age: float
    """Seconds without a step while requests run."""
    phases: Mapping[str, int]
    """HTTP requests in progress, by phase."""
    rejections: Mapping[str, int]
    """Requests rejected with 429 since the start, by reason."""


def render(metrics: FrontendMetrics, now: Snapshot) -> bytes:
    """Return the page in Prometheus' text format 0.0.4."""
    page = _Page(f'model_name="{_escape(now.model_name)}",engine="0"')
    if now.status is not None:
        _engine(page, now.status)
    _requests(page, metrics)
    _frontend(page, metrics, now)
    return page.text()


def _engine(page: _Page, status: Status) -> None:
    page.gauge("vllm:num_requests_running", "Requests in the batch.", status.running)
    page.gauge("vllm:num_requests_waiting", "Requests that wait for a place in the batch.", status.waiting)
    page.gauge(
        "vllm:kv_cache_usage_perc",
        "Fraction of the KV pages that requests hold, 0 to 1; cached pages that can be evicted do not count.",
        status.used_pages / max(status.num_pages, 1),
    )
    pool = f',block_size="{status.page_size}",num_gpu_blocks="{status.num_pages}"'
    page.gauge("vllm:cache_config_info", "Size of the KV pool.", 1, pool)
    if len(status.queue_times) == len(QUEUE_TIME_EDGES) + 1:
        page.histogram(
            "vllm:request_queue_time_seconds",
            "Time from joining the scheduler's queue to the first place in the batch.",
            Histogram.from_counts(QUEUE_TIME_EDGES, status.queue_times, status.queue_seconds),
        )
    if len(status.step_sizes) == len(STEP_TOKENS_EDGES) + 1:
        page.histogram(
            "vllm:iteration_tokens_total",
            "Tokens of a step.",
            Histogram.from_counts(STEP_TOKENS_EDGES, status.step_sizes, status.step_tokens),
        )
    page.counter("vllm:generation_tokens_total", "Generated tokens.", status.generated_tokens)
    page.counter(
        "vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", status.prompt_tokens
    )
    page.counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", status.cached_tokens)
    page.counter("vllm:num_preemptions_total", "Requests requeued because KV pages ran out.", status.preemptions)
    page.counter("minisgl:engine_steps_total", "Launched steps.", status.steps)
    page.counter("minisgl:engine_prefill_tokens_total", "Computed prompt tokens; not cached.", status.prefill_tokens)
    if status.start_seconds:
        page.labelled(
            "minisgl:engine_start_seconds",
            "gauge",
            "Time that each phase of the engine's last start took.",
            "phase",
            status.start_seconds,
        )


def _requests(page: _Page, metrics: FrontendMetrics) -> None:
    page.counter(
        "vllm:prompt_tokens_total",
        "Tokens of prompts, including cached ones; a prompt with several choices counts once.",
        metrics.prompt_tokens_total,
    )
    page.labelled(
        "vllm:request_success_total",
        "counter",
        "Choices that completed, or requests whose client disconnected (abort).",
        "finished_reason",
        {"stop": 0, "length": 0, "abort": 0} | metrics.finished,
    )
    for name, text, histogram in (
        (
            "time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            metrics.time_to_first_token,
        ),
        ("inter_token_latency_seconds", "Time between two tokens of a choice.", metrics.inter_token_latency),
        (
            "request_time_per_output_token_seconds",
            "Mean time per token after the first.",
            metrics.time_per_output_token,
        ),
        ("e2e_request_latency_seconds", "Time from a request's arrival to its last token.", metrics.request_latency),
        ("request_prefill_time_seconds", "Time from a place in the batch to the first token.", metrics.prefill_time),
        ("request_decode_time_seconds", "Time from a choice's first token to its last.", metrics.decode_time),
        ("request_prompt_tokens", "Tokens of a prompt.", metrics.prompt_tokens),
        ("request_generation_tokens", "Tokens of a choice.", metrics.generation_tokens),
    ):
        page.histogram(f"vllm:{name}", text, histogram)


def _frontend(page: _Page, metrics: FrontendMetrics, now: Snapshot) -> None:
    page.gauge("minisgl:engine_last_step_age_seconds", "Time without a step while requests run.", now.step_age)
    page.counter("minisgl:engine_starts_total", "Engine starts seen by the frontend.", metrics.engine_starts)
    page.counter("minisgl:requests_retried_total", "Requests resubmitted to another engine.", metrics.resubmitted)
    page.counter(
        "minisgl:slow_clients_total", "Connections dropped because the client did not read.", metrics.slow_clients
    )
    for name, kind, text, label, values in (
        ("admission_rejections_total", "counter", "Requests rejected with 429.", "reason", now.rejections),
        ("frontend_inflight", "gauge", "HTTP requests in progress.", "phase", now.phases),
        ("disconnects_total", "counter", "Clients that disconnected early.", "phase", metrics.disconnects),
        ("timeouts_total", "counter", "Requests that exceeded a time limit.", "kind", metrics.timeouts),
        ("request_errors_total", "counter", "Requests that ended in an error.", "code", metrics.failed),
    ):
        page.labelled(f"minisgl:{name}", kind, text, label, values)
    accept = "Time from a request's arrival to its place in the scheduler's queue."
    page.histogram("minisgl:request_accept_seconds", accept, metrics.accept_time)
    lag = "Delay of the event loop, observed ten times a second."
    page.histogram("minisgl:frontend_event_loop_lag_seconds", lag, metrics.loop_lag)


class _Page:
    """A page under construction. `labels` are those of every sample."""

    def __init__(self, labels: str) -> None:
        self._labels = labels
        self._lines: list[str] = []

    def counter(self, name: str, text: str, value: float) -> None:
        self._sample("counter", name, text, value)

    def gauge(self, name: str, text: str, value: float, labels: str = "") -> None:
        self._sample("gauge", name, text, value, labels)

    def _sample(self, kind: str, name: str, text: str, value: float, labels: str = "") -> None:
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
    """Render a histogram. Cached: most histograms of a page are unchanged since the last scrape."""
    return _histogram_template(name, text, labels, edges) % (*counts, counts[-1], total)


@lru_cache(maxsize=64)
def _histogram_template(name: str, text: str, labels: str, edges: tuple[float, ...]) -> str:
    """Return a histogram with `%s` in the place of its values. Cached: this is most of the page and never changes."""
    begins = [f'{name}_bucket{{{labels},le="{edge}"}}' for edge in (*edges, "+Inf")]
    begins += [f"{name}_count{{{labels}}}", f"{name}_sum{{{labels}}}"]
    head = f"# HELP {name} {text}\n# TYPE {name} histogram"
    return "\n".join([head.replace("%", "%%"), *(begin.replace("%", "%%") + " %s" for begin in begins)])


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
