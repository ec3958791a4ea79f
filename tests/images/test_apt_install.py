"""Debian packages of the engine's image: which archive they come from."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

IMAGES = Path(__file__).parents[2] / "images"
SCRIPT = IMAGES / "engine/apt-install"
SOURCES = """\
Types: deb
# http://archive.example/archive/debian/20260918T000000Z
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
# http://archive.example/archive/debian-security/20260918T000000Z
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""
"""As in Docker's images of Debian, except for the names of hosts."""

# Records its arguments, and the contents of the list of sources that they name.
APT_GET = """\
#!/bin/sh
echo "apt-get $*" >>"$LOG"
for argument; do
    case $argument in Dir::Etc::SourceList=*) cat "${argument#*=}" >"$LOG.sources" ;; esac
done
"""


def apt_install(root: Path, sources: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script on a root directory of its own, with an apt-get that installs nothing."""
    (root / "bin").mkdir()
    (root / "bin/apt-get").write_text(APT_GET)
    (root / "bin/apt-get").chmod(0o755)
    (root / "etc/apt/sources.list.d").mkdir(parents=True)
    if sources is not None:
        (root / "etc/apt/sources.list.d/debian.sources").write_text(sources)
    script = SCRIPT.read_text().replace("=/etc/apt", f"={root}/etc/apt")
    environment = {"PATH": f"{root}/bin:{os.environ['PATH']}", "LOG": str(root / "log"), "TMPDIR": str(root)}
    command = ["sh", "-c", script, "apt-install", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_all_packages_are_installed_from_a_snapshot_by_default() -> None:
    for dockerfile in IMAGES.glob("*/*ockerfile"):
        text = dockerfile.read_text()
        assert "apt-get" not in text, dockerfile
        assert text.count("/apt-install ${APT_ARCHIVE} ") == text.count("\nARG APT_ARCHIVE=snapshot\n"), dockerfile


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_packages_come_from_the_snapshot_that_the_base_names(tmp_path: Path, scheme: str) -> None:
    sources = SOURCES.replace("http:", f"{scheme}:")
    done = apt_install(tmp_path, sources, "snapshot", "gcc", "libc6-dev")
    assert done.returncode == 0, done.stderr
    assert (
        (tmp_path / "log.sources").read_text()
        == f"""\
Types: deb
URIs: {scheme}://archive.example/archive/debian/20260918T000000Z
Check-Valid-Until: no
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: {scheme}://archive.example/archive/debian-security/20260918T000000Z
Check-Valid-Until: no
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""
    )
    update, install = (tmp_path / "log").read_text().splitlines()
    assert update.endswith(" update")
    assert install.endswith(" install -y --no-install-recommends gcc libc6-dev")
    for command in (update, install):
        assert "-o Dir::Etc::SourceParts=/dev/null" in command, "other sources of the base have no snapshot"
        assert "-o APT::Update::Error-Mode=any" in command


def test_the_image_keeps_the_sources_of_its_base(tmp_path: Path) -> None:
    apt_install(tmp_path, SOURCES, "snapshot", "gcc")
    assert (tmp_path / "etc/apt/sources.list.d/debian.sources").read_text() == SOURCES
    assert {path.name for path in tmp_path.iterdir()} == {"bin", "etc", "log", "log.sources"}


@pytest.mark.parametrize(
    "sources",
    [
        None,
        "",
        SOURCES.replace("# http://archive.example/archive/debian-security/20260918T000000Z\n", ""),
        SOURCES.replace("20260918T000000Z", "latest"),
        SOURCES.replace("# http", "# See http"),
    ],
    ids=["no file", "empty file", "security without snapshot", "no time", "another comment"],
)
def test_a_base_without_a_snapshot_of_each_archive_is_refused(tmp_path: Path, sources: str | None) -> None:
    done = apt_install(tmp_path, sources, "snapshot", "gcc")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path}/etc/apt/sources.list.d/debian.sources of the base does not name")
    assert "--build-arg APT_ARCHIVE=current" in done.stderr
    assert not (tmp_path / "log").exists()


def test_current_packages_come_from_the_sources_of_the_base(tmp_path: Path) -> None:
    done = apt_install(tmp_path, None, "current", "gcc")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "log").read_text() == "apt-get update\napt-get install -y --no-install-recommends gcc\n"


def test_another_archive_is_refused(tmp_path: Path) -> None:
    done = apt_install(tmp_path, SOURCES, "stable", "gcc")
    assert (done.returncode, done.stderr) == (1, "error: APT_ARCHIVE is 'stable': use snapshot or current\n")
    assert not (tmp_path / "log").exists()
