"""Completion in the shell. zsh runs the script for bash; fish is tested where it is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from minisgl.cli.main import main

_COMPLETE = """
source "$1"
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_minisgl
printf '%s\\n' "${COMPREPLY[@]}"
"""

_CASES = [
    ("minisgl mod", {"models"}),
    ("minisgl models ch", {"check"}),
    ("minisgl serve m --max-r", {"--max-running", "--max-restarts"}),
    ("minisgl serve m --device ", {"auto", "cpu", "cuda"}),
    ("minisgl bench serve --api c", {"chat", "completions"}),
    ("minisgl completion f", {"fish"}),
]
# Bash ends a word before and after "=", zsh does not.
_VALUES_IN_BASH = [
    ("minisgl serve m --device = c", {"cpu", "cuda"}),
    ("minisgl serve m --device =", {"auto", "cpu", "cuda"}),
]
_VALUES_IN_ZSH = [("minisgl serve m --device=c", {"--device=cpu", "--device=cuda"})]
_FILES = ["minisgl serve my-mo", "minisgl serve --config my-mo"]


def script(shell: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """File with the completion for a shell, in a directory with a model."""
    assert main(["completion", shell]) == 0
    (directory / "my-model").touch()
    path = directory / "completion"
    path.write_text(capsys.readouterr().out)
    return path


def test_bash_completes_commands_flags_and_choices_and_otherwise_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script("bash", tmp_path, capsys)
    assert "complete -o default " in path.read_text()
    cases = [*_CASES, *_VALUES_IN_BASH, *_VALUES_IN_ZSH, *((line, set[str]()) for line in _FILES)]
    for line, expected in cases:
        command = ["bash", "-c", _COMPLETE, "bash", str(path), *line.split(" ")]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert (set(done.stdout.split()), done.stderr) == (expected, ""), line


def test_zsh_gets_the_script_for_bash(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    bash = capsys.readouterr().out
    main(["completion", "zsh"])
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert "bashcompinit" in first
    assert rest == bash


def test_fish_completes_commands_flags_choices_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script("fish", tmp_path, capsys)
    lines = path.read_text().splitlines()
    assert "complete -c minisgl -n '__minisgl_at minisgl models' -f -a check" in lines
    [device] = [line for line in lines if "'__minisgl_at minisgl serve' -l device " in line]
    assert " -x -a 'auto cpu cuda' -d 'device that runs the model" in device
    if (fish := shutil.which("fish")) is None:
        return
    for line, expected in [*_CASES, *((line, {"my-model"}) for line in _FILES)]:
        command = [fish, "-N", "-c", f"source {path}; complete -C '{line}'"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert {each.split("\t")[0] for each in done.stdout.splitlines()} >= expected, line
