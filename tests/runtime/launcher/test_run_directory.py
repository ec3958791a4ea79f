from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest

from minisgl.launcher.run_directory import LONGEST_SOCKET_NAME, remove_stale, run_directory


def test_the_directory_is_private_and_is_removed_at_the_end(tmp_path: Path) -> None:
    with run_directory(tmp_path) as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "socket").touch()
    assert list(tmp_path.iterdir()) == []


def test_the_directory_is_removed_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), run_directory(tmp_path):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_only_directories_without_a_live_launcher_are_removed(tmp_path: Path) -> None:
    dead = tmp_path / "minisgl-dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "socket").touch()
    starting = tmp_path / "minisgl-no-lock-yet"
    starting.mkdir()
    stranger = tmp_path / "somebody-else"
    stranger.mkdir()
    (stranger / "lock").touch()
    (tmp_path / "minisgl-link").symlink_to(stranger)
    with run_directory(tmp_path) as alive:
        assert not dead.exists(), "a start sweeps"
        assert remove_stale(tmp_path) == []
        assert {alive, starting, stranger} < set(tmp_path.iterdir())


def test_socket_paths_fit_when_the_temporary_directory_has_a_long_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with run_directory() as path:
        assert len(str(path / ("s" * LONGEST_SOCKET_NAME))) <= 107
