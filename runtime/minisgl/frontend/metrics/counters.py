"""Counters and histograms that a frontend keeps about its own requests."""

from __future__ import annotations

from collections import Counter

from minisgl.frontend.metrics.histogram import COUNT_EDGES, ITL_EDGES, LAG_EDGES, LATENCY_EDGES, TTFT_EDGES, Histogram


class FrontendMetrics:
    """Totals since the frontend's start; times in seconds. `prometheus.render` has the help texts."""

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
        self.resubmitted = 0
