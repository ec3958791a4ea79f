"""`make images-push`: what it builds and pushes, with programs that write down their arguments."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from minisgl.version import __version__

ROOT = Path(__file__).parents[2]
REGISTRY = "registry.example.com:5000/team"

_RECORDER = """#!/bin/sh
echo "$*" >>"$RECORD"
case "$1 $2" in {fails}) echo 'denied' >&2; exit 1 ;; esac
"""


def push(
    directory: Path,
    *,
    registry: str = REGISTRY,
    tools: tuple[str, ...] = ("docker",),
    fails: str = "none",
    **options: str,
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the command where these programs build images; returns also their command lines."""
    (directory / "bin").mkdir()
    for name in ("docker", "podman", "buildah"):
        program = directory / "bin" / name
        program.write_text(_RECORDER.format(fails=fails) if name in tools else "#!/bin/sh\nexit 1\n")
        program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{directory}/bin:{os.environ['PATH']}", "RECORD": str(directory / "record")}
    for name in ("IMAGES", "KERNELS", "BUILD_FLAGS"):
        environment.pop(name, None)
    done = subprocess.run(
        [
            "make",
            "--no-print-directory",
            "images-push",
            f"REGISTRY={registry}",
            *(f"{k}={v}" for k, v in options.items()),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    record = directory / "record"
    return done, [line for line in record.read_text().splitlines() if line != "info"] if record.exists() else []


def full_name(image: str) -> str:
    return f"{REGISTRY}/minisgl/{image}:{__version__}"


def test_all_images_of_one_machine_and_of_a_cluster_are_built_and_pushed(tmp_path: Path) -> None:
    done, lines = push(tmp_path)
    assert done.returncode == 0, done.stderr
    names = [full_name(image) for image in ("operator", "frontend", "engine", "serve")]
    assert done.stdout.splitlines() == names
    assert [line for line in lines if line.startswith("push")] == [f"push {name}" for name in names]
    built: set[str] = set()
    for line in lines:
        if line.startswith("build"):
            [dockerfile] = re.findall(r" -f (\S+)", line)
            [image] = re.findall(r" -t (\S+)", line)
            text = (ROOT / dockerfile).read_text()
            for name, value in re.findall(r" --build-arg (\w+)=(\S+)", line):
                assert re.search(rf"^ARG {name}\b", text, re.MULTILINE), line
                assert name == "DEVICE" or value in built, f"{line}: {value} was not built before"
            built.add(image)
        else:
            assert line.split()[1] in built


def test_an_engine_without_compiled_kernels_is_built_from_its_dockerfile_alone(tmp_path: Path) -> None:
    done, lines = push(tmp_path, IMAGES="engine", KERNELS="no", BUILD_FLAGS="--build-arg APT_ARCHIVE=current")
    assert done.returncode == 0, done.stderr
    name = full_name("engine")
    assert lines == [
        f"build --build-arg APT_ARCHIVE=current -f images/engine/Dockerfile -t {name} .",
        f"push {name}",
    ]


def test_the_image_for_one_machine_without_a_gpu_needs_no_other(tmp_path: Path) -> None:
    done, lines = push(tmp_path, IMAGES="serve-cpu")
    assert done.returncode == 0, done.stderr
    name = full_name("serve-cpu")
    assert lines == [f"build -f images/serve/Dockerfile -t {name} --build-arg DEVICE=cpu .", f"push {name}"]


@pytest.mark.parametrize("tool", ["podman", "buildah"])
def test_the_first_program_that_works_builds(tool: str, tmp_path: Path) -> None:
    done, lines = push(tmp_path, tools=(tool,), IMAGES="frontend")
    assert done.returncode == 0, done.stderr
    assert lines[-1] == f"push {full_name('frontend')}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"registry": ""}, "no registry: make images-push REGISTRY="),
        ({"registry": "https://registry.example.com"}, "is not the address of a registry"),
        ({"tools": ()}, "install docker, podman or buildah"),
        ({"IMAGES": "fronted"}, "there is no image 'fronted'"),
        ({"fails": "'push '*", "IMAGES": "operator"}, "was not pushed: see above. A registry may need 'docker login'"),
    ],
)
def test_what_cannot_be_pushed_is_one_error(options: dict[str, str], words: str, tmp_path: Path) -> None:
    done, _ = push(tmp_path, **options)  # type: ignore[arg-type]
    assert done.returncode != 0
    assert words in done.stderr
    assert done.stdout == ""
