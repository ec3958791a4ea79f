from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minisgl.bench.device_trace import utilization
from minisgl.bench.report import report, table
from minisgl.bench.workloads import WORKLOADS, Sizes
from minisgl.cli.main import main
from minisgl.toy.tiny import write_tiny_checkpoint
from support.frontend.served import RUNTIME
from support.tiny_checkpoint import tiny_checkpoint

_SECTIONS = ["bench", "machine", "versions", "command", "figures", "reference"]


def test_a_report_has_all_sections(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.json"
    report("x", {"a_ms": 0.25, "n": 3}, {"a_ms": 0.3}, str(path))
    document = json.loads(path.read_text())
    assert list(document) == _SECTIONS
    assert document["figures"] == {"a_ms": 0.25, "n": 3}
    assert document["versions"]["minisgl"]
    assert document["machine"]["cores"] >= 1


def test_a_table_shows_references_with_and_without_a_metric() -> None:
    rows = [line.split() for line in table("x", {"a": 0.25, "b": "cpu"}, {"a": 1234.5, "c": 7}).splitlines()]
    assert rows[2:] == [["a", "0.25", "1,234"], ["b", "cpu"], ["c", "7"]]


def test_workload_a_equals_the_published_one() -> None:
    workload = WORKLOADS["A"](Sizes(), 151_936, 0)
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    lengths = [random.randint(100, 1024) for _ in range(256)]
    assert workload.prompts == prompts
    assert workload.output_lengths == lengths
    assert (workload.prompt_tokens, workload.output_tokens) == (142_827, 133_966)
    assert {params.temperature for params in workload.params()} == {0.6}
    assert all(params.ignore_eos for params in workload.params())


def test_workload_c_is_a_single_request() -> None:
    workload = WORKLOADS["C"](Sizes(), 151_936, 0)
    assert (workload.prompt_tokens, workload.output_lengths, workload.temperature) == (4, [1024], 0.1)


def test_workload_c64_is_64_requests_like_that_of_c() -> None:
    workload = WORKLOADS["C64"](Sizes(), 151_936, 0)
    assert workload.prompts[0] == WORKLOADS["C"](Sizes(), 151_936, 0).prompts[0]
    assert len({tuple(prompt) for prompt in workload.prompts}) == len(workload.output_lengths) == 64
    assert (workload.prompt_tokens, workload.output_tokens) == (64 * 4, 64 * 1024)


def test_workload_d_shares_a_prefix_that_depends_on_the_seed() -> None:
    workload = WORKLOADS["D"](Sizes(), 151_936, 0)
    assert {len(prompt) for prompt in workload.prompts} == {2048 + 128}
    assert len({tuple(prompt[:2048]) for prompt in workload.prompts}) == 1
    assert len({tuple(prompt[2048:]) for prompt in workload.prompts}) == 256
    assert set(workload.output_lengths) == {128}
    assert WORKLOADS["D"](Sizes(), 151_936, 1).prompts[0][:8] != workload.prompts[0][:8]


def test_prompts_use_only_tokens_of_a_small_vocabulary() -> None:
    workload = WORKLOADS["A"](Sizes(requests=20), 300, 0)
    assert max(max(prompt) for prompt in workload.prompts) == 299


def test_bench_offline_measures_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "offline.json"
    sizes = "--num-requests 6 --input-len 3 40 --output-len 2 12 --repeat 2"
    engine = "--device cpu --num-pages 200 --max-running 4 --max-step-tokens 16"
    model = ["--model", str(tiny_checkpoint()), "--json", str(path)]
    assert main(["bench", "offline", *model, *sizes.split(), *engine.split()]) == 0
    document = json.loads(path.read_text())
    assert list(document) == _SECTIONS
    figures = document["figures"]
    assert figures["tokens_per_second_min"] <= figures["tokens_per_second"] <= figures["tokens_per_second_max"]
    assert figures["prefill_backend"] == figures["decode_backend"] == "torch"
    assert figures["mixed_steps"] > 0, "with a budget of 16 tokens per step, steps mix prefill and decode"
    assert figures["eager_decode_steps"] == 0
    assert document["reference"] == {}, "no roofline is known for a CPU"
    phases = [key for key in figures if key.startswith("start_")]
    assert {"start_imports_seconds", "start_load_seconds", "start_first_token_seconds"} <= {*phases}
    assert sum(figures[phase] for phase in phases) == pytest.approx(figures["engine_up_seconds"])
    assert "tokens_per_second" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["fp8", "fp8-block", "int4"])
