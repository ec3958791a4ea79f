"""Environments with the built wheel and the packages that it asks for, and nothing else.

No index is asked: third-party packages are links into the environment that runs the tests.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

_ROOT = Path(__file__).parents[2]
_UV = str(Path(sys.executable).with_name("uv"))


def build_wheel(directory: Path) -> Path:
    """Build the wheel of the working tree in `directory`."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(command, cwd=_ROOT, check=True, capture_output=True)
    [wheel] = directory.glob("minisgl-*.whl")
    return wheel


def install(wheel: Path, environment: Path, extras: tuple[str, ...] = (), beside: tuple[str, ...] = ()) -> Path:
    """Make a virtual environment with the wheel, the packages that it requires with `extras`, and those of `beside`.
    Returns the directory of its programs."""
    programs = environment / "bin"
    subprocess.run([_UV, "venv", "-q", "--offline", "--python", sys.executable, str(environment)], check=True)
    # The wheel alone: an index would be asked for what it requires.
    options = ["-q", "--offline", "--no-deps", "--python", str(programs / "python")]
    subprocess.run([_UV, "pip", "install", *options, str(wheel)], check=True)
    paths = {"base": str(environment), "platbase": str(environment)}
    site = Path(sysconfig.get_path("purelib", "venv", paths))
    [installed] = metadata.distributions(name="minisgl", path=[str(site)])
    wanted = set(_required(installed, extras))
    for name in beside:
        wanted |= {name, *_required(metadata.distribution(name), ())}
    for name in wanted:
        _link(metadata.distribution(name), site)
    return programs


def _required(distribution: metadata.Distribution, extras: tuple[str, ...]) -> Iterator[str]:
    """Names of all packages that a distribution requires with `extras`, directly or not."""
    seen: set[tuple[str, str]] = set()
    waiting = [(distribution, extra) for extra in ("", *extras)]
    while waiting:
        current, extra = waiting.pop()
        for text in current.requires or ():
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            itself = requirement.name == distribution.name
            if not itself:
                yield requirement.name
            found = distribution if itself else metadata.distribution(requirement.name)
            for inner in ("", *requirement.extras):
                if (requirement.name, inner) not in seen:
                    seen.add((requirement.name, inner))
                    waiting.append((found, inner))


def _link(distribution: metadata.Distribution, site: Path) -> None:
    """Link the files of a distribution into the directory `site`. Its programs are left out."""
    for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        if not (site / top).exists():
            (site / top).symlink_to(Path(str(distribution.locate_file(top))))
