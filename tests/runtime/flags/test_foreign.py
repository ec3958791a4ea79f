"""Flags of vLLM, SGLang and mini-sglang on our command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from minisgl.cli.main import build_parser, main
from minisgl.flags.foreign import FOREIGN, MINI_SGLANG, MODEL, SGLANG, VLLM
from support.cli_reference import commands, flags


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, object], str]:
    """Settings that `serve` would use, and what it writes to stderr."""
    assert main(["serve", *arguments, "--print-config"]) == 0
    captured = capsys.readouterr()
    return yaml.safe_load(captured.out), captured.err


def test_a_command_line_of_vllm_sets_our_flags(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "--model m --tensor-parallel-size 2 --max-num-seqs=64 --gpu_memory_utilization 0.8 --no-enable-prefix-caching"
    )
    settings, errors = printed(capsys, *line.split(), "--enforce-eager", "--port", "1")
    assert settings["model"] == "m"
    assert (settings["tp"], settings["max-running"], settings["memory-fraction"]) == (2, 64, 0.8)
    assert (settings["cache"], settings["cuda-graph-max-batch"], settings["port"]) == ("naive", 0, 1)
    [said] = errors.splitlines()
    assert "--tensor-parallel-size (--tp)" in said
    assert "--enforce-eager (--cuda-graph-max-batch 0 --cuda-graph-max-tokens 0)" in said
    assert "--port" not in said


def test_a_command_line_of_sglang_sets_our_flags(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--model-path m --tp-size 2 --mem-fraction-static 0.7 --max-running-requests 8 --context-length 512"
    settings, _ = printed(capsys, *line.split(), "--disable-radix-cache", "--enable-metrics")
    assert settings["model"] == "m"
    assert (settings["tp"], settings["memory-fraction"], settings["max-running"]) == (2, 0.7, 8)
    assert (settings["max-model-len"], settings["cache"]) == (512, "naive")


def test_a_wrong_value_is_an_error_about_our_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "m", "--tensor-parallel-size", "0"])
    assert "--tp: '0' is not a whole number, 1 or more" in capsys.readouterr().err


def test_what_is_so_by_default_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    plain, nothing = printed(capsys, "m")
    settings, errors = printed(capsys, "m", "--enable-prefix-caching", "--enable-chunked-prefill")
    assert settings == plain
    assert (nothing, errors.count("\n")) == ("", 1)
    assert "--enable-prefix-caching (on by default)" in errors


def test_a_command_takes_its_own_flag_of_the_same_name_as_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    args = build_parser().parse_args(["bench", "serve", "--model", "m", "--block-size", "16", "--num-prompts", "3"])
    assert (args.model, args.block_size, args.num_requests) == ("m", 16, 3)
    assert "--block-size" not in capsys.readouterr().err


def test_commands_of_pods_take_flags_by_our_names_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """The operator reserves flags by name: another name would be a way around it."""
    with pytest.raises(SystemExit):
        main(["engine", "m", "--tensor-parallel-size", "2"])
    assert "unrecognized arguments: --tensor-parallel-size 2; --tensor-parallel-size is --tp here" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--async-scheduling", "--async-scheduling is not needed here, remove it: on by default"),
        (
            "--enforce-eager",
            "--enforce-eager is --cuda-graph-max-batch 0 --cuda-graph-max-tokens 0 here",
        ),
        ("--no-enable-prefix-caching", "--no-enable-prefix-caching is --cache naive here"),
        ("--model x", "--model is MODEL here"),
        ("--max-num-seq 4", "did you mean --max-num-seqs? --max-num-seqs is --max-running here"),
    ],
)
def test_a_command_of_a_pod_says_what_to_give_instead_of_a_foreign_flag(
    words: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["engine", "m", *words.split()])
    assert f"unrecognized arguments: {words}; {hint} (see" in capsys.readouterr().err


def test_every_foreign_flag_has_one_meaning_among_our_flags() -> None:
    ours = {
        name for _, parser in commands(build_parser()) for action in flags(parser) for name in action.option_strings
    }
    for table in (VLLM, SGLANG, MINI_SGLANG):
        for flag in table:
            assert flag.ours in {*ours, MODEL, ""}, flag
            assert {word for word in flag.words or () if word.startswith("--")} <= ours, flag
            assert flag.words is not None or flag.note, f"{flag} is refused without a reason"
            for name in flag.names:
                assert FOREIGN[name].ours == flag.ours, f"{name} means two things"
                assert FOREIGN[name].words == flag.words, f"{name} means two things"


@pytest.mark.parametrize(
    ("key", "ours"), [("tensor-parallel-size", "tp"), ("max_num_seqs", "max-running"), ("model_path", "model")]
)
def test_a_foreign_key_or_variable_gets_the_name_of_ours(
    key: str, ours: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "serve.yaml").write_text(f"{key}: 2\n")
    with pytest.raises(SystemExit):
        main(["serve", "m", "--config", str(tmp_path / "serve.yaml")])
    assert f"did you mean {ours}?" in capsys.readouterr().err
    monkeypatch.setenv("MINISGL_" + key.upper().replace("-", "_"), "2")
    with pytest.raises(SystemExit):
        main(["serve", "m"])
    assert f"did you mean MINISGL_{ours.upper().replace('-', '_')}?" in capsys.readouterr().err
