"""`bench serve` with a fake server: the requests, their times, and the report of the answers."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.bench.progress import Progress
from minisgl.bench.samples import Answer, Sample, median_metrics, sample, summarize
from minisgl.bench.traces import TraceShape, make_trace, prompt_tokens, read_trace, write_trace
from minisgl.bench.workloads import WORKLOADS, Sizes
from minisgl.cli.main import main
from minisgl.errors import BenchError
from support.openai_stub import Endpoint


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    fake = Endpoint()
    yield fake
    fake.close()


def _metrics(path: Path) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads(path.read_text())["figures"]
    return metrics


def test_requests_of_a_trace_are_sent_at_their_times(endpoint: Endpoint, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 400, "input_length": 12, "output_length": 3, "hash_ids": [1, 9]}\n'
        '{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [1, 2]}\n\n'
        '{"timestamp": 800, "input_length": 7, "output_length": 1}\n'
    )
    json_path, plot = tmp_path / "report.json", tmp_path / "plot.png"
    command = f"bench serve --url {endpoint.url}/v1 --trace {trace} --block-size 8 --json {json_path} --plot {plot}"
    assert main([*command.split(), "--slo-ttft-ms", "60000", "--slo-e2e-ms", "0.0001"]) == 0
    prompts = [body["prompt"] for body in endpoint.bodies]
    assert [len(prompt) for prompt in prompts] == [10, 12, 7]
    assert prompts[0][:8] == prompts[1][:8]
    assert prompts[0][8:] != prompts[1][8:10]
    assert all(0 <= token < 256 for prompt in prompts for token in prompt)
    assert [body["max_tokens"] for body in endpoint.bodies] == [5, 3, 1]
    assert all(body["model"] == "fake" and body["ignore_eos"] for body in endpoint.bodies)
    metrics = _metrics(json_path)
    assert (metrics["completed"], metrics["failed"], metrics["output_tokens"]) == (3, 0, 9)
    assert metrics["goodput_share"] == 0
    assert metrics["duration_s"] >= 0.8
    assert 0 < metrics["ttft_ms_p50"] <= metrics["ttft_ms_p99"] <= metrics["e2e_ms_p99"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_max_concurrency_limits_requests_in_flight(endpoint: Endpoint) -> None:
    command = f"bench serve --url {endpoint.url} --num-requests 9 --output-len 5 9 --max-concurrency 2 --api chat"
    assert main([*command.split(), "--stop-at-eos"]) == 0
    assert len(endpoint.bodies) == 9
    assert endpoint.most <= 2
    assert all("ignore_eos" not in body and "messages" in body for body in endpoint.bodies)


def test_a_workload_is_sent_with_its_prompts_and_sampling_parameters(endpoint: Endpoint, tmp_path: Path) -> None:
    json_path = tmp_path / "report.json"
    command = f"bench serve --url {endpoint.url} --workload A --num-requests 3 --vocabulary 300 --json {json_path}"
    assert main([*command.split(), "--seed", "1", "--top-k", "20", "--presence-penalty", "-0.5"]) == 0
    workload = WORKLOADS["A"](Sizes(requests=3), 300, 1)
    bodies = sorted(endpoint.bodies, key=lambda body: body["seed"])
    assert [body["prompt"] for body in bodies] == workload.prompts
    assert [body["max_tokens"] for body in bodies] == workload.output_lengths
    assert [body["seed"] for body in bodies] == [0, 1, 2]
    for body in bodies:
        assert (body["temperature"], body["top_k"], body["presence_penalty"]) == (0.6, 20, -0.5)
        assert "top_p" not in body
    metrics = _metrics(json_path)
    assert metrics["tokens_per_chunk"] == 1
    assert metrics["client_cpu_share"] > 0


def test_warm_up_requests_come_first_and_do_not_count(endpoint: Endpoint, tmp_path: Path) -> None:
    json_path = tmp_path / "report.json"
    command = f"bench serve --url {endpoint.url} --input-len 4 4 --output-len 2 2 --json {json_path}"
    assert main([*command.split(), "--num-requests", "5", "--warm-up", "2", "--repeat", "3"]) == 0
    assert len(endpoint.bodies) == 3 * (2 + 5)
    prompts = {tuple(body["prompt"]) for body in endpoint.bodies}
    assert len(prompts) == 3 * 2 + 3 * 5
    assert _metrics(json_path)["completed"] == 5


def test_chosen_metrics_are_recorded(endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, json_path = tmp_path / "results.json", tmp_path / "report.json"
    endpoint.metrics = b'# TYPE x\nminisgl:kernels_compiled_after_ready_total{engine="0"} 2\n'
    command = (
        f"bench serve --url {endpoint.url} --num-requests 3 --repeat 2 --record {record} --json {json_path}".split()
    )
    assert main([*command, "--figures", "trace_ttft_p50_ms=ttft_ms_p50", "trace_itl_p99_ms=itl_ms_p99"]) == 0
    known, metrics = json.loads(record.read_text()), _metrics(json_path)
    assert known["figures"]["trace_ttft_p50_ms"] == pytest.approx(metrics["ttft_ms_p50"], rel=1e-3)
    assert known["figures"]["trace_itl_p99_ms"] == pytest.approx(metrics["itl_ms_p99"], rel=1e-3)
    low, high = known["spread"]["trace_ttft_p50_ms"]
    assert low <= known["figures"]["trace_ttft_p50_ms"] <= high
    assert metrics["compiled_after_ready"] == 2
    assert known["compiled_after_ready"] == {"serve trace_ttft_p50_ms": 2}
    assert known["figures"]["compiled_after_ready"] == 2
    assert main([*command, "--figures", "x=none"]) == 1
    assert "the report has no metric 'none'" in capsys.readouterr().err


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_progress_and_nothing_else_does(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # On a busy machine there may be a warning that the client lags.
    monkeypatch.setattr("minisgl.bench.serve._LAG_LIMIT_MS", math.inf)
    command = f"bench serve --url {endpoint.url} --num-requests 3 --warm-up 1 --input-len 8 --output-len 2".split()
    assert main(command) == 0
    assert capsys.readouterr().err == ""
    terminal = _Terminal()
    with monkeypatch.context() as patched:
        patched.setattr("sys.stderr", terminal)
        assert main(command) == 0
    shown = terminal.getvalue()
    assert "0 of 1 warm-up requests answered, 0 running" in shown
    assert "0 of 3 requests answered" in shown
    assert shown.endswith("\r\033[K"), "the line is erased before the report"


def test_the_progress_counts_failures_apart() -> None:
    progress = Progress("requests", 9)
    progress.sent, progress.answered, progress.failed = 7, 3, 1
    assert str(progress).startswith("3 of 9 requests answered, 3 running, 1 failed, ")


def test_failures_are_counted_and_reported(
    endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_path = tmp_path / "report.json"
    command = f"bench serve --url {endpoint.url} --num-requests 2 --json {json_path}".split()
    endpoint.broken = True
    assert main(command) == 1
    assert "2 requests failed; the first error: the connection broke before the answer" in capsys.readouterr().err
    endpoint.broken, endpoint.refused = False, True
    assert main(command) == 1
    assert "HTTP 429: too many (overloaded)" in capsys.readouterr().err
    assert _metrics(json_path)["failed"] == 2


@pytest.mark.parametrize("models", [{"data": []}, {}, [], "page"])
@pytest.mark.parametrize("command", ["bench serve --url", "chat"])
def test_a_server_without_an_openai_api_is_an_error(
    models: Any, command: str, endpoint: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.models = models
    assert main([*command.split(), endpoint.url]) == 1
    assert capsys.readouterr().err == f"minisgl: error: {endpoint.url} lists no model; name one with --model\n"
    endpoint.models = b"<html>"
    assert main([*command.split(), endpoint.url]) == 1
    assert "/v1/models does not return JSON; is it an OpenAI endpoint?" in capsys.readouterr().err


@pytest.mark.parametrize("first_event", ["<html>", "{}", "[]", '{"choices": [{}]}'])
def test_a_chat_continues_after_an_invalid_chunk(
    first_event: str, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.first_event = first_event
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n/stats\n"))
    assert main(["chat", endpoint.url, "--max-tokens", "1"]) == 1
    captured = capsys.readouterr()
    assert "not a chunk of an OpenAI stream" in captured.err
    assert captured.out.endswith("nothing was answered yet\n")


def test_errors_name_files_that_cannot_be_written(
    endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = str(tmp_path / "none" / "file")
    command = f"bench serve --url {endpoint.url} --num-requests 1 --output-len 1 1".split()
    assert main([*command, "--write-trace", nowhere]) == 1
    assert main([*command, "--plot", nowhere]) == 0
    assert capsys.readouterr().err.count(f"{nowhere} cannot be written: No such file or directory") == 2


def test_synthetic_traces_can_be_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    command = f"bench serve --num-requests 50 --request-rate 10 --seed 3 --shared-prefixes 2 --write-trace {path}"
    assert main([*command.split(), "--block-size", "16"]) == 0
    requests = read_trace(path)
    assert len(requests) == 50
    assert requests[0].timestamp == 0
    beginnings = {request.hash_ids[0] for request in requests if len(request.hash_ids) > 1}
    assert len(beginnings) == 2
    write_trace(path, requests)
    assert read_trace(path) == requests


def test_burstiness_changes_the_gaps_but_not_the_rate() -> None:
    def gaps(burstiness: float) -> list[float]:
        shape = TraceShape(
            requests=4000,
            input_length=(1, 1),
            output_length=(1, 1),
            rate=10,
            burstiness=burstiness,
            shared_prefixes=0,
            block=16,
        )
        times = [request.timestamp for request in make_trace(shape, 0)]
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    regular, bursty = gaps(0.01), gaps(4.0)
    for each in (regular, bursty):
        assert 90 < sum(each) / len(each) < 110
    assert max(regular) - min(regular) < 100
    assert max(bursty) > 1000


def test_prompts_without_hash_ids_differ() -> None:
    shape = TraceShape(
        requests=2,
        input_length=(40, 40),
        output_length=(1, 1),
        rate=None,
        burstiness=1,
        shared_prefixes=0,
        block=16,
    )
    first, second = (
        prompt_tokens(request, number, block=16, vocabulary=50, seed=0)
        for number, request in enumerate(make_trace(shape, 0))
    )
    assert len(first) == len(second) == 40
    assert first != second
    assert max(first + second) < 50


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no request"),
        ('{"timestamp": 1, "input_length": 2}', "line 1: .*output_length"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "line 1: .*>= 1"),
        ("{", "line 1"),
    ],
)
def test_the_error_of_an_invalid_trace_names_the_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError, match=message):
        read_trace(path)
    with pytest.raises(BenchError, match="cannot be read"):
        read_trace(tmp_path / "none")


def _chunks(events: list[tuple[float, str]], size: int) -> list[tuple[float, bytes]]:
    """Pieces of `size` bytes of the events, each with the time of its event."""
    texts = [(at, f"data: {data}\r\n\r\n".encode()) for at, data in events]
    return [(at, text[begin : begin + size]) for at, text in texts for begin in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_times_of_a_stream_do_not_depend_on_its_division(size: int) -> None:
    def event(text: str) -> str:
        return json.dumps({"choices": [{"text": text}]})

    usage = '{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}'
    events = [(10.1, event("")), (10.3, event("a")), (10.4, event("bcd")), (10.5, event("")), (10.8, event("e"))]
    chunks = _chunks([*events, (10.9, usage), (10.9, "[DONE]"), (11.0, event("late"))], size)
    found = sample(Answer(10.0, chunks))
    assert found.ttft == pytest.approx(0.3)
    assert found.gaps == pytest.approx([0.1, 0.4])
    assert found.e2e == pytest.approx(0.9)
    assert (found.prompt_tokens, found.output_tokens, found.error) == (3, 5, "")
    assert "without [DONE]" in sample(Answer(10.0, _chunks(events, size))).error


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_and_calls_are_output_as_text_is(field: str) -> None:
    """Usage counts their tokens, so the times without them would be those of other tokens."""
    call = {"index": 0, "function": {"name": "weather", "arguments": "{}"}}
    deltas: list[tuple[float, dict[str, Any]]] = [
        (10.1, {"role": "assistant", "content": ""}),
        (10.2, {field: "so"}),
        (10.3, {field: "then", "content": None}),
        (10.5, {"content": "Let me look."}),
        (10.9, {"tool_calls": [call]}),
    ]
    events = [(at, json.dumps({"choices": [{"delta": delta}]})) for at, delta in deltas]
    usage = '{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 8}}'
    found = sample(Answer(10.0, _chunks([*events, (10.9, usage), (10.9, "[DONE]")], 1000)))
    assert found.ttft == pytest.approx(0.2)
    assert found.gaps == pytest.approx([0.1, 0.2, 0.4])
    assert found.tpot == pytest.approx(0.1)


def test_an_error_in_a_stream_is_the_error_of_the_request() -> None:
    chunks = [(1.0, b'data: {"error": {"message": "engine died", "code": "engine_failed"}}\n\n')]
    assert "engine died" in sample(Answer(0.0, chunks)).error
    assert "not a chunk" in sample(Answer(0.0, [(1.0, b"data: <html>\n\ndata: [DONE]\n\n")])).error


def test_the_median_of_runs_is_taken_metric_by_metric() -> None:
    runs: list[dict[str, Any]] = [{"a": 1.0, "b": 5}, {"a": 3.0, "b": 4}, {"a": 2.0, "b": 9, "c": 7}]
    assert median_metrics(runs) == {"a": 2.0, "b": 5, "c": 7}


def test_the_summary_of_known_samples() -> None:
    samples = [Sample(ttft=0.1, gaps=[0.01] * 9, e2e=0.19, prompt_tokens=5, output_tokens=10), Sample(error="x")]
    metrics = summarize(samples, 2.0, {"ttft": 100.0, "tpot": 5.0})
    assert metrics["requests_per_second"] == 0.5
    assert metrics["output_tokens_per_second"] == 5
    assert metrics["tpot_ms_p99"] == pytest.approx(10)
    assert metrics["goodput_share"] == 0
    assert summarize(samples, 2.0, {"tpot": 11.0})["goodput_share"] == 0.5
