"""benchmarks/h200.sh with a stub of `minisgl`: the commands of each part, and the names of their results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.bench.record import model_key
from minisgl.cli.main import build_parser
from support.frontend.served import RUNTIME

_SCRIPT = RUNTIME.parent / "benchmarks" / "h200.sh"

_STUB = """\
import http.server, json, signal, sys
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(arguments) + "\\n")
if arguments[0] == "serve":
    class Ready(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    http.server.HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Ready).serve_forever()
"""


def _commands(tmp_path: Path, port: int, *parts: str, **variables: str) -> list[list[str]]:
    """Commands of minisgl that the parts run."""
    stub, log = tmp_path / "stub.py", tmp_path / "commands"
    stub.write_text(_STUB.format(log=str(log)))
    subprocess.run(
        [_SCRIPT, *parts],
        env={
            **os.environ,
            "OUT": str(tmp_path / "out"),
            "MINISGL": f"{sys.executable} {stub}",
            "PYTHON": sys.executable,
            "MINISGL_KERNELS_DIR": str(tmp_path),
            "PORT": str(port),
            **variables,
        },
        check=True,
        capture_output=True,
        timeout=120,
    )
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture
def port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        free: int = server.getsockname()[1]
        return free


def test_every_part_is_described_with_its_duration() -> None:
    text = _SCRIPT.read_text()
    header, _, code = text.partition("set -uo pipefail")
    described = set(re.findall(r"^#   ([a-z0-9.-]+)  +(?:\d+ s )?", header, re.MULTILINE))
    known = set(re.findall(r"^    ([a-z0-9.-]+)\)", code, re.MULTILINE))
    assert described == known
    default = re.findall(r"parts=\(([a-z][^)]*)\)", code)[0].split()
    assert f"Default parts: {' '.join(default)}." in header.replace("\n# ", " ")


def test_commands_of_the_offline_parts_are_valid(tmp_path: Path) -> None:
    parts = ("kernels", "sampling", "small", "large", "small-models", "long-context", "compiled", "start", "moe")
    commands = _commands(tmp_path, 0, *parts)
    for command in commands:
        build_parser().parse_args(command)
    [sampling] = [command for command in commands if any("sampling-qwen3-0.6b" in word for word in command)]
    assert sampling[sampling.index("--variants") + 1 :][:5] == ["topk", "plain", "penalty", "logprobs", "mixed"]
    models = {command[command.index("--model") + 1] for command in commands if command[:2] == ["bench", "offline"]}
    built = next(command for command in commands if command[:2] == ["kernels", "build"])
    assert models <= {*built, *BUILTIN_CONFIGS} & set(built), (
        "kernels of each measured model are compiled ahead of time"
    )


def test_served_parts_record_the_latencies_under_their_names(tmp_path: Path, port: int) -> None:
    commands = _commands(tmp_path, port, "latency-0.6b", "latency-14b")
    figures: set[str] = set()
    for command in commands:
        args = build_parser().parse_args(command)
        figures |= {figure.partition("=")[0] for figure in getattr(args, "figures", [])}
    assert figures >= {
        "ttft_idle_qwen3_14b_ms",
        "ttft_idle_qwen3_0.6b_ms",
        "trace_20rps_qwen3_0.6b_ttft_p50_ms",
        "trace_20rps_qwen3_0.6b_ttft_p99_ms",
        "trace_20rps_qwen3_0.6b_itl_p99_ms",
        "trace_4rps_qwen3_14b_ttft_p50_ms",
        "trace_4rps_qwen3_14b_ttft_p99_ms",
        "trace_4rps_qwen3_14b_itl_p99_ms",
        "trace_4rps_qwen3_14b_tpot_p50_ms",
        "burst_256_qwen3_14b_itl_p99_ms",
        "burst_256_qwen3_14b_tok_s",
    }
    traces = [command for command in commands if "--trace" in command]
    assert [command[command.index("--trace-speed") + 1] for command in traces] == ["7.7", "1.54"]


def test_figures_of_a_shortened_trace_are_not_recorded(tmp_path: Path, port: int) -> None:
    commands = _commands(tmp_path, port, "latency-0.6b", REQUESTS="2")
    [trace] = [command for command in commands if "--trace" in command]
    assert build_parser().parse_args(trace).figures == []


def test_an_older_tree_and_this_one_run_in_turn(tmp_path: Path) -> None:
    commands = _commands(tmp_path, 0, "compare", BASE=str(tmp_path), BASE_KERNELS_DIR=str(tmp_path))
    names = [Path(command[command.index("--json") + 1]).stem for command in commands]
    runs = ("compare-1-qwen3-0.6b", "compare-2-qwen3-0.6b", "compare-qwen3-14b")
    assert names == [f"{run}-{tree}" for run in runs for tree in ("old", "new")]
    assert all("--record" not in command for command in commands), "figures of the older tree are not the newest ones"


def test_names_of_models_in_results() -> None:
    assert model_key("llama-3.2-1b") == "llama_3.2_1b"
    assert model_key("models/Qwen3-14B", tensor_parallel=2) == "qwen3_14b_tp2"
    # Results of a quantized model must not replace those of its original.
    names = [model_key("qwen3-14b", quantization=each) for each in ("fp8-block", "fp8", "int4")]
    assert names == ["qwen3_14b_fp8", "qwen3_14b_fp8_channel", "qwen3_14b_int4"]
    # It has no other form.
    assert model_key("gpt-oss-20b", quantization="mxfp4") == "gpt_oss_20b"
    assert model_key("qwen3-14b", 2, "fp8-block") == "qwen3_14b_fp8_tp2"
    assert model_key("qwen3-14b", quantization="fp8-block", kv_cache_dtype="fp8") == "qwen3_14b_fp8_kv"
