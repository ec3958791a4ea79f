"""/metrics as Prometheus parses it, and as dashboards made for vLLM expect it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from minisgl.frontend.metrics.counters import COUNT_EDGES, ITL_EDGES, LATENCY_EDGES, TTFT_EDGES, FrontendMetrics
from minisgl.frontend.metrics.process import ProcessUse
from minisgl.frontend.metrics.prometheus import Snapshot, render
from minisgl.frontend.metrics.types import Histogram
from minisgl.wire.messages import MOST_DRAFTS, Ack, Failed, FirstTokenWait, FromScheduler, Submit
from minisgl.wire.status import DataTypes
from support.frontend.fake_scheduler import answer_with, row
from support.frontend.served import eventually
from support.frontend.stack import FrontendStack, ids
from support.frontend.vllm_boards import ABSENT, BOARDS, parse
from support.messages import status_of

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
LABELS = {"model_name": "org/tiny", "engine": "0"}

MakeStack = Callable[..., FrontendStack]

LOAD = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
REASONS = ("capacity", "deferred")
STATUS = status_of(
    waiting=3,
    running=5,
    used_pages=16,
    num_pages=64,
    page_size=16,
    steps=7,
    prompt_tokens=100,
    cached_tokens=40,
    prefill_tokens=60,
    generated_tokens=30,
    preemptions=2,
    finished=4,
    queue_times=[2, 1, *[0] * 19, 1],
    queue_seconds=8000.5,
    step_sizes=[1, 2, *[0] * 12],
    step_tokens=13,
    start_seconds={"load": 1.5, "capture": 0.5},
    attention={"prefill": "fa3", "prefill_with_prefix": "fa3, torch"},
    data_types=(
        DataTypes(weights="fp8-block", kv_cache="fp8_e4m3"),
        DataTypes(weights="bfloat16", kv_cache="bfloat16"),
    ),
    compiled_after_ready=3,
    deferred=1,
    drafts=6,
    draft_tokens=20,
    accepted_draft_tokens=9,
    predicted_tokens=8,
    accepted_predicted_tokens=7,
    accepted_by_place=[5, 3, 1, 0, 0, 0, 0],
    state_checkpoints=8,
    used_state_checkpoints=6,
)


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return samples by name and labels, without the two labels that all have."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type != "unknown", family.name
        for sample in family.samples:
            assert sample.labels.items() >= LABELS.items()
            rest = tuple(sorted((key, value) for key, value in sample.labels.items() if key not in LABELS))
            assert (sample.name, rest) not in found, "duplicate sample"
            found[sample.name, rest] = sample.value
    return found


def failing_with(code: str) -> Callable[[Submit], list[FromScheduler]]:
    return lambda submit: [Failed(submit.id, code, "no answer")]


def rendered(metrics: FrontendMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    snapshot = Snapshot("org/tiny", STATUS, 0.25, {"reading": 1, "waiting": 2}, knows_load=True)
    metrics.rejections["waiting"] = 6
    return samples(render(metrics, snapshot).decode())


def test_the_page_has_the_last_status_of_the_scheduler() -> None:
    found = rendered(FrontendMetrics())
    for name, value in {
        "vllm:num_requests_waiting": 3,
        "vllm:num_requests_running": 5,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:generation_tokens_total": 30,
        "vllm:prefix_cache_queries_total": 100,
        "vllm:prefix_cache_hits_total": 40,
        "vllm:num_preemptions_total": 2,
        "vllm:spec_decode_num_drafts_total": 6,
        "vllm:spec_decode_num_draft_tokens_total": 20,
        "vllm:spec_decode_num_accepted_tokens_total": 9,
        "minisgl:engine_prediction_draft_tokens_total": 8,
        "minisgl:engine_prediction_accepted_tokens_total": 7,
    }.items():
        assert found[name, ()] == value, name
    accepted = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    by_position = [found[accepted, (("position", str(position)),)] for position in range(MOST_DRAFTS)]
    assert by_position == [5, 3, 1, 0, 0, 0, 0]
    pool = {"block_size": "16", "num_gpu_blocks": "64", "kv_cache_size_tokens": "1024"}
    assert found["vllm:cache_config_info", tuple(sorted(pool.items()))] == 1
    assert (found["minisgl:state_checkpoints", ()], found["minisgl:state_checkpoint_usage_perc", ()]) == (8, 0.75)
    assert found["minisgl:engine_last_step_age_seconds", ()] == 0.25
    waiting = {reason: found["vllm:num_requests_waiting_by_reason", (("reason", reason),)] for reason in REASONS}
    assert waiting == {"capacity": 2, "deferred": 1}
    queue = "vllm:request_queue_time_seconds"
    assert [found[f"{queue}_bucket", (("le", edge),)] for edge in ("0.3", "0.5", "7680.0", "+Inf")] == [2, 3, 3, 4]
    assert (found[f"{queue}_count", ()], found[f"{queue}_sum", ()]) == (4, 8000.5)
    step = "vllm:iteration_tokens_total"
    assert [found[f"{step}_bucket", (("le", edge),)] for edge in ("1.0", "8.0", "16384.0", "+Inf")] == [1, 3, 3, 3]
    assert found[f"{step}_sum", ()] == 13
    starts = [found["minisgl:engine_start_seconds", (("phase", phase),)] for phase in ("load", "capture")]
    assert starts == [1.5, 0.5]
    backends = [dict(labels) for name, labels in found if name == "minisgl:attention_backend_info"]
    assert backends == [
        {"kind": "prefill", "backend": "fa3"},
        {"kind": "prefill_with_prefix", "backend": "fa3"},
        {"kind": "prefill_with_prefix", "backend": "torch"},
    ]
    types = [dict(labels) for name, labels in found if name == "minisgl:data_type_info"]
    assert types == [
        {"weights": "fp8-block", "kv_cache": "fp8_e4m3"},
        {"weights": "bfloat16", "kv_cache": "bfloat16"},
    ]
    assert found["minisgl:kernels_compiled_after_ready_total", ()] == 3
    assert found["minisgl:frontend_inflight", (("phase", "waiting"),)] == 2
    for prefix in ("minisgl", "vllm"):
        assert found[f"{prefix}:admission_rejections_total", (("reason", "waiting"),)] == 6


def test_histograms_have_the_edges_of_vllm() -> None:
    found = rendered(FrontendMetrics())
    for name, edges in (
        ("vllm:time_to_first_token_seconds", TTFT_EDGES),
        ("vllm:inter_token_latency_seconds", ITL_EDGES),
        ("vllm:request_time_per_output_token_seconds", ITL_EDGES),
        ("vllm:e2e_request_latency_seconds", LATENCY_EDGES),
        ("vllm:request_prefill_time_seconds", LATENCY_EDGES),
        ("vllm:request_decode_time_seconds", LATENCY_EDGES),
        ("vllm:request_inference_time_seconds", LATENCY_EDGES),
        ("vllm:request_params_n", (1.0, 2.0, 5.0, 10.0, 20.0)),
        ("vllm:request_num_preemptions", (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)),
        ("vllm:request_params_max_tokens", COUNT_EDGES),
        ("vllm:request_queue_time_seconds", LATENCY_EDGES),
    ):
        limits = [dict(labels)["le"] for bucket, labels in found if bucket == f"{name}_bucket"]
        assert limits == [*map(str, edges), "+Inf"]
    assert (TTFT_EDGES[0], TTFT_EDGES[-1]) == (0.001, 2560.0)
    assert (ITL_EDGES[0], ITL_EDGES[-1]) == (0.01, 80.0)
    assert (LATENCY_EDGES[0], LATENCY_EDGES[-1]) == (0.3, 7680.0)


VLLM_NAMES = """num_requests_waiting num_requests_running kv_cache_usage_perc cache_config_info prompt_tokens_total
    generation_tokens_total prefix_cache_queries_total prefix_cache_hits_total num_preemptions_total
    request_success_total time_to_first_token_seconds inter_token_latency_seconds
    request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
    request_prefill_time_seconds request_decode_time_seconds request_prompt_tokens request_generation_tokens
    iteration_tokens_total request_inference_time_seconds request_params_n request_params_max_tokens
    request_num_preemptions num_requests_waiting_by_reason admission_rejections_total engine_sleep_state
    request_max_num_generation_tokens request_prefill_kv_computed_tokens prompt_tokens_cached_total
    prompt_tokens_by_source_total prompt_tokens_cached_by_source_total
    spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
    spec_decode_num_accepted_tokens_per_pos_total"""
OWN_NAMES = """admission_rejections_total frontend_event_loop_lag_seconds frontend_inflight disconnects_total
    slow_clients_total timeouts_total request_errors_total engine_last_step_age_seconds engine_starts_total
    engine_start_seconds attention_backend_info data_type_info kernels_compiled_after_ready_total
    requests_continued_total request_continue_gap_seconds log_lines_lost_total trace_spans_dropped_total
    untrusted_tenants_total
    state_checkpoints state_checkpoint_usage_perc
    requests_retried_total engine_steps_total engine_prefill_tokens_total request_accept_seconds
    engine_prediction_draft_tokens_total engine_prediction_accepted_tokens_total"""
COMMON_NAMES = """http_requests_total http_request_duration_seconds process_start_time_seconds process_cpu_seconds_total
    process_resident_memory_bytes process_open_fds process_max_fds"""
PROCESS = ProcessUse(started_at=1e9, cpu_seconds=2.5, resident_bytes=1 << 20, open_files=5, max_files=1024)


def test_all_metric_names_are_present_and_documented() -> None:
    page = render(FrontendMetrics(), Snapshot("org/tiny", STATUS, 0.25, {}, knows_load=True, process=PROCESS)).decode()
    given = set(re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE))
    own = {f"vllm:{name}" for name in VLLM_NAMES.split()} | {f"minisgl:{name}" for name in OWN_NAMES.split()}
    assert given == own | set(COMMON_NAMES.split())
    documented = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
    found = re.findall(r"`((?:(?:vllm|minisgl):(?!gateway_)|http_|process_(?!stuck))\w+)", documented)
    assert given == set(found), "those of a gateway are in its own tests"


def test_a_value_on_an_edge_is_in_the_bucket_below() -> None:
    histogram = Histogram("name", "Help.", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    histogram.observe(1.5, 3)
    assert histogram.counts == [2, 5, 1]
    assert histogram.sum == 18.5


def test_label_values_are_escaped() -> None:
    text = render(FrontendMetrics(), Snapshot('a"\\\nb', STATUS, 0.0, {}, knows_load=True)).decode()
    families = text_string_to_metric_families(text)
    assert {sample.labels["model_name"] for family in families for sample in family.samples} == {'a"\\\nb'}


def test_what_a_request_computed_cached_and_generated_is_counted(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.scheduler.answer = answer_with(ids("ok"), cached=1)
    usage = stack.http.post("/v1/completions", json={"prompt": "Hi", "n": 2, "max_tokens": 2}).json()["usage"]
    found = samples(stack.http.get("/metrics").text)
    cached, computed = 1, usage["prompt_tokens"] - 1
    assert found["vllm:prompt_tokens_cached_total", ()] == cached
    sources = {"local_compute": computed, "local_cache_hit": cached, "external_kv_transfer": 0}
    by_source = "vllm:prompt_tokens_by_source_total"
    assert {name: found[by_source, (("source", name),)] for name in sources} == sources
    assert found["vllm:prompt_tokens_cached_by_source_total", (("source", "device"),)] == cached
    assert found["vllm:request_prefill_kv_computed_tokens_sum", ()] == computed
    longest = "vllm:request_max_num_generation_tokens"
    assert (found[f"{longest}_count", ()], found[f"{longest}_sum", ()]) == (1, 2), "one prompt, of two choices"


def test_only_faults_of_the_server_finish_with_the_reason_error(make_stack: MakeStack) -> None:
    stack = make_stack()
    statuses = {"engine_error": 500, "deadline_exceeded": 408, "engine_stalled": 503}
    for code, status in statuses.items():
        stack.scheduler.answer = failing_with(code)
        assert stack.http.post("/v1/completions", json={"prompt": "a"}).status_code == status
    # The response has begun with 200 when the answer fails.
    stack.scheduler.answer = lambda submit: [Ack(submit.id), row(submit.id, 0, ids("a")[0])]
    with (
        pytest.raises(httpx.RemoteProtocolError),
        stack.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response,
    ):
        pieces = response.iter_text()
        next(pieces)
        submit = stack.scheduler.received(Submit)[-1]
        stack.scheduler.send(Failed(submit.id, "engine_error", "no answer"), to=submit)
        list(pieces)
    found = samples(stack.http.get("/metrics").text)
    assert found["vllm:request_success_total", (("finished_reason", "error"),)] == 3


def test_http_requests_are_counted_by_route_method_and_class_of_status(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.scheduler.answer = answer_with(ids("a"))
    stack.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    for path in ("/v1/models/a", "/v1/models/b/c", "/nowhere", "/elsewhere", "/health", "/metrics"):
        stack.http.get(path)
    # Methods that a route does not have are not told apart: each would be a series of each route.
    for method in ("MKCOL", "GET", "PUT"):
        stack.http.request(method, "/v1/completions")
    found = samples(stack.http.get("/metrics").text)
    counted = {
        (of["handler"], of["method"], of["status"]): value
        for (name, labels), value in found.items()
        if name == "http_requests_total" and (of := dict(labels))["handler"] != "/ready"
    }
    assert counted == {
        ("/v1/completions", "POST", "2xx"): 1,
        ("/v1/models/{name:path}", "GET", "4xx"): 2,
        ("none", "GET", "4xx"): 2,
        ("/v1/completions", "other", "4xx"): 3,
    }
    route = {("handler", "/v1/completions"), ("method", "POST")}
    times = {name: value for (name, labels), value in found.items() if route <= set(labels)}
    assert times["http_request_duration_seconds_count"] == 1


def test_a_scrape_renders_only_the_values_again_however_many_routes_there_are() -> None:
    metrics = FrontendMetrics()
    for number in range(200):
        metrics.http.observe(f"/{number}", "GET", 200, 0.2)
    rendered(metrics)
    kept = {route: each.template for route, each in metrics.http.seconds.items()}
    metrics.http.observe("/7", "GET", 200, 0.2)
    found = rendered(metrics)
    assert all(each.template is kept[route] for route, each in metrics.http.seconds.items())
    for number, count in ((6, 1), (7, 2)):
        of = (("handler", f"/{number}"), ("method", "GET"))
        assert found["http_request_duration_seconds_count", of] == count


def test_a_page_has_the_labels_of_its_model_when_the_model_changes() -> None:
    metrics = FrontendMetrics()
    for name in ("a", "b"):
        page = render(metrics, Snapshot(name, None, 0.0, {}, knows_load=False)).decode()
        models = {
            sample.labels["model_name"] for family in text_string_to_metric_families(page) for sample in family.samples
        }
        assert models == {name}


Sample = tuple[str, dict[str, str]]


@pytest.fixture(scope="module")
def board_samples(shared_stack: FrontendStack) -> Iterator[list[Sample]]:
    """Samples of a server that has answered, failed once, and knows the status of a busy engine."""
    scheduler, http = shared_stack.scheduler, shared_stack.http
    scheduler.answer = failing_with("engine_error")
    assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 500
    scheduler.answer = answer_with(ids("ok"))
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    idle, scheduler.status = scheduler.status, STATUS
    eventually(lambda: "vllm:iteration_tokens_total_count" in http.get("/metrics").text)
    families = text_string_to_metric_families(http.get("/metrics").text)
    yield [(sample.name, sample.labels) for family in families for sample in family.samples]
    scheduler.status = idle


@pytest.mark.parametrize("board", BOARDS)
def test_the_series_of_the_boards_of_vllm_are_there(board: str, board_samples: list[Sample]) -> None:
    missing = [text for text in BOARDS[board] if not any(parse(text).matches(*sample) for sample in board_samples)]
    assert not missing


def test_the_panels_of_vllm_boards_that_stay_empty_are_documented(board_samples: list[Sample]) -> None:
    present = {name for name, _ in board_samples}
    assert not [name for name in present if name.startswith(tuple(f"vllm:{beginning}" for beginning in ABSENT))]
    documented = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
    assert not [beginning for beginning in ABSENT if f"`{beginning}" not in documented]


def test_the_gauges_of_the_load_are_there_without_an_engine() -> None:
    now = Snapshot("org/tiny", None, 0.0, {"held": 2, "waiting": 1}, knows_load=True)
    found = samples(render(FrontendMetrics(), now).decode())
    gauges = {"num_requests_running": 0, "num_requests_waiting": 3, "kv_cache_usage_perc": 0}
    assert {name: found[f"vllm:{name}", ()] for name in gauges} == gauges
    assert not any(name.startswith("vllm:generation_tokens") for name, _ in found), "counters do not begin anew"


def test_a_frontend_that_has_reached_no_engine_yet_reports_no_load() -> None:
    now = Snapshot("org/tiny", None, 0.0, {"held": 2, "waiting": 1}, knows_load=False)
    found = samples(render(FrontendMetrics(), now).decode())
    assert not {name for name, _ in found} & {f"vllm:{name}" for name in LOAD}
    assert found["minisgl:frontend_inflight", (("phase", "held"),)] == 2


def test_a_completed_request_is_counted(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.scheduler.answer = answer_with(ids("ok ok"), cached=2)
    assert stack.http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 4}).status_code == 200
    usage = stack.http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 1}).json()["usage"]
    found = samples(stack.http.get("/metrics").text)
    assert found["vllm:request_success_total", (("finished_reason", "length"),)] == 2
    assert found["vllm:request_success_total", (("finished_reason", "stop"),)] == 0
    assert found["vllm:time_to_first_token_seconds_count", ()] == 2
    assert found["vllm:inter_token_latency_seconds_count", ()] == 3
    assert found["vllm:request_time_per_output_token_seconds_count", ()] == 1
    assert found["vllm:e2e_request_latency_seconds_count", ()] == 2
    assert found["vllm:request_generation_tokens_sum", ()] == 5
    assert found["vllm:request_prompt_tokens_sum", ()] == 2 * usage["prompt_tokens"]
    assert 0 < found["vllm:time_to_first_token_seconds_sum", ()] <= found["vllm:e2e_request_latency_seconds_sum", ()]
    assert found["minisgl:engine_starts_total", ()] == 1
    # Observed ten times a second, also without requests.
    lag = "minisgl:frontend_event_loop_lag_seconds_count"
    eventually(lambda: samples(stack.http.get("/metrics").text)[lag, ()] > 0)


def test_a_prompt_counts_once_including_cached_tokens(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.scheduler.answer = answer_with(ids("ok"), cached=1)
    body = {"prompt": ["Hi", "Hi", "you"], "n": 2, "max_tokens": 2}
    usage = stack.http.post("/v1/completions", json=body).json()["usage"]
    found = samples(stack.http.get("/metrics").text)
    assert usage["prompt_tokens"] == 2 * len(ids("Hi")) + len(ids("you"))
    assert found["vllm:prompt_tokens_total", ()] == usage["prompt_tokens"]
    assert found["vllm:request_prompt_tokens_count", ()] == 3
    assert found["vllm:request_generation_tokens_sum", ()] == usage["completion_tokens"] == 12


def test_parameters_inference_time_and_preemptions_are_observed(make_stack: MakeStack) -> None:
    stack = make_stack()

    def answer(submit: Submit) -> list[FromScheduler]:
        first, last = row(submit.id, 0, ids("a")[0]), row(submit.id, 1, ids("b")[0], "stop")
        waits = {0: FirstTokenWait(0.5, 0.75)}
        return [
            Ack(submit.id),
            msgspec.structs.replace(first, waits=waits),
            msgspec.structs.replace(last, preemptions={0: 3}),
        ]

    stack.scheduler.answer = answer
    chat = stack.http.post("/v1/chat/completions", json=CHAT).json()
    body = {"prompt": ["Hi", "you"], "n": 2, "max_tokens": 7}
    assert stack.http.post("/v1/completions", json=body).status_code == 200
    found = samples(stack.http.get("/metrics").text)
    assert (found["vllm:request_params_n_count", ()], found["vllm:request_params_n_sum", ()]) == (3, 1 + 2 + 2)
    rest = stack.scheduler.welcome.model.max_model_len - chat["usage"]["prompt_tokens"]
    assert found["vllm:request_params_max_tokens_sum", ()] == rest + 4 * 7
    assert found["vllm:request_num_preemptions_sum", ()] == 5 * 3
    assert found["vllm:request_num_preemptions_bucket", (("le", "2.0"),)] == 0
    inference, decode = (found[f"vllm:request_{part}_time_seconds_sum", ()] for part in ("inference", "decode"))
    assert abs(inference - decode - 5 * 0.75) < 1e-6


def test_errors_are_counted_by_code(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.scheduler.answer = lambda submit: [Failed(submit.id, "deadline_exceeded", "too late")]
    assert stack.http.post("/v1/completions", json={"prompt": "a"}).status_code == 408
    assert stack.http.post("/v1/completions", json={"prompt": "a", "model": "b"}).status_code == 404
    assert stack.http.get("/nowhere").status_code == 404
    found = samples(stack.http.get("/metrics").text)
    for code in ("deadline_exceeded", "model_not_found", "not_found"):
        assert found["minisgl:request_errors_total", (("code", code),)] == 1


def test_a_running_stream_is_in_flight(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.scheduler.answer = lambda submit: [Ack(submit.id), row(submit.id, 0, ids("a")[0])]
    with stack.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        lines = response.iter_lines()
        next(line for line in lines if '"content":"a"' in line)
        found = samples(stack.http.get("/metrics").text)
        assert found["minisgl:frontend_inflight", (("phase", "generating"),)] == 1
        (submit,) = stack.scheduler.received(Submit)
        stack.scheduler.send(row(submit.id, 1, ids("b")[0], "length"), to=submit)
        assert "data: [DONE]" in list(lines)
    assert re.search("text/plain; version=0.0.4", stack.http.get("/metrics").headers["content-type"])
    assert stack.http.post("/metrics").status_code == 405
