"""The base of the images: one digest in all Dockerfiles, and the command that renews it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

IMAGES = Path(__file__).parents[2] / "images"
NEW = f"sha256:{'5e' * 32}"
TAG = "docker.io/library/python:3.11-slim-bookworm"


def bases(images: Path) -> dict[str, list[str]]:
    """Lines with the default of BASE, by image."""
    found = {}
    for dockerfile in images.glob("*/Dockerfile"):
        found[dockerfile.parent.name] = re.findall("^ARG BASE=.*", dockerfile.read_text(), re.MULTILINE)
    return found


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Copy of the images' directory."""
    return shutil.copytree(IMAGES, tmp_path / "images")


def lock_base(images: Path, programs: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the command where no other program than these can ask a registry; values are their shell code."""
    path = images.parent / "bin"
    path.mkdir()
    for name in ("bash", "dirname", "mv", "sed", "sh"):
        program = shutil.which(name)
        assert program is not None
        (path / name).symlink_to(program)
    for name, code in programs.items():
        (path / name).write_text(f"#!{path}/sh\n{code}\n")
        (path / name).chmod(0o755)
    command = [path / "bash", images / "lock-base"]
    return subprocess.run(command, env={"PATH": str(path)}, capture_output=True, text=True, check=False)


def test_all_images_have_the_same_base_which_a_digest_fixes() -> None:
    found = bases(IMAGES)
    assert found.keys() == {"engine", "frontend", "operator", "serve"}
    [line] = {line for lines in found.values() for line in lines}
    assert re.fullmatch(rf"ARG BASE={re.escape(TAG)}@sha256:[0-9a-f]{{64}}", line)


@pytest.mark.parametrize(
    ("program", "asked"),
    [
        ("docker", f"buildx imagetools inspect --format {{{{.Manifest.Digest}}}} {TAG}"),
        ("crane", f"digest {TAG}"),
        ("skopeo", f"--override-os linux inspect --no-tags --format {{{{.Digest}}}} docker://{TAG}"),
    ],
)
def test_the_digest_of_the_tag_is_written_into_all_dockerfiles(images: Path, program: str, asked: str) -> None:
    before = {path: path.read_text() for path in images.glob("*/*ockerfile")}
    done = lock_base(images, {program: f"case \"$*\" in '{asked}') echo {NEW};; 'buildx version');; *) exit 1;; esac"})
    assert (done.returncode, done.stdout) == (0, f"{TAG}@{NEW}\n"), done.stderr
    assert bases(images) == {name: [f"ARG BASE={TAG}@{NEW}"] for name in bases(IMAGES)}
    for path, text in before.items():
        assert re.sub("@sha256:[0-9a-f]{64}", f"@{NEW}", text) == path.read_text()


def test_docker_without_buildx_is_not_asked(images: Path) -> None:
    done = lock_base(images, {"docker": "exit 1", "crane": f"echo {NEW}"})
    assert done.returncode == 0, done.stderr
    assert bases(images)["engine"] == [f"ARG BASE={TAG}@{NEW}"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("echo 'toomanyrequests' >&2; exit 1", "toomanyrequests\nerror: 'crane digest"),
        (f"echo {NEW}; exit 1", "error: 'crane digest"),
        ("true", "printed '' instead of a digest"),
        ("echo sha256:5e5e", "printed 'sha256:5e5e' instead of a digest"),
        (f"echo {NEW}; echo {NEW}", "instead of a digest"),
        (f"echo '{NEW}|e rm'", "instead of a digest"),
    ],
)
def test_nothing_changes_when_the_registry_names_no_digest(images: Path, answer: str, message: str) -> None:
    before = {path: path.read_bytes() for path in images.rglob("*") if path.is_file()}
    done = lock_base(images, {"crane": answer})
    assert done.returncode == 1
    assert message in done.stderr
    assert {path: path.read_bytes() for path in images.rglob("*") if path.is_file()} == before


def test_without_a_program_that_asks_a_registry_the_error_names_those_that_can(images: Path) -> None:
    done = lock_base(images, {})
    assert done.returncode == 1
    assert "install docker with buildx, crane or skopeo" in done.stderr
