"""Parsing, errors and exit codes of commands, without starting a server."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl import __version__, bench
from minisgl.cli import frontend, serve, version
from minisgl.cli.main import build_parser, main
from minisgl.cli.models_tiny import QUANTIZATIONS
from minisgl.config import EngineConfig
from minisgl.launcher import frontend as frontend_launcher
from minisgl.launcher import serve as serve_launcher
from minisgl.launcher.endpoint import Endpoint
from minisgl.launcher.restarts import Limits
from minisgl.launcher.serve import ServeOptions
from minisgl.logging import LogOptions
from support.cli_reference import commands, flags
from support.tiny_checkpoint import tiny_checkpoint


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["serve"], "MODEL"),
        (["serve", "m", "--tp", "0"], "--tp: '0' is not a whole number, 1 or more"),
        (["serve", "m", "--tp", "two"], "--tp: 'two' is not a whole number"),
        (["serve", "m", "--port", "65536"], "--port: '65536' is not a whole number, 0 to 65535"),
        (["serve", "m", "--page-size", "257"], "--page-size: '257' is not a whole number, 1 to 256"),
        (["serve", "m", "--memory-fraction", "0"], "--memory-fraction: '0' is not a number above 0, up to 1"),
        (["serve", "m", "--memory-fraction", "nan"], "--memory-fraction: 'nan' is not a number"),
        (["serve", "m", "--drain-timeout", "-1"], "--drain-timeout"),
        (["serve", "m", "--attention-backend", "fast"], "--attention-backend: 'fast' is not auto, one of torch"),
        (["serve", "m", "--attention-backend", "fa3,xqa,torch"], "--attention-backend"),
        (["serve", "m", "--device", "tpu"], "--device"),
        (
            ["serve", "m", "--max-run", "3"],
            "unrecognized arguments: --max-run 3; did you mean --max-running? (see minisgl serve --help)",
        ),
        (["serve", "m", "--prot", "80"], "unrecognized arguments: --prot 80; did you mean --port? (see"),
        (["serve", "m", "--max_num_seq", "4"], "did you mean --max-num-seqs?"),
        (["serve", "m", "--enable-metric"], "--enable-metric; did you mean --enable-metrics? (see"),
        (["serve", "--modell", "m", "m"], "did you mean --model? (see"),
        (
            ["serve", "m", "--api-kee", "x"],
            "did you mean --api-key? --api-key is --api-keys here: a file with the keys",
        ),
        (["models", "check", "m", "--tp", "2"], "unrecognized arguments: --tp 2 (see"),
        (["serve", "m", "--enforce-eager=true"], "--enforce-eager=true: the flag takes no value; give --enforce-eager"),
        (["serve", "m", "--enable-metrics=true"], "--enable-metrics=true: the flag takes no value"),
        (["serve", "m", "--swap-space", "4"], "--swap-space does not exist here: nothing is moved to the host"),
        (["serve", "m", "--api-key", "x"], "--api-key is --api-keys here: a file with the keys"),
        (["serv", "m"], "invalid choice: 'serv'; did you mean serve?"),
        (["models", "chek", "m"], "invalid choice: 'chek'; did you mean check?"),
        (["serve", "m", "--cache", "radx"], "invalid choice: 'radx'; did you mean radix?"),
        (["frontend", "--engines", "e", "--max-num-seqs", "3"], "unrecognized arguments: --max-num-seqs 3 (see"),
        (["models", "check", "m", "--x"], "minisgl models check: error: unrecognized arguments: --x"),
        (["serve", "m", "--otlp-traces-endpoint", "grpc://c:4317"], "is not an http or https URL; traces are sent by"),
        (["serve", "m", "--otlp-traces-endpoint", "http://c:99999"], "is not an http or https URL; traces are sent by"),
        (["serve", "m", "--otlp-traces-endpoint", "http://[::1"], "is not an http or https URL; traces are sent by"),
        (["gateway", "--trace-sampling", "1.5"], "--trace-sampling: '1.5' is not a number 0 or more, up to 1"),
        (["bench", "offline", "--input-len", "5", "6", "7"], "--input-len: expected MIN MAX, or one value for both"),
    ],
)
def test_a_wrong_command_line_gives_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error
    assert "--help)" in error


def test_a_coded_error_gives_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "./no-such-model"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("minisgl: error: './no-such-model' is neither a directory nor")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--max-model-len", "999999"], "max_model_len_too_large"),
        (["--max-model-len", "1000", "--num-pages", "3"], "kv_pool_too_small"),
        (["--num-pages", "1000000000"], "out_of_memory"),
    ],
)
def test_a_value_that_cannot_fit_is_refused_before_a_process_starts(
    flags: list[str], code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve_launcher, "run_endpoint", lambda *_, **options: pytest.fail("it starts"))
    assert main(["serve", str(tiny_checkpoint()), "--device", "cpu", "--log-format", "json", *flags]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert json.loads(line)["extra"] == {"code": code}


def test_an_error_without_a_code_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: argparse.Namespace) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(version, "run", broken)
    with pytest.raises(ZeroDivisionError):
        main(["version"])


@pytest.mark.parametrize(("words", "lengths"), [(["20"], [20, 20]), (["20", "30"], [20, 30])])
def test_a_range_is_a_minimum_and_a_maximum_or_one_value(words: list[str], lengths: list[int]) -> None:
    for benchmark in ("serve", "offline"):
        assert build_parser().parse_args(["bench", benchmark, "--input-len", *words]).input_len == lengths


def test_the_help_of_every_flag_states_its_default() -> None:
    for name, parser in commands(build_parser()):
        for action in flags(parser):
            assert action.help, f"{name} {action.dest}"
            if action.option_strings:
                assert "(default: " in action.help, f"{name} {action.dest}"


def _seen_by_launcher(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    seen: list[ServeOptions] = []

    def record(options: ServeOptions) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(serve, "serve", record)
    return seen


def test_every_flag_of_serve_reaches_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _seen_by_launcher(monkeypatch)
    model = tiny_checkpoint()
    every_flag = (
        "--tp 2 --device cpu --dtype bfloat16 --max-running 8 --max-model-len 99 --max-step-tokens 64 --page-size 4 "
        "--num-pages 50 --memory-fraction 0.5 --cache naive --no-overlap --attention-backend fa3,xqa "
        "--cuda-graph-max-batch 0 --dummy-weights --audit --host 0.0.0.0 --port 0 --served-model-name m --tokenizers 3 "
        "--startup-timeout 9 --drain-timeout 1.5 --log-level debug --log-format json --revision r"
    )
    overrides = '{"rope_scaling": {"rope_type": "linear", "factor": 2.0}}'
    assert main(["serve", str(model), *every_flag.split(), "--hf-overrides", overrides]) == 0
    assert seen == [
        ServeOptions(
            engine=EngineConfig(
                model=str(model),
                device="cpu",
                dtype="bfloat16",
                hf_overrides={"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
                tensor_parallel=2,
                max_running=8,
                max_model_len=99,
                max_step_tokens=64,
                page_size=4,
                num_pages=50,
                memory_fraction=0.5,
                attention_backend="fa3,xqa",
                cuda_graph_max_batch=0,
                dummy_weights=True,
                audit=True,
                cache="naive",
                overlap=False,
            ),
            model_name="m",
            revision="r",
            endpoint=Endpoint(host="0.0.0.0", port=0, tokenizers=3),
            restarts=Limits(startup_timeout=9, max_restarts=3, restart_window=600),
            drain_timeout=1.5,
            log=LogOptions(level="debug", format="json"),
        )
    ]


def test_defaults_of_serve_are_those_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _seen_by_launcher(monkeypatch)
    model = tiny_checkpoint()
    main(["serve", str(model), "--device", "cpu"])
    defaults = EngineConfig(model=str(model), device="cpu")
    restarts = Limits(startup_timeout=1800, max_restarts=3, restart_window=600)
    assert seen == [ServeOptions(engine=defaults, model_name=model.name, restarts=restarts, drain_timeout=25)], (
        "command line and configuration must have the same defaults"
    )


@pytest.mark.parametrize("command", ["serve", "frontend"])
@pytest.mark.parametrize(
    ("flags", "continues", "held_bytes"),
    [((), True, 64 << 20), (("--no-continue", "--max-held-bytes", "5"), False, 5)],
)
def test_flags_of_lost_engines_and_held_requests_reach_tokenizers_and_frontend(
    command: str,
    flags: tuple[str, ...],
    continues: bool,
    held_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(serve, "serve", seen.append)
    monkeypatch.setattr(frontend, "serve_frontend", seen.append)
    arguments = {"serve": [str(tiny_checkpoint()), "--device", "cpu"], "frontend": ["--engines", "chat"]}
    assert main([command, *arguments[command], "--tokenizers", "2", *flags]) == 0
    launcher: Any = {"serve": serve_launcher, "frontend": frontend_launcher}[command]
    groups = {group.name: group for group in launcher.groups(*seen, tmp_path, 7)}
    configs = {name: groups[name].processes(1)[0].config for name in ("tokenizer0", "tokenizer1", "frontend")}
    assert [configs[name].continues for name in ("tokenizer0", "tokenizer1")] == [continues] * 2
    limits = configs["frontend"].limits
    assert (limits.continues, limits.held_bytes) == (continues, held_bytes)


def test_version_prints_the_versions_of_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["minisgl"] == __version__
    assert {"python", "torch", "gpu"} <= rows.keys()


def test_models_check_reports_missing_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    assert main(["models", "tiny", str(out), "--arch", "qwen3-moe"]) == 0
    assert main(["models", "check", str(out)]) == 0
    assert "can be served" in capsys.readouterr().out
    for weights in out.glob("*.safetensors"):
        weights.unlink()
    assert main(["models", "check", str(out)]) == 1
    assert "problem: " in capsys.readouterr().out


def test_models_check_applies_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    assert main(["models", "tiny", str(out), "--arch", "qwen2"]) == 0
    assert main(["models", "check", str(out), "--hf-overrides", '{"max_position_embeddings": 4096}']) == 0
    assert "longest sequence 4,096 tokens" in capsys.readouterr().out
    assert main(["models", "check", str(out), "--hf-overrides", '{"max_position": 4096}']) == 1
    assert "did you mean max_position_embeddings?" in capsys.readouterr().out


def test_models_check_reports_a_broken_tokenizer_or_chat_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    assert main(["models", "tiny", str(out), "--arch", "qwen3"]) == 0
    (out / "chat_template.jinja").write_text("{% for m in %}")
    assert main(["models", "check", str(out)]) == 0
    assert "note: the chat template fails" in capsys.readouterr().out
    (out / "tokenizer.json").write_text("{}")
    assert main(["models", "check", str(out)]) == 1
    assert "(tokenizer_broken)" in capsys.readouterr().out


def test_models_tiny_reports_a_directory_that_cannot_be_created(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["models", "tiny", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err.startswith(f"minisgl: error: {tmp_path}/file cannot be created (File exists)")


def test_models_tiny_offers_every_architecture() -> None:
    from minisgl.cli.models_tiny import ARCHITECTURES
    from minisgl.toy.tiny import TINY_ARCHS

    assert set(ARCHITECTURES) == set(TINY_ARCHS)


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_models_tiny_writes_quantized_checkpoints_that_models_check_describes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "tiny", str(tmp_path / "tiny"), "--quantization", name]) == 0
    assert main(["models", "check", str(tmp_path / "tiny")]) == 0
    stored = "fp8-block" if name == "fp8-block" else "fp8" if name.startswith("fp8") else "int4"
    printed = capsys.readouterr().out
    assert f"GiB as {stored})" in printed
    assert re.search(r"memory +\d\.\d\d GiB of weights on Hopper GPUs, \d\.\d\d GiB on others; [\d.]+ KiB", printed)


def test_models_tiny_offers_every_quantization() -> None:
    from minisgl.toy.quantize import QUANTIZATION_CONFIGS

    assert set(QUANTIZATIONS) == set(QUANTIZATION_CONFIGS)


def test_too_few_cuda_devices_are_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from minisgl.launcher import devices

    monkeypatch.setattr(devices, "cuda_device_count", lambda: 1)
    monkeypatch.setattr(serve, "serve", lambda _: SimpleNamespace())
    assert main(["serve", str(tiny_checkpoint()), "--device", "cuda", "--tp", "2"]) == 1
    assert "--tp 2 needs 2 CUDA device(s), but 1 are visible" in capsys.readouterr().err


def test_models_check_tells_the_memory_on_gpus_and_on_cpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A CPU serves every checkpoint in float32."""
    assert main(["models", "tiny", str(tmp_path / "tiny"), "--arch", "qwen2"]) == 0
    assert main(["models", "check", str(tmp_path / "tiny")]) == 0
    printed = capsys.readouterr().out
    numbers = r" +(\d+\.\d\d) GiB of weights{}; ([\d.]+) KiB of KV cache"
    on_gpu = re.search("^memory" + numbers.format(" on a GPU"), printed, re.MULTILINE)
    on_cpu = re.search("^memory on a CPU" + numbers.format(""), printed, re.MULTILINE)
    assert on_gpu is not None and on_cpu is not None
    assert float(on_cpu[2]) == 2 * float(on_gpu[2])


def test_models_check_tells_what_tokens_behind_a_window_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Path(bench.__file__).parent / "configs/gemma-4-31b.json"
    (tmp_path / "config.json").write_text(config.read_text())
    # There are no weights.
    assert main(["models", "check", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "880.0 KiB of KV cache for each token, 80.0 KiB for those behind a window of 1,024" in printed
    assert "longest sequence 262,144 tokens; 20.88 GiB of KV cache on a GPU" in printed
