"""Series that vLLM's Grafana boards select, by board: names, labels, and buckets that a tile compares with.

Written in the syntax of a Prometheus selector: a label with a value must have it, and one without must be there,
because the board filters or groups by it. The labels `job` and `instance` come from Prometheus itself. Read from
examples/observability of vLLM's repository in November 2026; older versions have the first four in
examples/online_serving.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_LATENCIES: Final = ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
_TTFT_LIMITS: Final = ("0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0")
_TPOT_LIMITS: Final = ("0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5")


class Selector(NamedTuple):
    name: str
    labels: dict[str, str | None]
    """None: any value."""

    def matches(self, name: str, labels: dict[str, str]) -> bool:
        wanted = self.labels.items()
        return name == self.name and all(key in labels and value in (None, labels[key]) for key, value in wanted)


def parse(text: str) -> Selector:
    found = re.fullmatch(r"([\w:]+)(?:\{(.*)\})?", text)
    assert found is not None, text
    labels: dict[str, str | None] = {}
    for part in filter(None, (found[2] or "").split(", ")):
        key, _, value = part.partition("=")
        labels[key] = value.strip('"') or None
    return Selector(found[1], labels)


def _histograms(names: tuple[str, ...], labels: str, parts: tuple[str, ...] = ("bucket", "sum", "count")) -> list[str]:
    return [
        f"vllm:{name}_{part}{{{', '.join(filter(None, [labels, 'le' if part == 'bucket' else '']))}}}"
        for name in names
        for part in parts
    ]


_SECONDS: Final = tuple(f"{name}_seconds" for name in _LATENCIES)
_PHASES: Final = tuple(f"request_{phase}_time_seconds" for phase in ("queue", "prefill", "decode"))
_LENGTHS: Final = ("request_prompt_tokens", "request_generation_tokens")
_TOTALS: Final = ("prompt_tokens", "generation_tokens", "num_preemptions")
_ENGINE: Final = "model_name, engine"

BOARDS: Final[dict[str, list[str]]] = {
    "prometheus_grafana/grafana.json": [
        *_histograms(_SECONDS, "model_name"),
        *_histograms(_LENGTHS, "model_name", ("bucket",)),
        *_histograms((*_PHASES, "request_max_num_generation_tokens"), "model_name", ("sum",)),
        *(f"vllm:{name}_total{{model_name}}" for name in ("prompt_tokens", "generation_tokens")),
        *(f"vllm:{name}{{model_name}}" for name in ("num_requests_running", "num_requests_waiting")),
        "vllm:kv_cache_usage_perc{model_name}",
        "vllm:request_success_total{model_name, finished_reason}",
    ],
    "prometheus_grafana/k8s-monitoring/grafana-dashboard.json": [
        *_histograms(_SECONDS, "model_name"),
        *_histograms((*_PHASES, *_LENGTHS, "iteration_tokens_total"), "model_name", ("bucket",)),
        *(f"vllm:{name}_total{{model_name}}" for name in _TOTALS),
        *(f"vllm:{name}{{model_name}}" for name in ("num_requests_running", "num_requests_waiting")),
        "vllm:kv_cache_usage_perc{model_name}",
        "vllm:request_success_total{model_name, finished_reason}",
    ],
    "dashboards/grafana/performance_statistics.json": [
        *_histograms(_SECONDS, ""),
        *(f"vllm:{name}_total{{model_name}}" for name in ("prompt_tokens", "generation_tokens")),
        "vllm:iteration_tokens_total_count",
    ],
    "dashboards/grafana/query_statistics.json": [
        *_histograms(("e2e_request_latency_seconds", "request_prompt_tokens"), "model_name", ("bucket",)),
        *(f"vllm:{name}_total{{model_name}}" for name in ("prompt_tokens", "generation_tokens", "request_success")),
    ],
    "dashboards/grafana/vllm_overview.json": [
        *_histograms((*_SECONDS, "request_time_per_output_token_seconds", *_LENGTHS), "model_name"),
        *_histograms(("request_queue_time_seconds", "iteration_tokens_total"), "model_name"),
        *_histograms(_PHASES, "model_name", ("sum", "count")),
        *(f'vllm:time_to_first_token_seconds_bucket{{model_name, le="{limit}"}}' for limit in _TTFT_LIMITS),
        *(f'vllm:request_time_per_output_token_seconds_bucket{{model_name, le="{limit}"}}' for limit in _TPOT_LIMITS),
        *(f"vllm:{name}_total{{model_name}}" for name in _TOTALS),
        *(f"vllm:prefix_cache_{name}_total{{model_name}}" for name in ("hits", "queries")),
        *(f'vllm:num_requests_waiting_by_reason{{model_name, reason="{name}"}}' for name in ("capacity", "deferred")),
        *(
            f'vllm:prompt_tokens_by_source_total{{model_name, source="{name}"}}'
            for name in ("local_compute", "local_cache_hit", "external_kv_transfer")
        ),
        *(f"vllm:{name}{{model_name}}" for name in ("num_requests_running", "num_requests_waiting")),
        "vllm:kv_cache_usage_perc{model_name}",
        "vllm:request_success_total{model_name, finished_reason}",
        'vllm:request_success_total{model_name, finished_reason="error"}',
        "http_requests_total{status, handler}",
        'http_requests_total{status="5xx"}',
        *(f"http_request_duration_seconds_{part}{{handler}}" for part in ("sum", "count")),
    ],
    "dashboards/grafana/vllm_service_status.json": [
        'vllm:engine_sleep_state{model_name, sleep_state="awake"}',
        *_histograms(("time_to_first_token_seconds",), "model_name", ("bucket",)),
        "vllm:generation_tokens_total{model_name}",
        "vllm:num_requests_running{model_name}",
        "vllm:request_success_total{model_name}",
        'vllm:request_success_total{model_name, finished_reason="error"}',
    ],
    "dashboards/grafana/vllm_instances.json": [
        *_histograms(_SECONDS, _ENGINE, ("bucket",)),
        *_histograms(("request_queue_time_seconds", "iteration_tokens_total"), _ENGINE, ("sum", "count")),
        *(f"vllm:{name}_total{{{_ENGINE}}}" for name in (*_TOTALS, "request_success")),
        *(f"vllm:prefix_cache_{name}_total{{{_ENGINE}}}" for name in ("hits", "queries")),
        *(f"vllm:{name}{{{_ENGINE}}}" for name in ("num_requests_running", "num_requests_waiting")),
        f"vllm:kv_cache_usage_perc{{{_ENGINE}}}",
        f"vllm:num_requests_waiting_by_reason{{{_ENGINE}, reason}}",
        "vllm:cache_config_info{engine, block_size, num_gpu_blocks}",
        *(f'vllm:engine_sleep_state{{{_ENGINE}, sleep_state="{name}"}}' for name in ("awake", "discard_all")),
        "process_start_time_seconds",
        "process_cpu_seconds_total",
        "process_resident_memory_bytes",
        "process_open_fds",
        "process_max_fds",
    ],
    "dashboards/grafana/vllm_kv_cache.json": [
        *_histograms(("request_prompt_tokens", "request_prefill_kv_computed_tokens"), _ENGINE, ("sum", "count")),
        *(f"vllm:{name}_total{{{_ENGINE}}}" for name in ("prompt_tokens", "prompt_tokens_cached", "num_preemptions")),
        *(f"vllm:prefix_cache_{name}_total{{{_ENGINE}}}" for name in ("hits", "queries")),
        *(f'vllm:num_requests_waiting_by_reason{{{_ENGINE}, reason="{name}"}}' for name in ("capacity", "deferred")),
        *(
            f'vllm:prompt_tokens_by_source_total{{{_ENGINE}, source="{name}"}}'
            for name in ("local_compute", "local_cache_hit", "external_kv_transfer")
        ),
        f"vllm:prompt_tokens_cached_by_source_total{{{_ENGINE}, source}}",
        *(f"vllm:{name}{{{_ENGINE}}}" for name in ("num_requests_running", "kv_cache_usage_perc")),
    ],
    "dashboards/grafana/vllm_speculative_decoding.json": [
        *_histograms(("inter_token_latency_seconds",), _ENGINE),
        f"vllm:generation_tokens_total{{{_ENGINE}}}",
        *(f"vllm:spec_decode_num_{name}_total{{{_ENGINE}}}" for name in ("drafts", "draft_tokens", "accepted_tokens")),
        f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{_ENGINE}, position}}",
    ],
}

ABSENT: Final = (
    *("external_prefix_cache_", "mm_cache_", "kv_block_", "num_requests_kv_fetch_by_stage", "nixl_"),
    *("kv_offload_", "simple_kv_offload_"),
    *("lora_requests_info", "sleep_mode_operation_", "rl_weight_update_operation_", "estimated_"),
)
"""Beginnings of further names in the boards, without `vllm:`: of parts that vLLM, too, has only with a feature that is
switched on, and that this server does not have. Their panels stay empty."""
