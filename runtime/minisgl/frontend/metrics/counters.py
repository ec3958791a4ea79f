"""Metrics that a frontend keeps about its own requests.

Names, and the edges of histograms, are those of vLLM, so that dashboards made for it show ours (vllm/v1/metrics: the
edges are part of the metrics' contract).
"""

from __future__ import annotations

from typing import Final

from minisgl.frontend.metrics.types import Histogram, HttpRequests, LabelledTotal, Total
from minisgl.wire.messages import QUEUE_TIME_EDGES

TTFT_EDGES: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_EDGES: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
LATENCY_EDGES: Final = QUEUE_TIME_EDGES
COUNT_EDGES: Final = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
"""Tokens of a request: 1, 2, 5, 10, … 500,000."""
N_EDGES: Final = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS_EDGES: Final = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
LAG_EDGES: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class FrontendMetrics:
    """Totals since the frontend's start; times in seconds. A request's times begin with its first byte."""

    def __init__(self) -> None:
        self.prompt_tokens_total = Total(
            "vllm:prompt_tokens_total", "Tokens of prompts, cached ones included; a prompt counts once."
        )
        self.finished = LabelledTotal(
            "vllm:request_success_total",
            "Completed choices; abort: responses whose client disconnected; error: responses that the server failed.",
            "finished_reason",
        )
        self.finished.update(stop=0, length=0, abort=0, error=0)
        self.cached_tokens = Total(
            "vllm:prompt_tokens_cached_total", "Tokens of completed prompts found in the prefix cache."
        )
        self.prompt_tokens_by_source = LabelledTotal(
            "vllm:prompt_tokens_by_source_total", "Tokens of completed prompts by where their KV came from.", "source"
        )
        self.prompt_tokens_by_source.update(local_compute=0, local_cache_hit=0, external_kv_transfer=0)
        self.cached_tokens_by_source = LabelledTotal(
            "vllm:prompt_tokens_cached_by_source_total",
            "Tokens of completed prompts found in a cache, by the memory that held them.",
            "source",
        )
        self.cached_tokens_by_source.update(device=0)
        self.time_to_first_token = Histogram("vllm:time_to_first_token_seconds", "Time to the first token.", TTFT_EDGES)
        self.inter_token_latency = Histogram("vllm:inter_token_latency_seconds", "Time between two tokens.", ITL_EDGES)
        self.time_per_output_token = Histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between the tokens of a choice.", ITL_EDGES
        )
        self.request_latency = Histogram("vllm:e2e_request_latency_seconds", "Time to the last token.", LATENCY_EDGES)
        self.prefill_time = Histogram(
            "vllm:request_prefill_time_seconds", "Time from a place in the batch to the first token.", LATENCY_EDGES
        )
        self.decode_time = Histogram(
            "vllm:request_decode_time_seconds", "Time from a choice's first to its last token.", LATENCY_EDGES
        )
        self.inference_time = Histogram(
            "vllm:request_inference_time_seconds", "Time from a place in the batch to the last token.", LATENCY_EDGES
        )
        self.params_n = Histogram("vllm:request_params_n", "Choices that a prompt's request asked for.", N_EDGES)
        self.params_max_tokens = Histogram(
            "vllm:request_params_max_tokens", "Most tokens that a choice was allowed to have.", COUNT_EDGES
        )
        self.preemptions = Histogram(
            "vllm:request_num_preemptions", "Number of times that a choice was preempted.", PREEMPTIONS_EDGES
        )
        self.prompt_tokens = Histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", COUNT_EDGES)
        self.computed_tokens = Histogram(
            "vllm:request_prefill_kv_computed_tokens", "Tokens of a prompt that were not cached.", COUNT_EDGES
        )
        self.generation_tokens = Histogram("vllm:request_generation_tokens", "Tokens of a choice.", COUNT_EDGES)
        self.max_generation_tokens = Histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of the longest choice of a prompt.", COUNT_EDGES
        )
        self.http = HttpRequests()
        self.engine_starts = Total("minisgl:engine_starts_total", "Engine starts seen by the frontend.")
        self.resubmitted = Total("minisgl:requests_retried_total", "Requests resubmitted to another engine.")
        self.continued = Total(
            "minisgl:requests_continued_total", "Choices whose answer went on at another engine after tokens."
        )
        self.continue_gap = Histogram(
            "minisgl:request_continue_gap_seconds",
            "Time without a token of choices that went on at another engine.",
            ITL_EDGES,
        )
        self.slow_clients = Total("minisgl:slow_clients_total", "Connections dropped because the client did not read.")
        self.lost_lines = Total("minisgl:log_lines_lost_total", "Log lines that could not be written to stderr.")
        self.untrusted_tenants = Total(
            "minisgl:untrusted_tenants_total", "Requests that name a tenant without being a trusted gateway's."
        )
        self.spans_dropped = Total("minisgl:trace_spans_dropped_total", "Spans of traces that no collector has taken.")
        self.disconnects = LabelledTotal("minisgl:disconnects_total", "Clients that disconnected early.", "phase")
        self.timeouts = LabelledTotal("minisgl:timeouts_total", "Requests that exceeded a time limit.", "kind")
        self.failed = LabelledTotal("minisgl:request_errors_total", "Requests that ended in an error.", "code")
        self.rejections = LabelledTotal(
            "minisgl:admission_rejections_total",
            "Requests rejected with 429.",
            "reason",
            other_name="vllm:admission_rejections_total",
        )
        self.accept_time = Histogram("minisgl:request_accept_seconds", "Time to the scheduler's queue.", TTFT_EDGES)
        self.loop_lag = Histogram(
            "minisgl:frontend_event_loop_lag_seconds", "Delay of the event loop, ten times a second.", LAG_EDGES
        )