def test_bench_offline_quantizes_weights_and_kv_cache(name: str, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "model", "qwen3", hidden=256, intermediate=512, heads=4, head_dim=64)
    command = "bench offline --device cpu --num-requests 2 --input-len 3 9 --output-len 2 4 --num-pages 90"
    flags = ["--dummy-weights", "--quantization", name, "--kv-cache-dtype", "fp8"]
    assert main([*command.split(), *flags, "--model", str(checkpoint), "--json", str(tmp_path / "a.json")]) == 0
    figures = json.loads((tmp_path / "a.json").read_text())["figures"]
    assert figures["tokens_per_second"] > 0


def test_bench_offline_updates_a_results_file_and_writes_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, trace = tmp_path / "results" / "cpu.json", tmp_path / "trace.json"
    command = "bench offline --device cpu --num-requests 2 --input-len 3 9 --output-len 2 4 --num-pages 900"
    model = ["--model", str(tiny_checkpoint()), "--record", str(record)]
    assert main([*command.split(), *model, "--trace", str(trace)]) == 0
    report = tmp_path / "offline.json"
    several = ["--workload", "C", "A", "--trace", str(tmp_path / "several.json.gz"), "--json", str(report)]
    assert main([*command.split(), *model, *several]) == 0
    figures = json.loads(report.read_text())["figures"]
    assert (figures["c_requests"], figures["a_requests"], figures["workload"]) == (1, 2, "C A")
    assert {path.name for path in tmp_path.glob("several*")} == {"several-c.json.gz", "several-a.json.gz"}
    known = json.loads(record.read_text())
    name = tiny_checkpoint().name.lower().replace("-", "_")
    assert known["figures"].keys() == {
        f"a_{name}_tok_s",
        f"c_{name}_tok_s",
        f"engine_up_{name}_s",
        "compiled_after_ready",
    }
    assert known["figures"][f"a_{name}_tok_s"] == pytest.approx(figures["a_tokens_per_second"], rel=1e-3)
    assert known["spread"].keys() == {f"a_{name}_tok_s", f"c_{name}_tok_s"}
    assert known["compiled_after_ready"] == {f"{name} A plain": 0, f"{name} C A plain": 0}
    assert known["f1_ratio"] == {}, "no roofline is known for a CPU"
    assert known["device"] == "cpu"
    assert json.loads(trace.read_text())["traceEvents"]
    assert "trace_idle_share" in capsys.readouterr().out

    record.write_text(json.dumps(known | {"device": "NVIDIA H200"}))
    assert main([*command.split(), *model]) == 1
    assert "holds results of NVIDIA H200" in capsys.readouterr().err


def test_bench_offline_measures_variants_of_sampling_with_one_engine(tmp_path: Path) -> None:
    record, report = tmp_path / "cpu.json", tmp_path / "offline.json"
    command = "bench offline --device cpu --num-requests 5 --input-len 40 90 --output-len 2 4 --num-pages 900"
    names = ["plain", "topk", "penalty", "logprobs", "mixed"]
    model = ["--model", str(tiny_checkpoint()), "--record", str(record), "--json", str(report)]
    assert main([*command.split(), *model, "--variants", *names]) == 0
    metrics = json.loads(report.read_text())["figures"]
    assert metrics["variants"] == " ".join(names)
    assert all(metrics[f"{name}_requests"] == 5 for name in names)
    assert all(metrics[f"{name}_cached_tokens"] == 0 for name in names), "each variant computes all of its prompts"
    model_key = tiny_checkpoint().name.lower().replace("-", "_")
    rates = {f"a_{model_key}_tok_s", *(f"a_{model_key}_{name}_tok_s" for name in names[1:])}
    assert json.loads(record.read_text())["figures"].keys() == {
        *rates,
        f"engine_up_{model_key}_s",
        "compiled_after_ready",
    }

    assert main([*command.split(), *model, "--presence-penalty", "1", "--repetition-penalty", "1.1"]) == 0
    added = json.loads(record.read_text())["figures"].keys() - rates
    assert added == {
        f"a_{model_key}_presence_penalty1_repetition_penalty1.1_tok_s",
        f"engine_up_{model_key}_s",
        "compiled_after_ready",
    }


