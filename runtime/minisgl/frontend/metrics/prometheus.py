"""The text of GET /metrics: the scheduler's last status, and the frontend's own metrics.

The text is written here and not by a client library: with twenty histograms prometheus-client takes 2 ms for a scrape,
and gateways scrape twenty times a second, on the event loop that also passes on all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from minisgl.frontend.metrics.counters import FrontendMetrics
from minisgl.frontend.metrics.page import Page, escape
from minisgl.frontend.metrics.process import ProcessUse
from minisgl.frontend.metrics.types import Histogram, HttpRequests, LabelledTotal, Total
from minisgl.wire.messages import QUEUE_TIME_EDGES, STEP_TOKENS_EDGES, Counters, Status


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
    page = Page(f'model_name="{escape(now.model_name)}",engine="0"')
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
                page.http(metric)
    if now.process is not None:
        page.process(now.process)
    return page.text()


def _load(page: Page, now: Snapshot) -> None:
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


def _engine(page: Page, status: Status) -> None:
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
    _speculation(page, counters)
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


def _speculation(page: Page, counters: Counters) -> None:
    """Counters of drafts: 0 where no engine speculates, so that they begin at 0 where one does later."""
    page.counter("vllm:spec_decode_num_drafts_total", "Rows of steps with drafts to verify.", counters.drafts)
    name, text = "vllm:spec_decode_num_draft_tokens_total", "Draft tokens that were verified."
    page.counter(name, text, counters.draft_tokens)
    name, text = "vllm:spec_decode_num_accepted_tokens_total", "Draft tokens that were accepted."
    page.counter(name, text, counters.accepted_draft_tokens)
    name, text = "vllm:spec_decode_num_accepted_tokens_per_pos_total", "Accepted draft tokens by position in the draft."
    by_position = {str(position): accepted for position, accepted in enumerate(counters.accepted_by_place)}
    page.labelled(name, "counter", text, "position", by_position)
    name, text = "minisgl:engine_prediction_draft_tokens_total", "Verified draft tokens from predictions of requests."
    page.counter(name, text, counters.predicted_tokens)
    name, text = "minisgl:engine_prediction_accepted_tokens_total", "Those of them that were accepted."
    page.counter(name, text, counters.accepted_predicted_tokens)
