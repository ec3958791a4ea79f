"""The text of GET /metrics: the scheduler's last status, and the frontend's own metrics.

The text is written here and not by a client library: with twenty histograms prometheus-client takes 2 ms for a scrape,
and gateways scrape twenty times a second, on the event loop that also passes on all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final

import msgspec

from minisgl.frontend.metrics.counters import FrontendMetrics
from minisgl.frontend.metrics.process import ProcessUse
from minisgl.frontend.metrics.types import Histogram, HttpRequests, LabelledTotal, Total
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
    knows_load: bool
    """Whether the load of the engines was ever known, as it also is of a model without engines."""
    process: ProcessUse | None = None
    """None: the system does not tell."""


def render(metrics: FrontendMetrics, now: Snapshot) -> bytes:
    """Return the page in Prometheus' text format 0.0.4."""
    page = _Page(f'model_name="{_escape(now.model_name)}",engine="0"')
    if now.knows_load:
        _load(page, now)
    if now.status is not None:
        _engine(page, now.status)
    page.gauge("minisgl:engine_last_step_age_seconds", "Time without a step while requests run.", now.step_age)
    page.labelled("minisgl:frontend_inflight", "gauge", "HTTP requests in progress.", "phase", now.phases)
    for metric in vars(metrics).values():
        match metric:
            case Total():
                page.counter(metric.name, metric.text, metric.value)
            case LabelledTotal():
                for name in metric.names:
                    page.labelled(name, "counter", metric.text, metric.label, metric)
            case Histogram():
                page.histograms(metric.name, metric.text, {"": metric})
            case HttpRequests():
                _http(page, metric)
    if now.process is not None:
        _process(page, now.process)
    return page.text()


def _http(page: _Page, requests: HttpRequests) -> None:
    totals = [
        ({"handler": route, "method": method, "status": status}, count)
        for (route, method, status), count in requests.totals.items()
    ]
    page.samples(requests.total_name, "counter", "Answered HTTP requests.", totals)
    times = {f',handler="{route}",method="{method}"': each for (route, method), each in requests.seconds.items()}
    page.histograms(requests.seconds_name, "Time to the end of the response.", times)


def _process(page: _Page, process: ProcessUse) -> None:
    page.gauge("process_start_time_seconds", "Start of this frontend, in Unix time.", process.started_at)
    page.counter("process_cpu_seconds_total", "CPU time of this frontend's process.", process.cpu_seconds)
    page.gauge("process_resident_memory_bytes", "Memory of this frontend's process.", process.resident_bytes)
    page.gauge("process_open_fds", "Open files of this frontend's process.", process.open_files)
    page.gauge("process_max_fds", "Limit of open files of this frontend's process.", process.max_files)


def _load(page: _Page, now: Snapshot) -> None:
    """The gauges by which gateways choose an endpoint and autoscalers a size. A model at zero needs values, too: a
    missing series is an error to them, and a load of 0 beside requests that wait for an engine a reason to remove
    replicas. A new frontend must not report a load of 0 for engines that it has yet to reach."""
    status = now.status
    if status is None:
        running, usage = 0, 0.0
        waiting = now.phases.get("held", 0) + now.phases.get("waiting", 0)
    else:
        running, waiting, usage = status.running, status.waiting, status.used_pages / max(status.num_pages, 1)
    page.gauge("vllm:num_requests_running", "Requests in the batch.", running)
    page.gauge("vllm:num_requests_waiting", "Requests that wait for a place in the batch, or for an engine.", waiting)
    usage_text = "Fraction of KV pages that requests hold, 0 to 1; cached pages that can be evicted do not count."
    page.gauge("vllm:kv_cache_usage_perc", usage_text, usage)


