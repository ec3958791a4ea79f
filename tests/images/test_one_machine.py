"""The examples of `minisgl serve` in containers and as a service."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path

import yaml

from minisgl.cli.main import build_parser
from minisgl.version import __version__

ROOT = Path(__file__).parents[2]
FILES = ROOT / "manifests" / "one-machine"
PAGE = ROOT / "docs" / "containers.md"


def drain_seconds() -> float:
    """Default of --drain-timeout."""
    settings = build_parser().parse_args(["serve", "m"]).settings.all
    [seconds] = [float(setting.default) for setting in settings if setting.key == "drain-timeout"]
    return seconds


def test_compose_runs_a_command_that_is_understood_and_lets_answers_end() -> None:
    [service] = yaml.safe_load((FILES / "compose.yaml").read_text())["services"].values()
    build_parser().parse_args(["serve", *service["command"]])
    assert service["image"].endswith(f"/minisgl/serve:{__version__}")
    assert float(service["stop_grace_period"].removesuffix("s")) > drain_seconds()


def test_the_unit_runs_a_command_that_is_understood_and_lets_answers_end() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((FILES / "minisgl@.service").read_text())
    service = unit["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).name == "minisgl"
    build_parser().parse_args(arguments)
    assert float(service["TimeoutStopSec"]) > drain_seconds()
    assert service["RestartPreventExitStatus"] == "2"


def test_arguments_behind_the_image_are_those_of_serve() -> None:
    lines = re.findall(r"^docker run .*?minisgl[/-]serve(?::(\S+))? (.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(lines) == 2
    for tag, arguments in lines:
        assert tag in ("", __version__)
        build_parser().parse_args(["serve", *shlex.split(arguments)])


def test_variables_of_the_image_are_settings_of_serve() -> None:
    text = (ROOT / "images" / "serve" / "Dockerfile").read_text()
    settings = build_parser().parse_args(["serve", "m"]).settings.all
    names = set(re.findall(r"\b(MINISGL_\w+)=", text))
    assert names == {"MINISGL_HOST"}
    assert names <= {setting.variable for setting in settings}