def test_bench_offline_measures_a_long_prompt(tmp_path: Path) -> None:
    record, report = tmp_path / "cpu.json", tmp_path / "offline.json"
    command = "bench offline --device cpu --workload L --context-len 200 --num-pages 900 --max-step-tokens 64"
    model = ["--model", str(tiny_checkpoint()), "--record", str(record), "--json", str(report)]
    assert main([*command.split(), *model]) == 0
    metrics = json.loads(report.read_text())["figures"]
    assert metrics["first_token_seconds"] > 0
    assert metrics["tpot_ms"] > 0
    model_key = tiny_checkpoint().name.lower().replace("-", "_")
    assert json.loads(record.read_text())["figures"].keys() == {
        f"first_token_0.2k_{model_key}_s",
        f"tpot_at_0.2k_{model_key}_ms",
        f"engine_up_{model_key}_s",
        "compiled_after_ready",
    }


def test_utilization_merges_overlapping_work_and_finds_gaps() -> None:
    found = utilization([(10, 20), (0, 4), (12, 15), (18, 25), (30, 40)])
    assert (found.span, found.busy, found.gaps, found.longest_gap) == (40, 29, 2, 6)
    assert found.idle_share == pytest.approx(11 / 40)
    assert utilization([]).idle_share == 0


def test_bench_comm_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(RUNTIME))
    path = tmp_path / "comm.json"
    assert main(["bench", "comm", "--device", "cpu", "--sizes", "4096", "1000", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["figures"]
    assert figures["transport"].startswith("gloo")
    assert figures["latency_us_4KiB"] > 0
    assert figures["bus_gb_per_s_1000B"] > 0


def test_frontend_benchmark_counts_every_token(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    figures = _run_script(
        "frontend.py", path, "--streams", "24", "--step-ms", "20", "--seconds", "0.5", "--model", str(tiny_checkpoint())
    )
    for tokenizers in (0, 1):
        assert figures[f"tokens_per_core_second_{tokenizers}_tokenizers"] > 0
        # At most one event per token; fewer on a busy machine.
        assert 0 < figures[f"events_per_token_{tokenizers}_tokenizers"] <= 1
    assert figures["metrics_ms_p50"] > 0


def test_scheduler_benchmark_reports_all_metrics(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    figures = _run_script("scheduler.py", path, "--steps", "50", "--prefixes", "100")
    times = ("decode_step_cpu_ms", "decode_step_wall_ms")
    ratios = ("ratio_50k_prefixes_to_plain", "ratio_reference_system_to_ours")
    for name in (*times, *(f"{time}_50k_prefixes" for time in times), *ratios):
        assert figures[name] > 0
    assert figures["steps_without_eviction"] == 0, "the second run did not measure evictions in every step"
    assert figures["evicted_pages_per_step"] > 0
    assert figures["cached_prefixes_at_end"] >= 100


def _run_script(name: str, path: Path, *arguments: str) -> dict[str, Any]:
    """Run a script of benchmarks/; returns the metrics that it writes to `path`."""
    script = RUNTIME.parent / "benchmarks" / name
    subprocess.run(
        [sys.executable, script, *arguments, "--json", path],
        env={**os.environ, "PYTHONPATH": str(RUNTIME)},
        check=True,
        timeout=240,
    )
    figures: dict[str, Any] = json.loads(path.read_text())["figures"]
    return figures