def _engine(page: _Page, status: Status) -> None:
    # There is no sleep mode: a model that needs no engines is scaled to zero. Dashboards take the state as that of the
    # model, and its absence as "down".
    sleep_states = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    page.labelled("vllm:engine_sleep_state", "gauge", "1 for the state of the engines.", "sleep_state", sleep_states)
    size = status.num_pages * status.page_size
    pool = f',block_size="{status.page_size}",num_gpu_blocks="{status.num_pages}",kv_cache_size_tokens="{size}"'
    by_reason = {"capacity": status.waiting - status.deferred, "deferred": status.deferred}
    reason_text = "Waiting requests by reason; deferred: their grammars are being compiled."
    page.labelled("vllm:num_requests_waiting_by_reason", "gauge", reason_text, "reason", by_reason)
    page.gauge("vllm:cache_config_info", "Size of the KV pool.", 1, pool)
    if status.state_checkpoints:
        text = "Checkpoints of recurrent states, from which requests can continue a cached prefix."
        page.gauge("minisgl:state_checkpoints", text, status.state_checkpoints)
        share = status.used_state_checkpoints / status.state_checkpoints
        page.gauge("minisgl:state_checkpoint_usage_perc", "Fraction of them in use, 0 to 1.", share)
    counters = status.counters
    if len(counters.queue_times) == len(QUEUE_TIME_EDGES) + 1:
        name, text = "vllm:request_queue_time_seconds", "Time in the scheduler's queue."
        page.histogram(name, text, QUEUE_TIME_EDGES, counters.queue_times, counters.queue_seconds)
    if len(counters.step_sizes) == len(STEP_TOKENS_EDGES) + 1:
        name, text = "vllm:iteration_tokens_total", "Tokens of a step."
        page.histogram(name, text, STEP_TOKENS_EDGES, counters.step_sizes, counters.step_tokens)
    page.counter("vllm:generation_tokens_total", "Generated tokens.", counters.generated_tokens)
    page.counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the cache.", counters.prompt_tokens)
    page.counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the cache.", counters.cached_tokens)
    page.counter("vllm:num_preemptions_total", "Requests requeued because KV pages ran out.", counters.preemptions)
    page.counter("minisgl:engine_steps_total", "Launched steps.", counters.steps)
    page.counter("minisgl:engine_prefill_tokens_total", "Prompt tokens computed, not cached.", counters.prefill_tokens)
    compiled_text = "Kernels compiled while serving, each of which delayed requests."
    page.counter("minisgl:kernels_compiled_after_ready_total", compiled_text, status.compiled_after_ready)
    if status.attention:
        name, text = "minisgl:attention_backend_info", "Attention backend by kind of attention."
        used = [(kind, backend) for kind, backends in status.attention.items() for backend in backends.split(", ")]
        page.samples(name, "gauge", text, [({"kind": kind, "backend": backend}, 1) for kind, backend in used])
    if status.data_types:
        name, text = "minisgl:data_type_info", "Data types of weights and KV cache."
        types = [({"weights": each.weights, "kv_cache": each.kv_cache}, 1) for each in status.data_types]
        page.samples(name, "gauge", text, types)
    if status.start_seconds:
        name, text = "minisgl:engine_start_seconds", "Time of each phase of the engine's last start."
        page.labelled(name, "gauge", text, "phase", status.start_seconds)


class _Page:
    """A page under construction. `labels` are those of every sample."""

    def __init__(self, labels: str) -> None:
        self._labels = labels
        self._lines: list[str] = []

    def counter(self, name: str, text: str, value: float) -> None:
        self._lines.append(f"# HELP {name} {text}\n# TYPE {name} counter\n{name}{{{self._labels}}} {value}")

    def gauge(self, name: str, text: str, value: float, labels: str = "") -> None:
        self._lines.append(f"# HELP {name} {text}\n# TYPE {name} gauge\n{name}{{{self._labels}{labels}}} {value}")

    def labelled(self, name: str, kind: str, text: str, label: str, values: Mapping[str, float]) -> None:
        self._lines.append(f"# HELP {name} {text}\n# TYPE {name} {kind}")
        self._lines += [
            f'{name}{{{self._labels},{label}="{_escape(key)}"}} {value}' for key, value in sorted(values.items())
        ]

    def samples(self, name: str, kind: str, text: str, values: Sequence[tuple[Mapping[str, str], float]]) -> None:
        """One sample for each set of labels in `values`."""
        self._lines.append(f"# HELP {name} {text}\n# TYPE {name} {kind}")
        for labels, value in values:
            own = "".join(f',{key}="{_escape(text)}"' for key, text in labels.items())
            self._lines.append(f"{name}{{{self._labels}{own}}} {value}")

    def histogram(self, name: str, text: str, edges: tuple[float, ...], counts: Sequence[int], total: float) -> None:
        """`counts`: one for each edge, then one for larger values."""
        self._lines.append(f"# HELP {name} {text}\n# TYPE {name} histogram")
        self._lines.append(_filled(_histogram_template(name, self._labels, edges), counts, total))

    def histograms(self, name: str, text: str, values: Mapping[str, Histogram]) -> None:
        """One histogram for each text of labels in `values`."""
        self._lines.append(f"# HELP {name} {text}\n# TYPE {name} histogram")
        for own, each in values.items():
            labels = self._labels + own
            # Most of the page, and only the values change.
            if each.template is None or each.template[0] != labels:
                each.template = labels, _histogram_template(name, labels, each.edges)
            self._lines.append(_filled(each.template[1], each.counts, each.sum))

    def text(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode()


def _histogram_template(name: str, labels: str, edges: tuple[float, ...]) -> str:
    """Return the lines of a histogram with `%s` in the place of its values."""
    begins = [f'{name}_bucket{{{labels},le="{edge}"}}' for edge in (*edges, "+Inf")]
    begins += [f"{name}_count{{{labels}}}", f"{name}_sum{{{labels}}}"]
    return "\n".join(begin.replace("%", "%%") + " %s" for begin in begins)


def _filled(template: str, counts: Sequence[int], total: float) -> str:
    below = tuple(accumulate(counts))
    return template % (*below, below[-1], total)


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
