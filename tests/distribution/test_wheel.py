"""The wheel in an environment with its base dependencies alone; `test_quickstart` serves a model from it with more."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from minisgl.cli.main import build_parser
from minisgl.extras import EXTRAS
from support.cli_reference import commands
from support.wheel import build_wheel, install

_ROOT = Path(__file__).parents[2]

_RUN_ALL = """
import contextlib, io, json, sys

from minisgl.cli.main import main
from minisgl_operator.__main__ import main as operator

results = []
for program, *arguments in json.loads(sys.argv[1]):
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            status = {"minisgl": main, "minisgl-operator": operator}[program](arguments)
        except SystemExit as ended:
            status = ended.code
    results.append((status, output.getvalue(), errors.getvalue()))
print(json.dumps(results))
"""
"""Runs commands in one process, because each start of Python costs as much as a hundred of them."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the programs of an environment without extras."""
    directory = tmp_path_factory.mktemp("wheel")
    return install(build_wheel(directory), directory / "base")


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([program, *arguments], env=environment, capture_output=True, text=True, check=False)


def run_all(base: Path, lines: list[list[str]]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each command line."""
    done = run(base / "python", "-c", _RUN_ALL, json.dumps(lines))
    assert done.returncode == 0, done.stderr
    return [(status, output, errors) for status, output, errors in json.loads(done.stdout)]


def test_programs_start_without_extras(base: Path) -> None:
    version = run(base / "minisgl", "version")
    assert version.returncode == 0, version.stderr
    assert "msgspec" in version.stdout
    assert "torch" not in version.stdout
    help = run(base / "minisgl-operator", "--help")
    assert (help.returncode, help.stderr) == (0, "")


def test_every_command_has_its_help_without_extras(base: Path) -> None:
    lines = [[*name.split(), "--help"] for name, _ in commands(build_parser())]
    lines += [["minisgl-operator", command, "--help"] for command in ("run", "crd")]
    for line, (status, output, errors) in zip(lines, run_all(base, lines), strict=True):
        assert (status, errors) == (0, ""), line
        assert output.startswith(f"usage: {' '.join(line[:-1])} ")


def test_a_command_without_its_packages_names_the_extra_that_brings_them(base: Path, tmp_path: Path) -> None:
    model = str(tmp_path)
    lines = {
        "serve": (
            ["minisgl", "serve", model],
            ["minisgl", "chat", model],
        ),
        "engine": (
            ["minisgl", "engine", model],
            ["minisgl", "models", "check", model],
            ["minisgl", "models", "demo", model],
            ["minisgl", "models", "agent", model],
            ["minisgl", "models", "tiny", model],
            ["minisgl", "models", "dummy", "qwen3-0.6b", model],
            ["minisgl", "kernels", "build"],
            ["minisgl", "bench", "offline"],
            ["minisgl", "bench", "comm"],
        ),
        "frontend": (
            ["minisgl", "frontend", "--engines", "engines"],
            ["minisgl", "chat", "http://127.0.0.1:1"],
            ["minisgl", "models", "fetch", "owner/name", model],
            ["minisgl", "bench", "serve"],
        ),
        "operator": (
            ["minisgl-operator", "run", "--namespace=n", "--engine-image=e", "--frontend-image=f"],
            ["minisgl-operator", "crd"],
        ),
    }
    all_lines = [line for each in lines.values() for line in each]
    results = iter(run_all(base, all_lines))
    for extra, each in lines.items():
        for line in each:
            status, output, errors = next(results)
            assert (status, output) == (1, ""), line
            assert errors.count("\n") == 1, line
            assert errors.endswith(f"pip install 'minisgl[{extra}]'\n"), line


def test_modules_of_extras_are_those_of_the_project() -> None:
    extras = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    distributions = metadata.packages_distributions()

    def packages(extra: str) -> set[str]:
        """Names of the distributions of an extra, with those of the extras in it."""
        required = [Requirement(text) for text in extras[extra]]
        own = {requirement.name for requirement in required if requirement.name != "minisgl"}
        return own.union(*(packages(inner) for each in required if each.name == "minisgl" for inner in each.extras))

    for extra, modules in EXTRAS.items():
        found = {canonicalize_name(_owner(module, distributions)) for module in modules}
        assert found == packages(extra), extra


def _owner(module: str, distributions: Mapping[str, list[str]]) -> str:
    """Return the distribution with a module. Several may have parts of the package around it."""
    found = distributions[module.partition(".")[0]]
    if "." not in module:
        return found[0]
    folder = module.replace(".", "/")
    return next(name for name in found if any(file.parent.as_posix() == folder for file in metadata.files(name) or ()))
