"""Flags, MINISGL_* variables and the YAML file of `serve` set the same settings, in one order of precedence."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from minisgl.cli.main import main
from minisgl.toy.tiny import write_tiny_checkpoint


def _printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, tuple[object, str]]:
    """Value and source of each key that --print-config prints."""
    assert main(["serve", *arguments, "--print-config"]) == 0
    text = capsys.readouterr().out
    values = yaml.safe_load(text)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    sources = {line.partition(":")[0]: line.rpartition("  # ")[2] for line in lines}
    assert values.keys() == sources.keys()
    return {key: (values[key], sources[key]) for key in values}


def _file(folder: Path, text: str) -> str:
    path = folder / "serve.yaml"
    path.write_text(text)
    return str(path)


def test_flag_wins_over_environment_over_file_over_default(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _file(tmp_path, "model: m\nport: 1\ntokenizers: 0\ntp: 4\naudit: true\npage-size:\nno-overlap:\n")
    monkeypatch.setenv("MINISGL_PORT", "2")
    monkeypatch.setenv("MINISGL_TP", "3")
    monkeypatch.setenv("MINISGL_DUMMY_WEIGHTS", "on")
    printed = _printed(capsys, "--config", config, "--port", "3")
    assert printed["port"] == (3, "flag")
    assert printed["tp"] == (3, "environment MINISGL_TP")
    assert printed["dummy-weights"] == (True, "environment MINISGL_DUMMY_WEIGHTS")
    assert printed["tokenizers"] == (0, f"file {config}")
    assert printed["model"] == ("m", f"file {config}")
    assert printed["audit"] == (True, f"file {config}")
    assert printed["page-size"] == (None, "default")
    assert printed["no-overlap"] == (False, "default")
    assert printed["host"] == ("127.0.0.1", "default")


def test_a_variable_can_name_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_CONFIG", _file(tmp_path, "host: '::1'\n"))
    assert _printed(capsys)["host"][0] == "::1"


def test_an_object_is_json_text_or_a_mapping(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '{"rope_scaling":{"type":"yarn","factor":4.0}}'
    config = _file(tmp_path, "model: m\nhf-overrides:\n  rope_scaling:\n    type: yarn\n    factor: 4.0\n")
    assert _printed(capsys, "m")["hf-overrides"] == (None, "default")
    assert _printed(capsys, "--config", config)["hf-overrides"] == (text, f"file {config}")
    monkeypatch.setenv("MINISGL_HF_OVERRIDES", '{"rope_theta": 1}')
    assert _printed(capsys, "--config", config)["hf-overrides"][0] == '{"rope_theta":1}'
    assert _printed(capsys, "m", "--hf-overrides", text)["hf-overrides"] == (text, "flag")


def test_the_printed_configuration_is_a_valid_file_with_the_same_values(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ("some: model # 1", "--memory-fraction", "0.5", "--no-overlap", "--hf-overrides", '{"rope_theta": 1e6}')
    first = _printed(capsys, *flags)
    assert main(["serve", *flags, "--print-config"]) == 0
    again = _printed(capsys, "--config", _file(tmp_path, capsys.readouterr().out))
    assert {key: value for key, (value, _) in again.items()} == {key: value for key, (value, _) in first.items()}


@pytest.mark.parametrize("text", ["off", "false", "'off'"])
def test_the_choice_off_needs_no_quotes_in_a_file(
    text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    value, _ = _printed(capsys, "--config", _file(tmp_path, f"speculative: {text}"))["speculative"]
    assert value == "off"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "key 'prot' is unknown; did you mean port?"),
        ("max_running: 1", "key 'max_running' is unknown; did you mean max-running?"),
        ("port: 70000", "port: '70000' is not a whole number, 0 to 65535"),
        ("port: [1, 2]", "port: [1, 2] is not a single value"),
        ("audit: 1", "audit: 1 is neither true nor false"),
        ("port: {a: 1}", "port: {'a': 1} is not a single value"),
        ("hf-overrides: rope", "hf-overrides: 'rope' is not a JSON object"),
        ("hf-overrides: '[1]'", "hf-overrides: '[1]' is not a JSON object"),
        ("speculative: on", "speculative: True is not a single value"),
        ("device: tpu", "device: 'tpu' is not one of auto, cpu, cuda"),
        ("port: [1", "is not YAML"),
        ("- port", "must contain keys with values, not a list"),
    ],
)
def test_an_error_in_the_file_names_the_key(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "m", "--config", _file(tmp_path, text)])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "serve.yaml" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MINISGL_PROT", "1", "MINISGL_PROT is unknown; did you mean MINISGL_PORT?"),
        ("MINISGL_ADMIN_PROT", "1", "MINISGL_ADMIN_PROT is unknown; did you mean MINISGL_ADMIN_PORT?"),
        ("MINISGL_CHAT_PORT", "1", "MINISGL_CHAT_PORT is unknown; did you mean "),
        ("MINISGL_PORT", "x", "MINISGL_PORT: 'x' is not a whole number"),
        ("MINISGL_AUDIT", "perhaps", "MINISGL_AUDIT: 'perhaps' is neither true nor false"),
        ("MINISGL_CONFIG", "/no/such.yaml", "/no/such.yaml cannot be read"),
    ],
)
def test_an_error_in_a_variable_names_it(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "m"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_variables_that_kubernetes_sets_for_a_service_are_ignored_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = "tcp://10.96.0.7:8000"
    service = {
        "MINISGL_SERVICE_HOST": "10.96.0.7",
        "MINISGL_SERVICE_PORT": "8000",
        "MINISGL_SERVICE_PORT_HTTP": "8000",
        "MINISGL_PORT": address,
        "MINISGL_PORT_8000_TCP": address,
        "MINISGL_PORT_8000_TCP_PROTO": "tcp",
        "MINISGL_PORT_8000_TCP_PORT": "8000",
        "MINISGL_PORT_8000_TCP_ADDR": "10.96.0.7",
        # Those of Services named minisgl-admin and minisgl-chat.
        "MINISGL_ADMIN_PORT": address,
        "MINISGL_CHAT_SERVICE_HOST": "10.96.0.8",
        "MINISGL_CHAT_PORT": address,
    }
    for name, value in service.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MINISGL_TP", "2")
    assert main(["serve", "m", "--print-config"]) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["port"] == 8000 and yaml.safe_load(printed.out)["tp"] == 2
    assert printed.err.startswith("minisgl: warning: ") and "enableServiceLinks" in printed.err
    assert all(name in printed.err for name in service) and printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "comment"),
    [
        ((), "# attention backends on cpu: torch"),
        (("--attention-backend", "torch,torch"), "# attention backends on cpu:\n#   prefill: torch\n"),
        (
            ("--attention-backend", "fa3"),
            "# attention backends: unknown, because the start would fail here: attention backend 'fa3' cannot prefill "
            "here: it needs a CUDA device; or use auto\n",
        ),
        (("--device", "cuda"), "# attention backends: unknown, because the start would fail here: "),
    ],
)
def test_the_printed_configuration_names_the_attention_backends_of_a_start(
    arguments: tuple[str, ...], comment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_checkpoint(tmp_path, "qwen3")
    assert main(["serve", str(folder), "--device", "cpu", *arguments, "--print-config"]) == 0
    assert comment in capsys.readouterr().out


def test_attention_backends_of_a_model_that_is_not_here_are_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "owner/name", "--print-config"]) == 0
    assert "# attention backends: chosen at the start" in capsys.readouterr().out
